"""Every public layer of Flax NNX under autocast, forward and backward, and the state it keeps."""

import functools
import inspect
from typing import Any

import _differential as differential
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import MODES, named
from flax import nnx

from mpjax._autocast import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
FORWARD, GRAD = MODES[0], MODES[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion("nnx promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("nnx keeps the modules of a trace until they are collected"),
    pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning"),  # RoPE's own
]


def _array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def _rngs() -> nnx.Rngs:
    return nnx.Rngs(0, dropout=1)


IMAGE, ROWS, WORDS = _array(2, 5, 5, 3), _array(4, 6), _array(2, 5, 8)
TOKENS = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)


def _after_linear(layer: nnx.Module) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(6, 4, rngs=_rngs()), layer)


def _cell(kind: Any) -> tuple[nnx.Module, tuple[Any, ...]]:
    cell = kind(3, 4, rngs=_rngs())
    carry = cell.initialize_carry((2, 3), nnx.Rngs(5))
    return cell, (jax.tree.map(lambda c: c + 0.1, carry), _array(2, 3))


def _rnn(kind: Any) -> nnx.RNN:
    return nnx.RNN(kind(8, 3, rngs=_rngs()))


def _attention() -> nnx.Module:
    return nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        dropout_rate=0.3,
        deterministic=False,
        decode=False,
        rngs=_rngs(),
    )


def _rotary_attention() -> nnx.Module:
    rope = nnx.RoPE(embedding_size=4, max_seq_len=8)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, attention_fn=attend, decode=False, rngs=_rngs()
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
    return nnx.Linear(6, 4, rngs=_rngs()), nnx.Linear(4, 2, rngs=_rngs())


LAYERS: dict[str, Any] = {
    "BatchNorm": lambda: (_after_linear(nnx.BatchNorm(4, rngs=_rngs())), (ROWS,)),
    "Bidirectional": lambda: (
        nnx.Bidirectional(_rnn(nnx.SimpleCell), _rnn(nnx.SimpleCell), rngs=_rngs()),
        (WORDS,),
    ),
    "Conv": lambda: (nnx.Conv(3, 4, (3, 3), rngs=_rngs()), (IMAGE,)),
    "ConvTranspose": lambda: (
        nnx.ConvTranspose(3, 4, (2, 2), strides=(2, 2), rngs=_rngs()),
        (IMAGE,),
    ),
    "Dict": lambda: (_Pair(nnx.Dict(first=_two()[0], second=_two()[1])), (ROWS,)),
    "Dropout": lambda: (_after_linear(nnx.Dropout(0.5, rngs=_rngs())), (ROWS,)),
    "Einsum": lambda: (nnx.Einsum("ab,bc->ac", (6, 5), (5,), rngs=_rngs()), (ROWS,)),
    "Embed": lambda: (
        nnx.Sequential(nnx.Embed(7, 4, rngs=_rngs()), nnx.Linear(4, 3, rngs=_rngs())),
        (TOKENS,),
    ),
    "GRUCell": lambda: _cell(nnx.GRUCell),
    "GroupNorm": lambda: (_after_linear(nnx.GroupNorm(4, 2, rngs=_rngs())), (ROWS,)),
    "InstanceNorm": lambda: (
        nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=_rngs()), nnx.InstanceNorm(4, rngs=_rngs())),
        (IMAGE,),
    ),
    "LSTMCell": lambda: _cell(nnx.LSTMCell),
    "LayerNorm": lambda: (_after_linear(nnx.LayerNorm(4, rngs=_rngs())), (ROWS,)),
    "Linear": lambda: (nnx.Linear(6, 5, rngs=_rngs()), (ROWS,)),
    "LinearGeneral": lambda: (nnx.LinearGeneral(6, (2, 3), rngs=_rngs()), (ROWS,)),
    "List": lambda: (_Pair(nnx.List(_two())), (ROWS,)),
    "LoRA": lambda: (nnx.LoRA(6, 2, 5, rngs=_rngs()), (ROWS,)),
    "LoRALinear": lambda: (nnx.LoRALinear(6, 5, lora_rank=2, rngs=_rngs()), (ROWS,)),
    "MultiHeadAttention": lambda: (_attention(), (WORDS,)),
    "OptimizedLSTMCell": lambda: _cell(nnx.OptimizedLSTMCell),
    "PReLU": lambda: (_after_linear(nnx.PReLU()), (ROWS,)),
    "RMSNorm": lambda: (_after_linear(nnx.RMSNorm(4, rngs=_rngs())), (ROWS,)),
    "RNN": lambda: (_rnn(nnx.LSTMCell), (WORDS,)),
    "Sequential": lambda: (nnx.Sequential(*_two()), (ROWS,)),
    "SimpleCell": lambda: _cell(nnx.SimpleCell),
    "SpectralNorm": lambda: (
        nnx.SpectralNorm(nnx.Linear(6, 5, rngs=_rngs()), rngs=_rngs()),
        (ROWS,),
    ),
    "WeightNorm": lambda: (nnx.WeightNorm(nnx.Linear(6, 5, rngs=_rngs()), rngs=_rngs()), (ROWS,)),
}
NOT_LAYERS = {"Module": "the base of all", "RNNCellBase": "the base of cells"}
if hasattr(nnx, "RoPE"):  # newer than the floor
    LAYERS["RoPE"] = lambda: (_rotary_attention(), (WORDS,))


def test_every_public_module_has_a_row_or_a_reason() -> None:
    public = {
        name
        for name, value in vars(nnx).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }
    assert public == LAYERS.keys() | NOT_LAYERS.keys()


@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_under_autocast_is_itself_to_rounding(name: str, policy: str, mode: Any) -> None:
    layer, args = LAYERS[name]()
    graph, state = nnx.split(layer)

    def fun(state: Any, *args: Any) -> Any:
        copy = nnx.merge(graph, state)
        return copy(*args), nnx.state(copy)

    program = named(f"nnx.{name}", fun, state, *args)
    differential.check(program, mode, lambda f: autocast(f, policy), POLICIES[policy])


# -- modules given as they are -----------------------------------------------------------------


def _stateful() -> nnx.Module:
    return nnx.Sequential(
        nnx.Linear(6, 4, rngs=_rngs()),
        nnx.BatchNorm(4, rngs=_rngs()),
        nnx.Dropout(0.5, rngs=_rngs()),
    )


def _leaves(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.state(module)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def test_a_stateful_module_given_directly_keeps_its_updates_as_under_nnx_jit() -> None:
    plain, fast = _stateful(), _stateful()
    expected = nnx.jit(lambda module, x: module(x))(plain, ROWS)
    got = autocast(lambda module, x: module(x), "bf16-mixed")(fast, ROWS)
    assert got.dtype == expected.dtype
    before = _leaves(_stateful())
    after, wanted = _leaves(fast), _leaves(plain)
    assert after.keys() == wanted.keys()
    changed = {name for name in wanted if not np.array_equal(wanted[name], before[name])}
    assert any("mean" in name for name in changed)
    assert any("count" in name for name in changed)
    for name in wanted:
        assert after[name].dtype == wanted[name].dtype
        if after[name].dtype.kind == "f":  # the inputs of the statistics were products
            np.testing.assert_allclose(after[name], wanted[name], rtol=2**-6, atol=2**-8)
        else:
            np.testing.assert_array_equal(after[name], wanted[name])


def test_a_module_is_updated_inside_nnx_jit_and_nnx_grad() -> None:
    fast = _stateful()
    before = _leaves(fast)

    @nnx.jit
    def step(module: nnx.Module, x: jax.Array) -> Any:
        return nnx.grad(autocast(lambda m, x: jnp.mean(m(x) ** 2), "bf16-mixed"))(module, x)

    grads = step(fast, ROWS)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    after = _leaves(fast)
    assert any(not np.array_equal(after[name], before[name]) for name in before if "mean" in name)
    assert any(not np.array_equal(after[name], before[name]) for name in before if "count" in name)
