"""Relu behind a norm and before a product: derived by its own rule, and what is kept for that.

Gradients are compared by their norms: rounding an input may change a mask where that is nearly 0.
"""

import jax
import jax.numpy as jnp
import pytest
from _small import distance, together
from jax import lax

from mpjax import autocast

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (16, 32, 24))
W = jax.random.normal(jax.random.fold_in(KEY, 1), (24, 24)) / 5


def layer(relu):
    def loss(w, x):
        x = x @ w
        mean = jnp.mean(x, axis=(0, 1))
        spread = jnp.mean((x - mean) ** 2, axis=(0, 1))
        y = relu((x - mean) * lax.rsqrt(spread + 1e-5))
        return jnp.sum(jnp.tanh(y @ w) ** 2)

    return loss


def test_no_mask_is_kept():
    fun = autocast(layer(jax.nn.relu), "bf16-mixed")
    _, vjp = jax.vjp(fun, W, X)
    kept = [x.dtype for x in jax.tree.leaves(vjp) if getattr(x, "size", 0) == X.size]
    assert kept == [jnp.bfloat16] * 4  # what the three groups and products read


def with_rule(fun, rule):
    """`fun`, named relu as that of JAX is, with a derivative rule of its own."""

    @jax.custom_jvp
    def relu(x):
        return fun(x)

    relu.defjvp(lambda primals, tangents: (relu(*primals), rule(*primals, *tangents)))
    return relu


def larger(x):
    return jnp.maximum(x, 0.0)


def where(mask, x, y):
    return lax.select(mask, x, jnp.broadcast_to(y, x.shape))


RULES = {
    "through": (larger, lambda x, t: t),
    "later": (larger, lambda x, t: where(x > 0.5, t, 0.0)),
    "not-there": (larger, lambda x, t: where(x <= 0, t, 0.0)),
    "ones": (larger, lambda x, t: where(x > 0, t, 1.0) - where(x > 0, 0 * x, 1.0)),
    "twice": (larger, lambda x, t: where(x > 0, 2 * t, 0.0)),
    "other-bound": (lambda x: jnp.maximum(x, -1.0), lambda x, t: where(x > 0, t, 0.0)),
    "larger-of-all": (jnp.abs, lambda x, t: where(x > 0, t, 0.0)),
}


def check_derivatives(derivatives):
    """Compares derivatives of losses under autocast with those of the losses."""

    def both(of, loss):
        return lambda *args: [of(f)(*args) for f in (autocast(loss, "bf16-mixed"), loss)]

    found = together({name: both(*given) for name, given in derivatives.items()}, W, X)
    for name, results in found.items():
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            assert distance(got, want) < 0.05, name


def test_a_rule_of_the_users_own_is_kept():
    def gradients(f):
        return jax.grad(f, (0, 1))

    check_derivatives({name: (gradients, layer(with_rule(*of))) for name, of in RULES.items()})


def test_it_is_differentiated_again_and_mapped():
    def curvature(f):
        return lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (W,))[1]

    def mapped(f):
        return lambda w, x: jax.vmap(jax.grad(f, 1), (None, 0))(w, jnp.stack([x, 2 * x]))

    loss = layer(jax.nn.relu)
    check_derivatives({"curvature": (curvature, loss), "mapped": (mapped, loss)})


def test_a_result_that_no_derivative_reads_is_not_kept():
    def loss(w, x):
        x = x @ w
        y = jax.nn.relu(jnp.tanh(x) - jnp.mean(x))
        return jnp.sum(jnp.tanh(y[:1] @ w) ** 2)

    _, vjp = jax.vjp(autocast(loss, "bf16-mixed"), W, X)
    kept = [x.dtype for x in jax.tree.leaves(vjp) if getattr(x, "size", 0) == X.size]
    assert kept == [jnp.bfloat16] * 2  # what the first product read, and what it made


@pytest.mark.parametrize("fun", [jax.nn.leaky_relu, lambda y: jnp.where(y > 1, y, y / 4)])
def test_a_biased_product_that_a_choice_reads_is_kept_as_its_mask(fun):
    def loss(w, b, x):
        return jnp.sum((fun(x @ w + b) @ w) ** 2)

    _, vjp = jax.vjp(autocast(loss, "bf16-mixed"), W, W[0], X)
    kept = [x.dtype for x in jax.tree.leaves(vjp) if getattr(x, "size", 0) == X.size]
    assert sorted(map(str, kept)) == ["bfloat16"] * 3 + ["bool"]
