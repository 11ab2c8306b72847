"""Every public layer of Flax NNX, and what it is called with: functions, since modules change."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0, dropout=1)


IMAGE, ROWS, WORDS = array(2, 5, 5, 3), array(4, 6), array(2, 5, 8)
TOKENS = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)


def _after_linear(layer: nnx.Module) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(6, 4, rngs=rngs()), layer)


def _cell(kind: Any) -> tuple[nnx.Module, tuple[Any, ...]]:
    cell = kind(3, 4, rngs=rngs())
    carry = cell.initialize_carry((2, 3), nnx.Rngs(5))
    return cell, (jax.tree.map(lambda c: c + 0.1, carry), array(2, 3))


def _rnn(kind: Any) -> nnx.RNN:
    return nnx.RNN(kind(8, 3, rngs=rngs()))


def _attention() -> nnx.Module:
    return nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        dropout_rate=0.3,
        deterministic=False,
        decode=False,
        rngs=rngs(),
    )


def _rotary_attention() -> nnx.Module:
    rope = nnx.RoPE(embedding_size=4, max_seq_len=8)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, attention_fn=attend, decode=False, rngs=rngs()
    )


class _Pair(nnx.Module):
    """Layers in a container, called one after the other."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = (
            (self.container["first"], self.container["second"])
            if isinstance(self.container, nnx.Dict)
            else (self.container[0], self.container[1])
        )
        return second(jnp.tanh(first(x)))


def _two() -> tuple[nnx.Module, nnx.Module]:
    return nnx.Linear(6, 4, rngs=rngs()), nnx.Linear(4, 2, rngs=rngs())


LAYERS: dict[str, Any] = {
    "BatchNorm": lambda: (_after_linear(nnx.BatchNorm(4, rngs=rngs())), (ROWS,)),
    "Bidirectional": lambda: (
        nnx.Bidirectional(_rnn(nnx.SimpleCell), _rnn(nnx.SimpleCell), rngs=rngs()),
        (WORDS,),
    ),
    "Conv": lambda: (nnx.Conv(3, 4, (3, 3), rngs=rngs()), (IMAGE,)),
    "ConvTranspose": lambda: (
        nnx.ConvTranspose(3, 4, (2, 2), strides=(2, 2), rngs=rngs()),
        (IMAGE,),
    ),
    "Dict": lambda: (_Pair(nnx.Dict(first=_two()[0], second=_two()[1])), (ROWS,)),
    "Dropout": lambda: (_after_linear(nnx.Dropout(0.5, rngs=rngs())), (ROWS,)),
    "Einsum": lambda: (nnx.Einsum("ab,bc->ac", (6, 5), (5,), rngs=rngs()), (ROWS,)),
    "Embed": lambda: (
        nnx.Sequential(nnx.Embed(7, 4, rngs=rngs()), nnx.Linear(4, 3, rngs=rngs())),
        (TOKENS,),
    ),
    "GRUCell": lambda: _cell(nnx.GRUCell),
    "GroupNorm": lambda: (_after_linear(nnx.GroupNorm(4, 2, rngs=rngs())), (ROWS,)),
    "InstanceNorm": lambda: (
        nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=rngs()), nnx.InstanceNorm(4, rngs=rngs())),
        (IMAGE,),
    ),
    "LSTMCell": lambda: _cell(nnx.LSTMCell),
    "LayerNorm": lambda: (_after_linear(nnx.LayerNorm(4, rngs=rngs())), (ROWS,)),
    "Linear": lambda: (nnx.Linear(6, 5, rngs=rngs()), (ROWS,)),
    "LinearGeneral": lambda: (nnx.LinearGeneral(6, (2, 3), rngs=rngs()), (ROWS,)),
    "List": lambda: (_Pair(nnx.List(_two())), (ROWS,)),
    "LoRA": lambda: (nnx.LoRA(6, 2, 5, rngs=rngs()), (ROWS,)),
    "LoRALinear": lambda: (nnx.LoRALinear(6, 5, lora_rank=2, rngs=rngs()), (ROWS,)),
    "MultiHeadAttention": lambda: (_attention(), (WORDS,)),
    "OptimizedLSTMCell": lambda: _cell(nnx.OptimizedLSTMCell),
    "PReLU": lambda: (_after_linear(nnx.PReLU()), (ROWS,)),
    "RMSNorm": lambda: (_after_linear(nnx.RMSNorm(4, rngs=rngs())), (ROWS,)),
    "RNN": lambda: (_rnn(nnx.LSTMCell), (WORDS,)),
    "Sequential": lambda: (nnx.Sequential(*_two()), (ROWS,)),
    "SimpleCell": lambda: _cell(nnx.SimpleCell),
    "SpectralNorm": lambda: (
        nnx.SpectralNorm(nnx.Linear(6, 5, rngs=rngs()), rngs=rngs()),
        (ROWS,),
    ),
    "WeightNorm": lambda: (nnx.WeightNorm(nnx.Linear(6, 5, rngs=rngs()), rngs=rngs()), (ROWS,)),
}
NOT_LAYERS = {"Module": "the base of all", "RNNCellBase": "the base of cells"}
if hasattr(nnx, "RoPE"):  # newer than the floor
    LAYERS["RoPE"] = lambda: (_rotary_attention(), (WORDS,))
