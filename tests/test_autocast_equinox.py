"""Every public layer of Equinox under autocast, forward and backward, against itself."""

import inspect
from typing import Any

import _differential as differential
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import MODES, named

from mpjax import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
FORWARD, GRAD = MODES[0], MODES[1]
KEY = jax.random.PRNGKey(0)

pytestmark = [
    pytest.mark.standard_promotion("equinox promotes masks and Python scalars implicitly"),
]


def _array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def _after_linear(layer: Any) -> Any:
    return eqx.nn.Sequential([eqx.nn.Linear(6, 4, key=KEY), layer])


def _after_conv(layer: Any, dims: int) -> Any:
    return eqx.nn.Sequential([eqx.nn.Conv(dims, 2, 3, 2, key=KEY), layer])


def _pool(kind: Any, dims: int, *size: int) -> tuple[Any, tuple[Any, ...]]:
    return _after_conv(kind(*size), dims), (_array(2, *(6,) * dims),)


def _conv(kind: Any, dims: int) -> tuple[Any, tuple[Any, ...]]:
    return kind(2, 3, 2, key=KEY), (_array(2, *(4,) * dims),)


V, WORDS, TOKEN = _array(6), _array(5, 8), jnp.int32(3)
NN = eqx.nn
LAYERS: dict[str, Any] = {
    **{
        f"AdaptiveAvgPool{d}d": lambda d=d: _pool(getattr(NN, f"AdaptiveAvgPool{d}d"), d, 2)
        for d in (1, 2, 3)
    },
    **{
        f"AdaptiveMaxPool{d}d": lambda d=d: _pool(getattr(NN, f"AdaptiveMaxPool{d}d"), d, 2)
        for d in (1, 2, 3)
    },
    **{f"AvgPool{d}d": lambda d=d: _pool(getattr(NN, f"AvgPool{d}d"), d, 2) for d in (1, 2, 3)},
    **{f"MaxPool{d}d": lambda d=d: _pool(getattr(NN, f"MaxPool{d}d"), d, 2) for d in (1, 2, 3)},
    **{f"Conv{d}d": lambda d=d: _conv(getattr(NN, f"Conv{d}d"), d) for d in (1, 2, 3)},
    **{
        f"ConvTranspose{d}d": lambda d=d: _conv(getattr(NN, f"ConvTranspose{d}d"), d)
        for d in (1, 2, 3)
    },
    "Conv": lambda: (NN.Conv(2, 2, 3, 2, groups=1, key=KEY), (_array(2, 4, 4),)),
    "ConvTranspose": lambda: (NN.ConvTranspose(2, 2, 3, 2, stride=2, key=KEY), (_array(2, 4, 4),)),
    "Dropout": lambda: (_Keyed(_after_linear(NN.Dropout(0.5))), (V,)),
    "Embedding": lambda: (
        NN.Sequential([NN.Embedding(7, 6, key=KEY), NN.Linear(6, 2, key=KEY)]),
        (TOKEN,),
    ),
    "GRUCell": lambda: (NN.GRUCell(6, 4, key=KEY), (V, _array(4))),
    "GroupNorm": lambda: (_after_conv(NN.GroupNorm(3, 3), 1), (_array(2, 6),)),
    "Identity": lambda: (_after_linear(NN.Identity()), (V,)),
    "LSTMCell": lambda: (NN.LSTMCell(6, 4, key=KEY), (V, (_array(4), _array(4) + 1))),
    "Lambda": lambda: (_after_linear(NN.Lambda(jnp.tanh)), (V,)),
    "LayerNorm": lambda: (_after_linear(NN.LayerNorm(4)), (V,)),
    "Linear": lambda: (NN.Linear(6, 5, key=KEY), (V,)),
    "MLP": lambda: (NN.MLP(6, 3, 8, 2, key=KEY), (V,)),
    "MultiheadAttention": lambda: (NN.MultiheadAttention(2, 8, key=KEY), (WORDS, WORDS, WORDS)),
    "PReLU": lambda: (_after_linear(NN.Lambda(NN.PReLU())), (V,)),
    "RMSNorm": lambda: (_after_linear(NN.RMSNorm(4)), (V,)),
    "RotaryPositionalEmbedding": lambda: (_Rotated(), (WORDS,)),
    "Sequential": lambda: (
        NN.Sequential([NN.Linear(6, 4, key=KEY), NN.Linear(4, 2, key=KEY)]),
        (V,),
    ),
    "Shared": lambda: (_Tied(), (V,)),
    "WeightNorm": lambda: (NN.WeightNorm(NN.Linear(6, 5, key=KEY)), (V,)),
}
STATEFUL = ("BatchNorm", "SpectralNorm")
NOT_LAYERS = {
    "AdaptivePool": "the base of adaptive pools",
    "Pool": "the base of pools",
    "StateIndex": "a name for state",
    "StatefulLayer": "the base of layers with state",
}


class _Keyed(eqx.Module):
    layer: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x, key=KEY)


class _Rotated(eqx.Module):
    first: Any
    rotate: Any

    def __init__(self) -> None:
        self.first = eqx.nn.Linear(8, 4, key=KEY)
        self.rotate = eqx.nn.RotaryPositionalEmbedding(4)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rotate(jax.vmap(self.first)(x))


class _Tied(eqx.Module):
    """Two layers with one weight."""

    shared: Any

    def __init__(self) -> None:
        pair = (eqx.nn.Linear(6, 6, key=KEY), eqx.nn.Linear(6, 6, key=KEY))
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.shared()
        return second(jnp.tanh(first(x)))


def test_every_public_module_has_a_row_or_a_reason() -> None:
    public = {
        name
        for name, value in vars(eqx.nn).items()
        if inspect.isclass(value) and issubclass(value, eqx.Module)
    }
    assert public == LAYERS.keys() | set(STATEFUL) | NOT_LAYERS.keys()


def _check(name: str, fun: Any, trees: tuple[Any, ...], policy: str, mode: Any) -> None:
    program = named(f"eqx.nn.{name}", fun, *trees)
    differential.check(program, mode, lambda f: autocast(f, policy), POLICIES[policy])


def _layer(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns a layer as a function of its arrays and inputs, and those."""
    layer, args = LAYERS[name]()
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)
    return lambda arrays, *args: eqx.combine(arrays, static)(*args), (arrays, *args)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_right_to_rounding(name: str) -> None:
    fun, trees = _layer(name)
    program = named(f"eqx.nn.{name}", fun, *trees)
    differential.check_traced(program, GRAD, lambda f: autocast(f, "bf16-mixed"), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_under_autocast_is_itself_to_rounding(name: str, policy: str, mode: Any) -> None:
    _check(name, *_layer(name), policy, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_norm_keeps_its_state(policy: str, mode: Any) -> None:
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch")

    def fun(layer: Any, state: Any, x: jax.Array) -> Any:
        return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    _check("BatchNorm", fun, (layer, state, _array(4, 6)), policy, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_spectral_norm_keeps_its_state(policy: str, mode: Any) -> None:
    make = eqx.nn.make_with_state(
        lambda: eqx.nn.SpectralNorm(eqx.nn.Linear(6, 5, key=KEY), "weight", key=KEY)
    )
    layer, state = make()
    _check("SpectralNorm", lambda *args: args[0](args[2], args[1]), (layer, state, V), policy, mode)


# -- modules given as they are -----------------------------------------------------------------


def test_a_module_with_static_fields_goes_through_filter_grad() -> None:
    model = eqx.nn.MLP(6, 3, 8, 2, activation=jax.nn.gelu, key=KEY)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    x = _array(4, 6)
    expected = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
    got = eqx.filter_jit(eqx.filter_grad(autocast(loss, "bf16-mixed")))(model, x)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        assert float(jnp.linalg.norm(a - b)) <= 2**-5 * float(jnp.linalg.norm(b)) + 2**-10
