"""What a norm gives is low where it is stored before a product, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest
from _planned import Planned, norms, states
from _samples import normal
from jax import lax

from mpjax import autocast

KEY = jax.random.key(0)
X, W = normal(0, 16, 32), normal(1, 32, 32, scale=1 / 6)
SCALE = jnp.ones(32)
TABLE, ROWS = normal(2, 50, 32), jnp.arange(16, dtype=jnp.int32)


def rms(y, scale):
    return y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * scale


def layer(y, scale):
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6) * scale


def made(fun, *args):
    """Whether a norm made the last value of `fun`."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return jaxpr.outvars[0] in norms.results(jaxpr.eqns)


@pytest.mark.parametrize("norm", [rms, layer])
def test_norms_are_known_by_what_they_compute(norm):
    assert made(norm, X, SCALE)
    assert made(lambda x, s: jax.nn.silu(norm(x, s) + s), X, SCALE)
    assert made(lambda x, s: jax.jit(norm)(x, s).T, X, SCALE)

    def watched(x, scale):
        jax.debug.callback(lambda _: None, x)
        return norm(x, scale)

    assert made(watched, X, SCALE)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, s: x / jnp.sum(x) * s,  # no root of a statistic
        lambda x, s: x * lax.rsqrt(x) * s,
        lambda x, s: x * lax.rsqrt(rms(x, s)),
        lambda x, s: jax.nn.softmax(x),
        lambda x, s: 0.01 * rms(x, s),  # a step
        lambda x, s: s[0] * rms(x, s),
        lambda x, s: jnp.exp(rms(x, s)),
        lambda x, s: rms(x, s) + x,  # a stream
    ],
)
def test_other_values_are_no_norms(fun):
    assert not made(fun, X, SCALE)


def results(fun, *args):
    """The dtypes of what is as large as X and computed by a group, under autocast."""
    jaxpr = jax.make_jaxpr(autocast(fun, "bf16-mixed"))(*args).jaxpr
    groups = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "remat2"]
    shapes = [v.aval for eqn in groups for v in eqn.outvars]
    return {str(aval.dtype) for aval in shapes if aval.shape == X.shape}


def test_a_stream_of_normalised_branches_is_low():
    def fun(table, w, scale):
        x = table[ROWS]
        for _ in range(3):
            x = x + rms(rms(x, scale) @ w, scale)
        return rms(x, scale) @ w

    assert results(fun, TABLE, W, SCALE) == {"bfloat16"}


def gated(x, w, scale):
    """An activation of a norm that both a mean and a product read."""
    y = jax.nn.silu(rms(x @ w, scale))
    return (y * (jnp.mean(y, axis=0, keepdims=True) @ w)) @ w


def test_what_a_norm_makes_for_two_readers_before_a_product_is_low():
    assert results(gated, X, W, SCALE) == {"bfloat16"}
    autocast_grad = jax.grad(lambda *a: jnp.sum(autocast(gated, "bf16-mixed")(*a) ** 2), 1)
    got, wanted = (
        autocast_grad(X, W, SCALE),
        jax.grad(lambda *a: jnp.sum(gated(*a) ** 2), 1)(X, W, SCALE),
    )
    # Five roundings each way, of which a norm cancels part.
    assert float(jnp.linalg.norm(got - wanted)) <= 10 * 2.0**-9 * float(jnp.linalg.norm(wanted))


def test_what_a_norm_gives_to_an_output_is_not_rounded():
    def fun(x, w, scale):
        y = rms(x @ w, scale)
        return y, (y * jnp.mean(y, axis=0, keepdims=True)) @ w

    y, _ = autocast(fun, "bf16-mixed")(X, W, SCALE)
    assert float(jnp.mean(y != y.astype(jnp.bfloat16).astype(jnp.float32))) > 0.9


def test_an_input_to_which_its_own_norm_is_added_is_a_state():
    def steps(x, w, scale):
        for _ in range(20):
            x = x + rms(x @ w, scale)
        return x

    wanted = steps(X.astype(jnp.float32), W, SCALE)
    got = autocast(steps, "bf16-mixed")(X, W, SCALE)
    hand = X
    for _ in range(20):
        y = jnp.matmul(hand.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
        hand = hand + rms(y.astype(jnp.float32), SCALE)
    errors = [float(jnp.linalg.norm(y - wanted)) for y in (got, hand)]
    assert errors[0] <= 1.5 * errors[1]


def steps_beside_a_norm(x, w, scale):
    """A stream that begins with an input, so that it is kept: as of given features."""
    for _ in range(3):
        x = x + 1e-3 * jnp.tanh(rms(x, scale) @ w)
    return x


def multiplied(fun):
    """The states of what products read first, in a plan."""
    planned = Planned(fun, X, W, SCALE)
    return [planned.plan.states[d.eqn.invars[0]] for d in planned.decisions("dot_general")]


def test_a_norm_of_a_state_that_products_alone_read_is_low():
    first, *others = multiplied(steps_beside_a_norm)
    assert first == states.WIDE_PURE  # of an input, which may be a weight
    assert others == [states.low(jnp.dtype(jnp.bfloat16))] * 2


def test_a_norm_of_a_state_that_anything_else_reads_is_a_state():
    assert multiplied(iterated)[1:] == [states.KEPT] * 49
    assert multiplied(returned)[1:] == [states.KEPT]


def iterated(x, w, scale):
    """A state that is normalised after each step, and steps on from there."""
    for _ in range(50):
        x = rms(x + 1e-3 * jnp.tanh(x @ w), scale)
    return x


def returned(x, w, scale):
    y = rms(x + rms(x, scale) @ w, scale)
    return y, y @ w


@pytest.mark.parametrize("fun", [steps_beside_a_norm, iterated, returned])
def test_what_goes_on_from_a_norm_keeps_its_small_steps(fun):
    exact = fun(X, W, SCALE)
    low = autocast(fun, "bf16-mixed")(X, W, SCALE)
    for got, wanted in zip(jax.tree.leaves(low), jax.tree.leaves(exact), strict=True):
        off = float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted - X))
        assert off < 2.0**-6
