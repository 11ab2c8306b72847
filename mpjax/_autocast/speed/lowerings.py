"""Lowerings by which a backend stores a value low, or takes it for another value.

Without them XLA:GPU cancels a rounding to low against the widening of a later reader, and then
stores float32.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.own_primitives import GPUS, own_primitive
from mpjax._jaxpr.identity import (
    batched,
    converted,
    identity_primitive,
    in_front,
    lower_on,
    maker,
    placed,
    repeated,
)

STORED = identity_primitive("stored", dict.fromkeys(GPUS, lax.optimization_barrier))


def stored(x: jax.Array) -> jax.Array:
    """Returns a low value that a GPU stores low (behind a barrier), and the backward pass saves."""
    return STORED.bind(x)


_barrier_p = identity_primitive("behind_barrier", {})
mlir.register_lowering(_barrier_p, mlir.lower_fun(lax.optimization_barrier, multiple_results=False))
_gpu_barrier_p = identity_primitive(
    "behind_barrier_on_gpus", dict.fromkeys(GPUS, lax.optimization_barrier)
)


def behind_barrier(x: jax.Array) -> jax.Array:
    """Returns `x` behind a barrier: XLA does not see that what reads it could read `x` itself."""
    return _barrier_p.bind(x)


def behind_barrier_on_gpus(x: jax.Array) -> jax.Array:
    """Returns `x`, on GPUs behind a barrier, as `behind_barrier` does everywhere."""
    return _gpu_barrier_p.bind(x)


_first_p = identity_primitive("summed_first", dict.fromkeys(GPUS, lax.optimization_barrier))
ad.deflinear(_first_p, lambda ct: [_first_p.bind(ct)])


def summed_first(x: jax.Array) -> jax.Array:
    """Returns a broadcast operand whose cotangent a GPU sums first, in a kernel of its own."""
    return _first_p.bind(x)


_copy_p = own_primitive("widened_copy")
_copy_p.def_impl(lambda x: x.astype(FLOAT32))
_copy_p.def_abstract_eval(lambda x: x.update(dtype=FLOAT32, weak_type=False))
batching.primitive_batchers[_copy_p] = functools.partial(batched, _copy_p)
mlir.register_lowering(_copy_p, mlir.lower_fun(lambda x: x.astype(FLOAT32), multiple_results=False))


def widened_copy(x: jax.Array) -> jax.Array:
    """Returns a low constant of differentiation in float32: a cast that only a GPU runs."""
    return _copy_p.bind(x)


_on_gpus_p = own_primitive("on_gpus")
_on_gpus_p.def_impl(lambda x, other: x)
_on_gpus_p.def_abstract_eval(lambda x, other: x.update(weak_type=False))
mlir.register_lowering(_on_gpus_p, lambda ctx, x, other: [x])
lower_on(_on_gpus_p, dict.fromkeys(GPUS, lambda x, other: other))
ad.primitive_jvps[_on_gpus_p] = lambda both, tangents: (on_gpus(*both), tangents[0])


def on_gpus(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `x`, or on GPUs `other`, which has the same value."""
    return _on_gpus_p.bind(x, other)


def _on_gpus_batch(both: Any, dims: Any) -> Any:
    size = compat.batch_size(both, dims)
    return on_gpus(*(in_front(x, d, size) for x, d in zip(both, dims, strict=True))), 0


batching.primitive_batchers[_on_gpus_p] = _on_gpus_batch


# -- values whose cotangents are stored low, since several kernels read them ---------------------

_cotangent_p = own_primitive("stored_cotangent")
_low_once_p = own_primitive("cotangent_stored_low")


@hint("stored_cotangent", lambda x, _, **__: x)
def stored_cotangent(
    x: jax.Array, dtype: Any, *, apart: bool | None, is_one: bool = False
) -> jax.Array:
    """Returns a float32 value whose cotangent is read more than once, and stored low.

    On a GPU and a TPU all its readers read the low cotangent; else XLA would store it in float32.

    Args:
      x: f32[...].
      dtype: the low dtype.
      apart: whether a barrier follows the cotangent, so that no reader is fused with it. True for
        that of `x @ w + b`, which is stored in any case as an operand of the next product. False
        for that of a normalised value: the kernel that computes it may sum it too. None: a TPU
        alone stores it low.
      is_one: whether `x` is a cotangent itself, of a gradient that the program takes.
    """
    if is_one:
        return _low_once_p.bind(x, dtype=dtype, apart=apart)
    return _cotangent_p.bind(x, dtype=dtype, apart=apart)


_summed_p = own_primitive("low_sum")


def summed(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a sum that will be rounded; a GPU adds low terms, so that cuDNN can do it."""
    return _summed_p.bind(x, dtype=dtype)


def _low_once(x: jax.Array, *, dtype: Any, apart: bool | None) -> jax.Array:
    """Returns `x` rounded to `dtype` and widened again, in a form that XLA:GPU does not cancel.

    A barrier between the casts is such a form, and so is a shift of bits: the upper half of a
    float32 number is a bfloat16 number. There is no such shift for float16.
    """
    if apart is None:
        return x
    if not apart and dtype == jax.numpy.bfloat16 and x.dtype == FLOAT32:
        bits = lax.bitcast_convert_type(x.astype(dtype), np.uint16).astype(np.uint32)
        return lax.bitcast_convert_type(bits << np.uint32(16), FLOAT32)
    return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def _low_on_tpu(x: jax.Array, *, dtype: Any, apart: bool | None) -> jax.Array:
    """Returns `x` rounded and widened again, which XLA:TPU does not cancel.

    It needs no barrier, which would also stop it from fusing the sums of `x` with `x`.
    """
    del apart
    return x.astype(dtype).astype(x.dtype)


for _primitive in (_cotangent_p, _low_once_p, _summed_p):
    _primitive.def_impl(lambda x, **_: x)
    _primitive.def_abstract_eval(lambda x, **_: x.update(weak_type=False))
    batching.primitive_batchers[_primitive] = functools.partial(batched, _primitive)
for _primitive in (_cotangent_p, _low_once_p):
    mlir.register_lowering(_primitive, lambda ctx, x, **_: [x])
lower_on(_low_once_p, dict.fromkeys(GPUS, _low_once) | {"tpu": _low_on_tpu})
ad.deflinear2(_cotangent_p, lambda ct, x, **how: [_low_once_p.bind(ct, **how)])
for _primitive in (_low_once_p, _summed_p):
    ad.deflinear2(_primitive, lambda ct, x, **_: [ct])


_read_low_p = identity_primitive(
    "read_low",
    dict.fromkeys(GPUS, functools.partial(_low_once, dtype=jax.numpy.bfloat16, apart=False)),
)


@hint("read_low", lambda x: x)
def read_low(x: jax.Array) -> jax.Array:
    """Returns an operand that is read for its scale and again to be quantised: on GPUs bfloat16.

    Else XLA:GPU would store it in float32 between the two.

    Args:
      x: f32[...], which any product in 16 bits would round to bfloat16.
    """
    return _read_low_p.bind(x)


_chosen_p = identity_primitive("chosen", {})


@hint("chosen_wide", lambda x: x)
def chosen(x: jax.Array) -> jax.Array:
    """Returns the result of `max` or `min` of low values; on a TPU it is computed in float32.

    A v5e compares in float32 in any case. Where XLA:TPU widens by itself, it also transposes the
    result, and transposes that back for a gather or a scatter.
    """
    return _chosen_p.bind(x)


def _lower_sum(ctx: Any, x: Any, *, dtype: Any) -> Any:
    """Repeats a sum with low operands and a low result."""
    total = maker(x)
    platforms = set(ctx.module_context.platforms)
    if not platforms <= set(GPUS) or getattr(total, "name", None) != "stablehlo.add":
        return [x]
    element = mlir.dtype_to_ir_type(dtype)
    low = repeated(total, [_narrowed(operand, element) for operand in total.operands], element)
    return [placed(converted(low, mlir.dtype_to_ir_type(FLOAT32)), x)]


def _lower_choice(ctx: Any, x: Any) -> Any:
    """Repeats a `max` or `min` with float32 operands and result, and narrows the result."""
    choice, wide = maker(x), mlir.dtype_to_ir_type(FLOAT32)
    is_choice = getattr(choice, "name", None) in ("stablehlo.maximum", "stablehlo.minimum")
    if set(ctx.module_context.platforms) != {"tpu"} or not is_choice:
        return [x]
    operands = [converted(operand, wide) for operand in choice.operands]
    return [placed(converted(repeated(choice, operands, wide), x.type.element_type), x)]


def _narrowed(x: Any, element: Any) -> Any:
    """Returns a low operand: the cast of a float32 one, below its broadcast if it has one."""
    owner = maker(x)
    name = getattr(owner, "name", None)
    if name == "stablehlo.broadcast_in_dim":
        return repeated(owner, [_narrowed(owner.operands[0], element)], element)
    return converted(x, element)


# Not cacheable: JAX would lower it as a function of its own, without the sum to repeat. And one
# rule for all platforms: JAX 0.12 fails on several in a program that is exported for several.
mlir.register_lowering(_summed_p, _lower_sum, cacheable=False)
mlir.register_lowering(_chosen_p, _lower_choice, cacheable=False)
