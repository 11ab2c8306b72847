"""`x @ w` of two dtypes is the product of `x @ w.astype(jnp.float32)`, wherever it stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._base import compat

pytestmark = pytest.mark.standard_promotion("JAX promotes inside a product: that is what is tested")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8)).astype(np.float32)
WEIGHTS = {
    "bfloat16": jnp.asarray(RNG.normal(size=(8, 8)), jnp.bfloat16),
    "float16": jnp.asarray(RNG.normal(size=(8, 8)), jnp.float16),
    "int8": jnp.asarray(RNG.integers(-100, 100, (8, 8)), jnp.int8),
    "bool": jnp.asarray(RNG.integers(0, 2, (8, 8)), bool),
}


def _layer(x, w):
    return jnp.tanh(x @ w)


def _with_vjp(layer):
    fun = jax.custom_vjp(layer)

    def forward(x, w):
        out, back = jax.vjp(lambda x: layer(x, w), x)
        return out, (back, w)

    fun.defvjp(forward, lambda kept, ct: (*kept[0](ct), _no_cotangent(kept[1])))
    return fun


def _no_cotangent(w):
    return jnp.zeros_like(w) if jnp.issubdtype(w.dtype, jnp.floating) else None


def _with_jvp(layer):
    fun = jax.custom_jvp(layer)
    fun.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))
    return fun


PLACES = {
    "alone": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda layer: lambda x, w: lax.scan(lambda h, _: (layer(h, w), None), x, None, 2)[0],
    "map": lambda layer: lambda x, w: lax.map(lambda row: layer(row, w), x),
    "vmap": lambda layer: jax.vmap(layer, (0, None)),
    "cond": lambda layer: lambda x, w: lax.cond(x[0, 0] > 9, lambda x, w: x, layer, x, w),
    "custom_jvp": _with_jvp,
    "custom_vjp": _with_vjp,
}


def _cast(layer):
    return lambda x, w: layer(x, w.astype(jnp.float32))


def _loss(layer, place):
    return lambda x, w: jnp.sum(layer(PLACES[place](layer)(x, w), w) ** 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("place", PLACES)
def test_law_of_promotion_a_product_of_two_dtypes_is_as_with_a_cast(place, dtype, policy):
    w = WEIGHTS[dtype]
    for inside in (False, True):
        mixed, cast = (_gradient(_loss(f, place), policy, inside) for f in (_layer, _cast(_layer)))
        for got, want in zip(mixed(X, w), cast(X, w), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
        assert _low_products(mixed, w) == _low_products(cast, w)


def _gradient(loss, policy, inside):
    places = (0,)

    def grad(fun):
        return jax.grad(fun, places, allow_int=True)

    return mpjax.autocast(grad(loss), policy) if inside else grad(mpjax.autocast(loss, policy))


def _low_products(fun, w):
    eqns = compat.equations(jax.make_jaxpr(fun)(X, w))
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert products
    return [[v.aval.dtype.name for v in eqn.invars] for eqn in products]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_of_a_product_get_gradients_in_their_own_dtype(dtype):
    w = WEIGHTS[dtype]
    grads = [
        jax.grad(mpjax.autocast(_loss(f, "alone"), "bf16-mixed"), 1)(X, w)
        for f in (_layer, _cast(_layer))
    ]
    assert [g.dtype for g in grads] == [w.dtype, w.dtype]
    np.testing.assert_array_equal(*grads)


def test_explain_shows_a_product_of_two_dtypes_as_low():
    told = mpjax.explain(_loss(_layer, "jit"), "bf16-mixed")(X, WEIGHTS["bfloat16"])
    assert {row.dtype for row in told.rows if row.operation == "dot_general"} == {"bf16"}
