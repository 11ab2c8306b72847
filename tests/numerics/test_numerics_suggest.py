"""The policy that is suggested keeps gradients within what was asked for, with few modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from benchmarks.measure.suggested import exact_gradients, language_model, worst_error
from benchmarks.networks import NETWORKS
from mpjax._policies.spelling import of_operation
from mpjax.numerics import suggest
from mpjax.numerics._search import Choice

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")

RNG = np.random.default_rng(0)
WS = [jnp.asarray(RNG.normal(size=(8, 8)).astype(np.float32) / 3) for _ in range(3)]
X = RNG.normal(size=(16, 8)).astype(np.float32)


def loss(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
            if i == 1:  # sensitive: a small difference of large numbers
                x = (x + 200.0) @ jnp.eye(8) - 200.0
    with jax.named_scope("head"):
        return jnp.mean(x**2)


@functools.cache
def gradients(policy):
    return jax.jit(jax.grad(mpjax.autocast(loss, policy)))(WS, X)


def error(policy):
    low, full = gradients(policy), gradients("float32")
    pairs = zip(low, full, strict=True)
    return max(float(jnp.abs(a - b).sum() / jnp.abs(b).sum()) for a, b in pairs)


def test_the_sensitive_module_is_kept_and_the_tolerance_is_met():
    assert error("bf16-mixed") > 0.05
    found = suggest(loss, "bf16-mixed", tolerance=0.05)(WS, X)
    assert found.full == ("layer_1",)
    assert {"layer_0", "layer_2"} <= set(found.low)
    assert error(found.policy) == pytest.approx(
        found.error, rel=0.1
    )  # XLA fuses the two differently
    assert found.error <= 0.05
    assert found.bytes["layer_1"] > 0
    assert len(found.tried) >= 3
    assert "layer_1" in str(found)
    assert found.to_dict()["policy"]["rules"][0][0] == "layer_1"


def test_a_module_is_kept_with_all_that_is_below_it():
    modules = ("net", "net/a", "net/a/b", "other")
    choice = Choice(mpjax.get_policy("bf16-mixed"), modules, False)
    assert choice.low(("net/a",)) == ("net", "other")
    assert choice.policy(("net/a/b", "net/a")).to_dict()["rules"][0][0] == "net/a"
    assert len(choice.policy(("net/a/b", "net/a")).rules) == 1  # the other could never decide
    back = Choice(choice.policy_low, modules, True).policy(("net/a",))
    paths = [of_operation(tuple(m.split("/"))) for m in modules]
    dtypes = [str(back.policy_for(path).compute_dtype) for path in paths]
    assert dtypes == ["bfloat16", "float32", "float32", "bfloat16"]
    assert back.default == mpjax.get_policy("float32")


def test_a_float32_model_is_told_what_may_go_low_and_what_that_saves():
    many = np.tile(X, (16, 1))  # arrays that are computed again in the backward pass
    found = suggest(loss, "bf16-mixed", tolerance=0.05, reverse=True)(WS, many)
    assert found.full == ("layer_1",)
    assert set(found.low) == set(found.bytes) == {"layer_0", "layer_2"}
    assert error(found.policy) == pytest.approx(found.error, rel=0.1)
    assert found.policy.default == mpjax.get_policy("float32")
    assert found.kept["low"] < found.kept["suggested"] < found.kept["float32"]
    assert all(saved >= 0 for saved in found.bytes.values())
    assert "may go low" in str(found)


def shifted(params, x):
    """A softmax does not see `shift`: its gradient is 0 but for rounding."""
    with jax.named_scope("scores"):
        scores = x @ params["w"] + params["shift"]
    with jax.named_scope("head"):
        return jnp.mean(jax.nn.softmax(scores)[:, 0] ** 2)


def test_a_gradient_that_is_rounding_in_float32_too_is_left_out():
    params = {"w": WS[0], "shift": jnp.float32(0.3)}
    found = suggest(shifted, "bf16-mixed", tolerance=0.1)(params, X)
    assert found.noise == ("shift",)
    assert found.full == ()
    assert "rounding in float32 too: shift" in str(found)
    with pytest.raises(ValueError, match=r"float32 itself misses 1.0e-01(.|\n)*tolerance="):
        suggest(
            lambda shift, x: shifted({"w": WS[0], "shift": shift}, x), "bf16-mixed", tolerance=0.1
        )(params["shift"], X)


def unet():
    net = NETWORKS["unet"]("tiny")
    return net.written(jnp.float32), net.init(jax.random.key(0)), net.sample(jax.random.key(1))


@pytest.mark.slow
@pytest.mark.standard_promotion("Flax's layers promote")
@pytest.mark.parametrize(
    ("network", "tolerance", "reverse"),
    [(language_model, 0.01, False), (language_model, 0.01, True), (unet, 0.0095, False)],
)
def test_gradients_of_networks_stay_within_the_tolerance_of_float64(network, tolerance, reverse):
    loss_fn, params, batch = network()
    found = suggest(loss_fn, "bf16-mixed", tolerance=tolerance, reverse=reverse)(params, batch)
    assert found.full
    assert found.low

    exact = exact_gradients(loss_fn, params, batch)
    before, after = (
        worst_error(loss_fn, policy, params, batch, exact, found.noise)
        for policy in ("bf16-mixed", found.policy)
    )
    assert before > tolerance
    assert after <= 1.1 * tolerance  # XLA fuses the two differently
