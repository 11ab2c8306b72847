"""The local error names the layer that was degraded; the accumulated one is that of two runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _hinted import hints
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.numerics import compare

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")

RNG = np.random.default_rng(0)
WS = [jnp.asarray(RNG.normal(size=(8, 8)).astype(np.float32) / 3) for _ in range(5)]
X = RNG.normal(size=(16, 8)).astype(np.float32)


def degraded(at, kind):
    """Returns a network of which one layer rounds more than it should."""

    def layer(i, w, x):
        h = x @ w
        if i == at and kind == "reduce_precision":
            h = lax.reduce_precision(h, 8, 3)
        if i == at and kind == "float8":
            h = h.astype(jnp.float8_e4m3fn).astype(h.dtype)
        if i == at and kind == "bfloat16 sum":
            h = sum(jnp.split(h.astype(jnp.float8_e5m2).astype(jnp.bfloat16), 2, -1))
            h = jnp.concatenate([h, h], -1).astype(jnp.float32)
        return jnp.tanh(h)

    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = layer(i, w, x)
        return jnp.mean(x**2)

    return loss


CASES = list(itertools.product(range(5), ("reduce_precision", "float8"), ("float32", "bf16-mixed")))


@pytest.mark.parametrize(
    ("at", "kind", "policy"),
    [c if i % 11 == 0 else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(CASES)],
)
def test_the_layer_that_was_degraded_has_the_largest_local_error(at, kind, policy):
    assert len(CASES) == 20
    report = compare(degraded(at, kind), policy)(WS, X)
    forward = [e for e in report.modules if e.phase == "forward"]
    assert forward[0].module == f"layer_{at}"
    assert forward[0].local > 4 * forward[1].local


@pytest.mark.parametrize("sharded", [False, True])
def test_accumulated_errors_are_those_of_two_runs(devices, sharded):
    loss = degraded(9, "none")
    if sharded:
        mesh, one = Mesh(np.array(devices[:4]), "d"), loss
        mean = lambda *args: lax.pmean(one(*args), "d")  # noqa: E731
        loss = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    report = compare(loss, "bf16-mixed")(WS, X)
    assert ("compiling" in report.seconds) == sharded  # by operations: 1500 compilations, 60 s
    # Compiled, as what is compared is: a step by itself may be rounded where a fused one is not.
    low = jax.jit(jax.grad(mpjax.autocast(loss, "bf16-mixed")))(WS, X)
    full = jax.jit(jax.grad(loss))(WS, X)
    for i, (a, b) in enumerate(zip(low, full, strict=True)):
        want = float(jnp.abs(a - b).sum() / jnp.abs(b).sum())
        assert report.gradients[str(i)] == pytest.approx(want, rel=0.05)
    assert report.gradient == max(report.gradients.values())


LOOPS = {
    "scan": lambda f, x: lax.scan(lambda h, _: (f(h), None), x, None, length=3)[0],
    "while": lambda f, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[
        1
    ],
    "cond": lambda f, x: lax.cond(True, f, lambda x: x, x),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_and_branches_inside_a_shard_map_are_compared(loop, devices):
    def shard(w, x):
        x = lax.stop_gradient(x @ w) if loop == "while" else x
        out = LOOPS[loop](lambda h: jnp.tanh(h @ lax.stop_gradient(w)), x)
        return lax.pmean(jnp.mean((out @ w) ** 2), "d")

    mesh = Mesh(np.array(devices[:4]), "d")
    loss = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    report = compare(loss, "bf16-mixed")(WS[0], X)
    low = jax.jit(jax.grad(mpjax.autocast(loss, "bf16-mixed")))(WS[0], X)
    full = jax.jit(jax.grad(loss))(WS[0], X)
    assert report.gradient == pytest.approx(
        float(jnp.abs(low - full).sum() / jnp.abs(full).sum()), rel=0.05
    )


def test_float32_against_itself_has_no_error_and_a_loop_carries_both():
    def loss(w, x):
        def body(c, _):
            with jax.named_scope("inside"):
                return jnp.tanh(c @ w), None

        return jnp.mean(lax.scan(body, x, None, length=6)[0] ** 2)

    same = compare(loss, "float32")(WS[0], X)
    assert all(e.local == 0 and e.accumulated == 0 for e in same.modules)
    low = compare(loss, "bf16-mixed")(WS[0], X)
    inside = next(e for e in low.modules if (e.module, e.phase) == ("inside", "forward"))
    assert 2**-10 < inside.local < 2**-7
    want = jax.grad(mpjax.autocast(loss, "bf16-mixed"))(WS[0], X) - jax.grad(loss)(WS[0], X)
    assert low.gradient == pytest.approx(
        float(jnp.abs(want).sum() / jnp.abs(jax.grad(loss)(WS[0], X)).sum()), rel=0.05
    )


def test_against_float64_the_errors_of_float32_show():
    with jax.enable_x64(True):
        x = X.astype(np.float32)
        report = compare(degraded(9, "none"), "float32", reference="float64")(WS, x)
    assert 0 < report.gradient < 2**-18


def attention(params, x):
    """A softmax does not see what the bias of the keys adds: its gradient is a sum that cancels."""
    with jax.named_scope("attention"):
        keys = x @ params["w"] + params["bias"]
        return jnp.mean((jax.nn.softmax(x @ keys.T) @ x @ params["out"] + params["last"]) ** 2)


def test_a_gradient_that_is_0_but_for_rounding_is_marked_and_relative_to_its_terms():
    policy = "16-mixed"  # behind the sum there is the loss scale, too
    params = {"w": WS[0], "bias": jnp.full(8, 0.1), "out": WS[1], "last": jnp.full(8, 0.1)}
    with hints.without("attended"):  # one operation, in which nothing is rounded on a CPU
        report = compare(attention, policy)(params, X)
    assert report.noise == ("bias",)
    assert 0 < report.gradients["bias"] < 2**-6
    assert report.gradient < 2**-4
    assert all(e.local < 2**-6 and e.accumulated < 2**-4 for e in report.modules)
    low, full = (
        jax.grad(fun)(params, X)["bias"] for fun in (mpjax.autocast(attention, policy), attention)
    )
    assert jnp.abs(low - full).sum() > 10 * jnp.abs(full).sum()  # what misled
    assert "bias  (0 but for rounding: of its terms)" in str(report)


def test_it_prints_on_a_screen():
    report = compare(degraded(2, "float8"), "bf16-mixed")(WS, X)
    text = str(report)
    assert len(text.splitlines()) < 40
    assert text.index("layer_2") < text.index("layer_0")
    assert report.to_dict()["modules"][0]["module"] == "layer_2"
    assert "<table>" in report._repr_html_()
