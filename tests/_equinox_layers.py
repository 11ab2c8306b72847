"""Every public layer of Equinox, and what it is called with."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.PRNGKey(0)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def _after_linear(layer: Any) -> Any:
    return eqx.nn.Sequential([eqx.nn.Linear(6, 4, key=KEY), layer])


def _after_conv(layer: Any, dims: int) -> Any:
    return eqx.nn.Sequential([eqx.nn.Conv(dims, 2, 3, 2, key=KEY), layer])


def _pool(kind: Any, dims: int, *size: int) -> tuple[Any, tuple[Any, ...]]:
    return _after_conv(kind(*size), dims), (array(2, *(6,) * dims),)


def _conv(kind: Any, dims: int) -> tuple[Any, tuple[Any, ...]]:
    return kind(2, 3, 2, key=KEY), (array(2, *(4,) * dims),)


V, WORDS, TOKEN = array(6), array(5, 8), jnp.int32(3)
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
    "BatchNorm": lambda: _stateful(
        lambda: _OfExamples(NN.BatchNorm(6, "batch", mode="batch")), array(4, 6)
    ),
    "Conv": lambda: (NN.Conv(2, 2, 3, 2, groups=1, key=KEY), (array(2, 4, 4),)),
    "ConvTranspose": lambda: (NN.ConvTranspose(2, 2, 3, 2, stride=2, key=KEY), (array(2, 4, 4),)),
    "Dropout": lambda: (_Keyed(_after_linear(NN.Dropout(0.5))), (V,)),
    "Embedding": lambda: (
        NN.Sequential([NN.Embedding(7, 6, key=KEY), NN.Linear(6, 2, key=KEY)]),
        (TOKEN,),
    ),
    "GRUCell": lambda: (NN.GRUCell(6, 4, key=KEY), (V, array(4))),
    "GroupNorm": lambda: (_after_conv(NN.GroupNorm(3, 3), 1), (array(2, 6),)),
    "Identity": lambda: (_after_linear(NN.Identity()), (V,)),
    "LSTMCell": lambda: (NN.LSTMCell(6, 4, key=KEY), (V, (array(4), array(4) + 1))),
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
    "SpectralNorm": lambda: _stateful(
        lambda: NN.SpectralNorm(NN.Linear(6, 5, key=KEY), "weight", key=KEY), V
    ),
    "WeightNorm": lambda: (NN.WeightNorm(NN.Linear(6, 5, key=KEY)), (V,)),
}
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


class _OfExamples(eqx.Module):
    layer: Any

    def __call__(self, x: jax.Array, state: Any) -> Any:
        axes = {"in_axes": (0, None), "out_axes": (0, None)}
        return jax.vmap(self.layer, axis_name="batch", **axes)(x, state)


class _Held(eqx.Module):
    """A layer beside its state, which it gives back."""

    layer: Any
    state: Any

    def __call__(self, x: jax.Array) -> Any:
        return self.layer(x, self.state)


def _stateful(make: Any, x: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    return _Held(*eqx.nn.make_with_state(make)()), (x,)
