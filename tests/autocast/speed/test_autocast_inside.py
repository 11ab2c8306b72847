"""A gradient that a function takes itself: what its backward pass reads, and what a GPU stores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _hinted import hints
from _planned import Planned

from mpjax import autocast

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=s).astype(np.float32) for s in ((64, 32), (32, 32)))
B = np.zeros(32, np.float32)
COMPARES = ("gt", "lt", "ge", "le", "eq", "ne", "is_finite")


def network(act):
    def loss(w, b, x):
        for _ in range(2):
            x = act(x @ w + b)
        return jnp.sum(x @ w)

    return jax.value_and_grad(loss, (0, 1))


def compared(fun, policy):
    """The dtypes of the large floats that comparisons of a program read."""
    made = equations(jax.make_jaxpr(autocast(fun, policy))(W, B, X).jaxpr)
    read = [x.aval for eqn in made if eqn.primitive.name in COMPARES for x in eqn.invars]
    return {x.dtype.name for x in read if x.size == X.size}


@pytest.mark.parametrize(("policy", "low"), [("bf16-mixed", "bfloat16"), ("16-mixed", "float16")])
def test_a_mask_is_asked_of_the_value_that_is_stored(policy, low):
    assert compared(network(jax.nn.relu), policy) == {low}


def test_a_value_that_is_not_stored_is_compared_as_it_is():
    assert compared(lambda w, b, x: jnp.tanh(x @ w + b) > 0.5, "bf16-mixed") == {"float32"}


def test_a_number_that_16_bits_do_not_hold_is_compared_in_float32():
    def above(w, b, x):
        y = x @ w
        return jnp.where(y > 0.1, y, 0.0) @ w

    assert compared(above, "bf16-mixed") == {"float32"}


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.gelu])
def test_a_gpu_sums_for_a_bias_the_cotangent_that_it_stores_for_products(act):
    planned = Planned(network(act), W, B, X)
    sums = {d.eqn.invars[0] for d in planned.decisions("reduce_sum")}
    marked = {v for group in planned.groups for v in group.marks.summed}
    assert len(marked) == 2
    assert marked < sums


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_law_a_cotangent_that_is_stored_low_changes_no_bit_on_a_cpu(policy):
    def run():
        fun = network(lambda x: jax.nn.gelu(x))
        return jax.tree.leaves(jax.jit(autocast(fun, policy))(W, B, X))

    with hints.without("stored_cotangent"):
        without = run()
    for a, b in zip(run(), without, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_program_for_a_gpu_stores_it():
    def barriers():
        traced = jax.jit(autocast(network(jax.nn.relu), "bf16-mixed")).trace(W, B, X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count("stablehlo.optimization_barrier")

    with_hint = barriers()
    with hints.without("stored_cotangent"):
        assert barriers() == with_hint - 2


def turns(w, x):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=4)[0] @ w)


def test_a_loop_stacks_in_float32_where_the_gradient_is_inside():
    def stacked(fun):
        eqns = equations(jax.make_jaxpr(fun)(W, X).jaxpr)
        made = [v.aval for e in eqns if e.primitive.name == "scan" for v in e.outvars]
        return [x.dtype.name for x in made if x.shape == (4, *X.shape)]

    assert "float32" in stacked(autocast(jax.grad(turns), "bf16-mixed"))
    assert stacked(jax.grad(autocast(turns, "bf16-mixed"))).count("float32") == 0
