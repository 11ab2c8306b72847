"""What is cut into parts is cut as it is held, and widened then; if no element has two readers."""

import re

import jax
import jax.numpy as jnp
import pytest

from mpjax import pods
from mpjax._autocast import autocast, hints

KEYS = jax.random.split(jax.random.key(0), 3)
W = jax.random.normal(KEYS[0], (16, 32)) / 4
V = jax.random.normal(KEYS[1], (16, 16)) / 4
X = jax.random.normal(KEYS[2], (8, 16))

APART = {
    "split": lambda y: jnp.split(y, 2, -1),
    "two slices": lambda y: (y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]),
    "slices with a gap": lambda y: (y[:, :8], y[:, 24:]),
    "slices of another axis, too": lambda y: (y[:4, :16], y[4:, 16:]),
    "slices in turns": lambda y: (y[:, ::2], y[:, 1::2]),
    "one transposed": lambda y: (y.T[:16], 2.0),
    "one reversed": lambda y: (y[:, ::-1], 2.0),
}
TOGETHER = {
    "slices that overlap": lambda y: (y[:, :16], y[:, 15:31]),
    "the same slice": lambda y: (y[:, :16], y[:, :16] + 1.0),
    "slices in steps that meet": lambda y: (y[:, ::2], y[:, ::3][:, :1]),
    "slices in the same turn": lambda y: (y[:, ::2], y[:, 2:16:2][:, :1]),
    "a slice and the whole": lambda y: (y[:, :16], jnp.sum(y)),
    "a split and the whole": lambda y: (jnp.split(y, 2, -1)[0], jnp.max(y)),
}


def gated(parts):
    def loss(w, v, x):
        gate, let_through = parts(x @ w)
        y = jax.nn.sigmoid(gate) * let_through
        return jnp.sum(y**2) * jnp.sum(v)

    return loss


def cuts(fun):
    """Returns the dtypes of all parts and whole values that are moved forward."""
    text = str(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(W, V, X))
    return set(re.findall(r":(\w+)\[[^=]* = (?:split|slice|transpose|rev)\[", text))


@pytest.mark.parametrize("case", APART)
def test_what_is_cut_into_parts_is_widened_after_it_is_cut(case):
    assert cuts(gated(APART[case])) == {"bf16"}
    with hints.without("moved_low"):
        assert "f32" in cuts(gated(APART[case]))


@pytest.mark.parametrize("case", TOGETHER)
def test_what_has_two_readers_is_widened_before_and_its_cotangents_are_summed_in_float32(case):
    fun = gated(TOGETHER[case])
    assert "f32" in cuts(fun)
    text = str(jax.make_jaxpr(jax.grad(autocast(fun, "bf16-mixed")))(W, V, X))
    assert set(re.findall(r":(\w+)\[8,32\] = add_any", text)) == {"f32"}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("case", APART | TOGETHER)
def test_no_bit_of_a_result_or_gradient_depends_on_it(case, policy):
    def found():
        fun = gated((APART | TOGETHER)[case])  # a new one, of which nothing is remembered
        return jax.value_and_grad(autocast(fun, policy), (0, 1, 2))(W, V, X)

    here = found()
    with hints.without("moved_low"):
        there = found()
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        assert jnp.array_equal(a, b)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("case", ["split", "two slices"])
def test_a_tpu_stores_no_gate_in_float32(case):
    mesh = pods.get_topology("v5e-4").make_mesh({"x": -1})

    def array(shape, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    args = array((512, 2048)), array((1024, 512)), array((4 * 2048, 512), "x")

    def accessed():
        def loss(up, down, x):
            gate, let_through = APART[case](x @ up)
            return jnp.mean((x + (jax.nn.sigmoid(gate) * let_through) @ down) ** 2)

        step = jax.jit(jax.value_and_grad(autocast(loss, "bf16-mixed")))
        return step.lower(*args).compile().cost_analysis()["bytes accessed"]

    here = accessed()
    with hints.without("moved_low"):
        assert here < 0.85 * accessed()


def test_a_value_in_many_parts_is_widened_before():
    """Two by two, comparing a thousand parts would take longer than a program's compilation."""

    def loss(w, v, x):
        y = x @ jnp.concatenate([w, w], -1)
        return sum(jnp.sum(jnp.exp(y[:, i : i + 1])) for i in range(40)) * jnp.sum(v)

    assert cuts(loss) == {"f32"}
