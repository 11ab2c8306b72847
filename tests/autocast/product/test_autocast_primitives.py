"""Every primitive that moves, updates or holds values: bound on low ones, or as it was traced."""

import jax
import jax.numpy as jnp
import pytest
from _differential import equations
from _small import BF16, W, X, distance, loss, together

from mpjax import autocast, explain

# -- updates of a part ---------------------------------------------------------------------------

ROWS = jnp.array([0, 0, 2])
UPDATES = {
    "set": lambda x, w: (x @ w).at[0].set(0.5) @ w,
    "subtract": lambda x, w: (x @ w).at[ROWS].subtract((x @ w)[3:6]) @ w,
    "multiply": lambda x, w: (x @ w).at[0].multiply(2.0) @ w,
    "max of rows": lambda x, w: (x @ w).at[ROWS].max((x @ w)[3:6]) @ w,
    "power": lambda x, w: (x @ w).at[0].power(2.0) @ w,
}
APPLIED = {
    "apply": lambda x, w: (x @ w).at[0].apply(jnp.tanh) @ w,
    "apply what rounding would ruin": lambda x, w: (x @ w).at[0].apply(lambda v: jnp.sin(9 * v)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_updates_of_a_part_of_a_products_result(policy):
    def computed(name, fun):
        fast = autocast(fun, policy)
        mapped = jax.vmap(fast, (0, None))
        derived = (fast, fun) if name in UPDATES else ()  # JAX has no derivative of `apply`
        return lambda x, w: (
            (fast(x, w), mapped(x[None], w)[0], fun(x, w)),
            [jax.grad(loss(f), (0, 1))(x, w) for f in derived],
        )

    programs = {name: computed(name, fun) for name, fun in (UPDATES | APPLIED).items()}
    for name, ((*outs, want), grads) in together(programs, X, W).items():
        assert max(distance(out, want) for out in outs) < 16 * BF16, name
        assert not grads or distance(*grads) < 16 * BF16, name


def test_a_function_applied_to_a_part_reads_what_is_not_rounded():
    fast = autocast(APPLIED["apply what rounding would ruin"], "bf16-mixed")
    (product,) = [
        e for e in equations(jax.make_jaxpr(fast)(X, W).jaxpr) if e.primitive.name == "dot_general"
    ]
    assert product.outvars[0].aval.dtype == jnp.float32
    rows = explain(APPLIED["apply"], "bf16-mixed")(X, W).rows
    assert {r.operation: r.reason for r in rows}["scatter"] == "its function is unknown: in float32"


# -- moves that give several results ---------------------------------------------------------------

GATES = {
    "split": lambda y: jnp.split(y, 2, axis=1),
    "unstack": lambda y: jnp.unstack(y.reshape(-1, 2, 8), axis=1),
    "unpacked": lambda y: tuple(y.reshape(-1, 2, 8).transpose(1, 0, 2)),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_are_low_however_they_are_cut_out(name):
    def fun(x, w):
        gate, value = GATES[name](x @ w)
        return (jax.nn.silu(gate) * value) @ w[:8]

    large = jnp.tile(X, (64, 1))  # a small group is not computed again
    residuals = jax.tree.leaves(jax.vjp(autocast(fun, "bf16-mixed"), large, W)[1])
    sizes = {leaf.size for leaf in residuals if leaf.dtype == jnp.float32 and leaf.ndim}
    assert sizes <= {large.size, W.size}  # the operands: nothing else is kept in float32
    rows = {r.operation: r.dtype for r in explain(fun, "bf16-mixed")(X, W).rows}
    assert rows["mul"] == "bf16"
