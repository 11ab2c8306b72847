"""Functions of our own containers are exported, written down and read back."""

import importlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export

import mpjax
from mpjax import optim
from mpjax._base import quantized_array

pytest.importorskip("flatbuffers", reason="jax.export needs it to write")
for state in (optax.EmptyState, optax.TraceState):  # Optax registers none of its own
    export.register_namedtuple_serialization(state, serialized_name=f"optax.{state.__name__}")
W = {"w": jnp.linspace(-1, 1, 4096).reshape(64, 64)}
X = jnp.ones((4, 64))
LOW = jax.tree.map(lambda w: w.astype(jnp.bfloat16), W)


def _optimized(wrapped, params=W):
    tx = wrapped(optax.sgd(0.1, momentum=0.9))
    return lambda s: tx.update(params, s, params), (tx.init(params),)


def _step(policy):
    step = mpjax.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), optax.sgd(0.1), policy)
    return step, (step.init(W), X)


def _quantized():
    policy = "int8_from_mixed_bfloat16"
    fun = mpjax.autocast(lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) @ p["w"], policy)
    return fun, (mpjax.quantize(W, policy), X)


PROGRAMS = {
    "weights in 8 bits": _quantized,
    "a static scale": lambda: (lambda s, x: s.scale(x), (mpjax.StaticLossScale(8.0), X)),
    "a dynamic scale": lambda: (lambda s: s.adjust(jnp.bool_(0)), (mpjax.DynamicLossScale(),)),
    "a train step": lambda: _step("bf16-mixed"),
    "a scaled train step": lambda: _step("16-mixed"),
    "master weights": lambda: _optimized(optim.with_master_weights, LOW),
    "Kahan sums": lambda: _optimized(optim.with_kahan, LOW),
    "random rounding": lambda: _optimized(optim.with_stochastic_rounding, LOW),
    "moments in 16 bits": lambda: _optimized(optim.with_state_dtypes),
    "moments in 8 bits": lambda: _optimized(optim.with_quantized_state),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_of_our_containers_is_written_down_and_read_back(name):
    fun, args = PROGRAMS[name]()
    read = export.deserialize(export.export(jax.jit(fun))(*args).serialize())
    got, want = read.call(*args), jax.jit(fun)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def test_an_editor_may_load_a_module_again():
    module = importlib.util.module_from_spec(quantized_array.__spec__)
    quantized_array.__spec__.loader.exec_module(module)
    assert module.QuantizedArray is not quantized_array.QuantizedArray
