"""Every public layer of Flax linen, and what it is called with."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


class _Wrapped(nn.Module):
    """A layer that wraps another one, with a call of its own."""

    make: Callable[[], Any]
    call: Callable[..., Any]

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        return self.call(self.make(), *args)


def _cell(cell: nn.RNNCellBase) -> tuple[nn.Module, tuple[Any, ...]]:
    x = array(2, 3)
    carry = cell.initialize_carry(jax.random.key(1), x.shape)
    return cell, (jax.tree.map(lambda c: c + 0.1, carry), x)


IMAGE, ROWS, WORDS = array(2, 5, 5, 3), array(4, 6), array(2, 5, 8)
TOKENS = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
# The layer and what it is called with.
LAYERS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "BatchNorm": (nn.BatchNorm(use_running_average=False), (ROWS,)),
    "Bidirectional": (
        nn.Bidirectional(nn.RNN(nn.SimpleCell(3)), nn.RNN(nn.SimpleCell(3))),
        (WORDS,),
    ),
    "Conv": (nn.Conv(4, (3, 3)), (IMAGE,)),
    "ConvLSTMCell": _cell(nn.SimpleCell(2)),
    "ConvLocal": (nn.ConvLocal(2, (2,)), (array(2, 5, 3),)),
    "ConvTranspose": (nn.ConvTranspose(4, (2, 2), strides=(2, 2)), (IMAGE,)),
    "Dense": (nn.Dense(5), (ROWS,)),
    "DenseGeneral": (nn.DenseGeneral((2, 3), axis=(-1,)), (ROWS,)),
    "Dropout": (nn.Sequential([nn.Dense(5), nn.Dropout(0.5, deterministic=False)]), (ROWS,)),
    "Einsum": (nn.Einsum((6, 5), "ab,bc->ac"), (ROWS,)),
    "Embed": (nn.Sequential([nn.Embed(7, 4), nn.Dense(3)]), (TOKENS,)),
    "GRUCell": _cell(nn.GRUCell(4)),
    "GroupNorm": (nn.Sequential([nn.Conv(4, (3, 3)), nn.GroupNorm(2)]), (IMAGE,)),
    "InstanceNorm": (nn.Sequential([nn.Conv(4, (3, 3)), nn.InstanceNorm()]), (IMAGE,)),
    "LSTMCell": _cell(nn.LSTMCell(4)),
    "LayerNorm": (nn.Sequential([nn.Dense(5), nn.LayerNorm()]), (ROWS,)),
    "MGUCell": _cell(nn.MGUCell(4)),
    "MultiHeadAttention": (nn.MultiHeadAttention(num_heads=2), (WORDS,)),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.3, deterministic=False),
        (WORDS, WORDS),
    ),
    "OptimizedLSTMCell": _cell(nn.OptimizedLSTMCell(4)),
    "PReLU": (nn.Sequential([nn.Dense(5), nn.PReLU()]), (ROWS,)),
    "RMSNorm": (nn.Sequential([nn.Dense(5), nn.RMSNorm()]), (ROWS,)),
    "RNN": (nn.RNN(nn.LSTMCell(3)), (WORDS,)),
    "Sequential": (nn.Sequential([nn.Dense(5), jnp.tanh, nn.Dense(2)]), (ROWS,)),
    "SimpleCell": _cell(nn.SimpleCell(4)),
    "SpectralNorm": (
        _Wrapped(
            lambda: nn.SpectralNorm(nn.Dense(5)), lambda layer, x: layer(x, update_stats=True)
        ),
        (ROWS,),
    ),
    "WeightNorm": (
        _Wrapped(lambda: nn.WeightNorm(nn.Dense(5)), lambda layer, x: layer(x)),
        (ROWS,),
    ),
}
LAYERS["ConvLSTMCell"] = (
    nn.ConvLSTMCell(2, (2, 2)),
    (
        nn.ConvLSTMCell(2, (2, 2)).initialize_carry(jax.random.key(0), (2, 4, 4, 3)),
        array(2, 4, 4, 3),
    ),
)
NOT_LAYERS = {
    "Module": "the base of all",
    "RNNCellBase": "the base of cells",
    "SelfAttention": "deprecated: MultiHeadDotProductAttention of one input",
    "Fp8DotGeneral": "a product of 8-bit operands, which autocast leaves as they are",
    "Fp8DotGeneralOp": "the older name of the same",
    "Fp8DirectDotGeneralOp": "a product of 8-bit operands",
    "Fp8Einsum": "a product of 8-bit operands",
    "NANOOFp8DotGeneralOp": "a product of 8-bit operands",
}


def applied(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """Returns the layer as a function of variables and inputs, giving state too, and variables."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = layer.init(keys, *args)

    def fun(variables: Any, *args: Any) -> Any:
        return layer.apply(
            variables, *args, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"]
        )

    return fun, variables
