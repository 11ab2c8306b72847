"""What each backend needs before it runs a low product, and keeps a low value low.

Nothing here changes a value: these are primitives that are the identity, or a rounding, wherever
they are traced, and that one backend lowers in its own way.

XLA:CPU has kernels for `[batch, free, contract] × [batch, contract, free]` of bfloat16 with a
float32 result. When it folds a transpose into the product, of an operand or of the result, none
fits and the program fails when it runs (`UNIMPLEMENTED: ... DotThunk::Execute: BF16 x BF16 =
F32`). So operands are put in that order, and what XLA would fold is kept apart. On a CPU without
instructions for bfloat16 products the same numbers come faster from the float32 kernel: products
of two bfloat16 are exact in float32.

XLA:GPU cancels a rounding to low against the widening of a later reader, and then stores float32.
So a product is asked for the low result itself: it accumulates in float32 all the same. So it is
for a TPU, where it changes one thing: products that are split along what they add up over several
chips send their parts in 16 bits, as those of a model that is cast by hand. (A barrier
behind all that is stored low would part it from a transpose or a pad that XLA computes with it.)
cuDNN has no low convolution with a float32 result at all: XLA would widen its operands, whole
activations. So it has a low result, widened where float32 was asked for. In float16 the gradient of
a kernel may overflow there, as one that is cast by hand may; the loss scale is there for that.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat
from .hints import hint

GPUS = ("cuda", "rocm")
FLOAT32 = np.dtype("float32")


def plain_layout(x: jax.Array, y: jax.Array, dims: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Returns both operands with batch dimensions first and contracted ones next to each other."""
    (contract_x, contract_y), (batch_x, batch_y) = dims
    free_x = tuple(i for i in range(x.ndim) if i not in (*contract_x, *batch_x))
    free_y = tuple(i for i in range(y.ndim) if i not in (*contract_y, *batch_y))
    x = _transpose(x, (*batch_x, *free_x, *contract_x))
    y = _transpose(y, (*batch_y, *contract_y, *free_y))
    batch = tuple(range(len(batch_x)))
    first = len(batch)
    contracted = len(contract_x)
    return (
        x,
        y,
        (
            (
                tuple(range(x.ndim - contracted, x.ndim)),
                tuple(range(first, first + contracted)),
            ),
            (batch, batch),
        ),
    )


def _transpose(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return x if order == tuple(range(x.ndim)) else lax.transpose(x, order)


def _identity_primitive(name: str, platforms: dict[str, Callable[[Any], Any]]) -> Primitive:
    """Returns an identity that some platforms lower to another program with the same result."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x.update(weak_type=False))
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    _lower_on(primitive, platforms)
    batching.primitive_batchers[primitive] = functools.partial(_batch_identity, primitive)
    ad.deflinear(primitive, lambda ct: [ct])
    return primitive


def _lower_on(primitive: Primitive, platforms: dict[str, Callable[..., Any]]) -> None:
    """Lowers a primitive on each platform as the function that stands for it there."""
    for platform, fun in platforms.items():
        rule = mlir.lower_fun(fun, multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)


def _batch_identity(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    return primitive.bind(*args, **params), dims[0]


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products; yes where the system tells none."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return True
    words = set(info.read_text().split())
    return not words.isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower_operand(ctx: Any, x: Any) -> Any:
    """Lowers an operand so that it is stored in the order of its dimensions.

    XLA:CPU would make a transpose a matter of layout, find no kernel of bfloat16 for that layout,
    and widen both operands: 16 ms instead of 6 for a weight gradient of 512 × 1024 × 1024.
    """
    ordered = _compat.layouts_can_be_asked_for(ctx)
    fun = _in_order if ordered else lax.optimization_barrier
    return mlir.lower_fun(fun, multiple_results=False)(ctx, x)


_operand_p = _identity_primitive("settled_operand", {})
mlir.register_lowering(_operand_p, _lower_operand, platform="cpu")
_result_p = _identity_primitive("settled_result", {})
STORED = _identity_primitive("stored", dict.fromkeys(GPUS, lax.optimization_barrier))


def stored(x: jax.Array) -> jax.Array:
    """Returns a low value from which a GPU reads a mask, and which is kept for that."""
    return STORED.bind(x)


_apart_p = _identity_primitive("kept_apart", {})
mlir.register_lowering(_apart_p, mlir.lower_fun(lax.optimization_barrier, multiple_results=False))


def kept_apart(x: jax.Array) -> jax.Array:
    """Returns a value that XLA takes for another than `x`."""
    return _apart_p.bind(x)


_positive_p = Primitive("is_positive")


def is_positive(value: jax.Array, stored: jax.Array) -> jax.Array:
    """Returns where a value is positive, as what is stored of it is; a GPU reads the latter."""
    return _positive_p.bind(lax.stop_gradient(value), lax.stop_gradient(stored))


def _value_is_positive(value: jax.Array, stored: jax.Array) -> jax.Array:
    del stored
    return value > 0


def _stored_is_positive(value: jax.Array, stored: jax.Array) -> jax.Array:
    del value
    return stored > 0


_positive_p.def_impl(_value_is_positive)
_positive_p.def_abstract_eval(lambda x, y: x.update(dtype=np.dtype(bool), weak_type=False))
batching.defbroadcasting(_positive_p)
mlir.register_lowering(_positive_p, mlir.lower_fun(_value_is_positive, multiple_results=False))
_lower_on(_positive_p, dict.fromkeys(GPUS, _stored_is_positive))


@dataclass(frozen=True)
class Backend:
    """How a product is bound: what its operands and a bfloat16 result pass through."""

    operand: Callable[[Any], Any] = lambda x: x
    result: Callable[[Any], Any] = lambda x: x
    low_results: bool = False  # whether the product itself is asked for a low result
    low_convolutions: bool = False  # whether convolutions of low operands have no other
    ordered: bool = False  # whether operands are put into the order of `plain_layout`
    usual_convolutions: bool = False  # whether convolutions are turned to `in_usual_order`


OTHER = Backend()
CPU = Backend(_operand_p.bind, _result_p.bind, ordered=True)
CPU_WIDE = Backend(lambda x: lax.optimization_barrier(x.astype("float32")), ordered=True)
GPU = Backend(low_results=True, low_convolutions=True)
TPU = Backend(low_results=True)


def cpu() -> Backend:
    """Returns how this CPU runs a bfloat16 product; asked when a program is lowered for it."""
    found = CPU if cpu_multiplies_bfloat16() else CPU_WIDE
    return replace(found, usual_convolutions=True)


TRACED = CPU
"""For programs that may still be lowered for any platform."""


# -- values whose cotangents are stored low, as several kernels read them ------------------------

_cotangent_p = Primitive("stored_cotangent")
_low_once_p = Primitive("cotangent_stored_low")


@hint("stored_cotangent", lambda x, _, **__: x)
def stored_cotangent(x: jax.Array, dtype: Any, *, apart: bool) -> jax.Array:
    """Returns a float32 value whose cotangent is read more than once.

    On a GPU and a TPU all read it as it is stored; else XLA would store it in float32.

    Args:
      x: f32[...].
      dtype: what it is stored in.
      apart: whether a kernel stores it that nothing else is fused into. That of a biased product
        is stored in any case, as the product's operand; that of a normalised value, which is
        summed and then read again, may be summed by the kernel that makes it.
    """
    return _cotangent_p.bind(x, dtype=dtype, apart=apart)


_summed_p = Primitive("low_sum")


def summed(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a sum that will be rounded; a GPU adds it up low, which its convolutions can do."""
    return _summed_p.bind(x, dtype=dtype)


def _low_once(x: jax.Array, *, dtype: Any, apart: bool) -> jax.Array:
    """XLA:GPU cancels a rounding against a widening: not behind a barrier, nor one by bits.

    The upper half of a float32 number is a bfloat16 number; float16 has no such shift.
    """
    if not apart and dtype == jax.numpy.bfloat16 and x.dtype == FLOAT32:
        bits = lax.bitcast_convert_type(x.astype(dtype), np.uint16).astype(np.uint32)
        return lax.bitcast_convert_type(bits << np.uint32(16), FLOAT32)
    return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def _low_on_tpu(x: jax.Array, *, dtype: Any, apart: bool) -> jax.Array:
    """XLA:TPU keeps the rounding; a barrier would also part the sums from what they are of."""
    del apart
    return x.astype(dtype).astype(x.dtype)


for _primitive in (_cotangent_p, _low_once_p, _summed_p):
    _primitive.def_impl(lambda x, **_: x)
    _primitive.def_abstract_eval(lambda x, **_: x.update(weak_type=False))
    batching.primitive_batchers[_primitive] = functools.partial(_batch_identity, _primitive)
for _primitive in (_cotangent_p, _low_once_p):
    mlir.register_lowering(_primitive, lambda ctx, x, **_: [x])
_lower_on(_low_once_p, dict.fromkeys(GPUS, _low_once) | {"tpu": _low_on_tpu})
ad.deflinear2(_cotangent_p, lambda ct, x, **how: [_low_once_p.bind(ct, **how)])
for _primitive in (_low_once_p, _summed_p):
    ad.deflinear2(_primitive, lambda ct, x, **_: [ct])


# -- `rounded_p`: the rounding of a product's result, where a GPU rounds in the product ----------

_rounded_p = Primitive("rounded_result")


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a product's result in `dtype`."""
    return x if x.dtype == dtype else _rounded_p.bind(x, dtype=jax.dtypes.canonicalize_dtype(dtype))


def convolved(
    x: jax.Array, y: jax.Array, params: dict[str, Any], dtype: Any, backend: Backend
) -> jax.Array:
    """Returns a convolution of low operands in `dtype`, rounded to theirs on a GPU."""
    if backend.low_convolutions:
        params = {**params, "preferred_element_type": x.dtype}
        return lax.conv_general_dilated(x, y, **params).astype(dtype)
    if backend.low_results and dtype == x.dtype:
        return lax.conv_general_dilated(x, y, **{**params, "preferred_element_type": dtype})
    if backend.usual_convolutions and params.get("out_sharding") is None:
        return _rounded_p.bind(in_usual_order(x, y, params), dtype=dtype)
    return _rounded_p.bind(lax.conv_general_dilated(x, y, **params), dtype=dtype)


def in_usual_order(x: jax.Array, y: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Returns a convolution, run on images NHWC and kernels HWIO, as XLA:CPU's fast routine is.

    Outside of loops and branches XLA:CPU turns them by itself. Inside, a gradient's convolution
    runs in plain loops: one of 8 images of 32 × 32 × 32 takes thirteen times what it takes so.
    """
    lhs, rhs, out = params["dimension_numbers"]
    spatial = tuple(range(1, len(lhs) - 1))
    image = [(spec[0], *spec[2:], spec[1]) for spec in (lhs, out)]
    kernel = (*rhs[2:], rhs[1], rhs[0])
    features = len(lhs) - 1
    usual = lax.ConvDimensionNumbers(
        (0, features, *spatial),
        (features, features - 1, *range(features - 1)),
        (0, features, *spatial),
    )
    x, y = _turned(x, image[0]), _turned(y, kernel)
    made = lax.conv_general_dilated(x, y, **dict(params, dimension_numbers=usual))
    return lax.transpose(made, np.argsort(image[1]))


def _turned(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Returns an operand with its dimensions in another order, and stored in that."""
    if list(order) == list(range(x.ndim)):
        return x
    return _operand_p.bind(lax.transpose(x, order))


def _convert(x: jax.Array, *, dtype: Any) -> jax.Array:
    return lax.convert_element_type(x, dtype)


_rounded_p.def_impl(_convert)
_rounded_p.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
batching.primitive_batchers[_rounded_p] = functools.partial(_batch_identity, _rounded_p)
ad.deflinear2(_rounded_p, lambda ct, x, *, dtype: [lax.convert_element_type(ct, x.aval.dtype)])

_ROUND_THEMSELVES = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})


def _again(operation: Any, operands: Any, element: Any) -> Any:
    """Returns the result of an operation on other operands, or of other elements."""
    shape = mlir.ir.RankedTensorType(operation.results[0].type).shape
    again = mlir.ir.Operation.create(
        operation.name,
        results=[mlir.ir.RankedTensorType.get(shape, element)],
        operands=list(operands),
        attributes={name: operation.attributes[name] for name in operation.attributes},
        loc=operation.location,
    )
    return again.result


def _lower_rounded(ctx: Any, x: Any, *, dtype: Any) -> Any:
    """Repeats the product with a low result; XLA drops the one that nothing reads any more."""
    product = x.owner
    if getattr(product, "name", None) not in _ROUND_THEMSELVES or "algorithm" in product.attributes:
        return _lower_convert(ctx, x, dtype=dtype)  # an algorithm says what its result is
    element = mlir.dtype_to_ir_type(dtype)
    if dtype != FLOAT32:
        return [_again(product, product.operands, element)]
    low = mlir.ir.RankedTensorType(product.operands[0].type).element_type
    return [_converted(_again(product, product.operands, low), element)]


def _lower_convert(ctx: Any, x: Any, *, dtype: Any) -> Any:
    del ctx
    return [_converted(x, mlir.dtype_to_ir_type(dtype))]


def _lower_settled(ctx: Any, x: Any) -> Any:
    """Keeps XLA from folding what reads a product into it; 8 and 23 bits are all of float32."""
    del ctx
    bits = mlir.ir.IntegerType.get_signless(32)
    sizes = {"exponent_bits": 8, "mantissa_bits": 23}
    operation = mlir.ir.Operation.create(
        "stablehlo.reduce_precision",
        results=[x.type],
        operands=[x],
        attributes={name: mlir.ir.IntegerAttr.get(bits, size) for name, size in sizes.items()},
    )
    return [operation.result]


def _lower_on_cpu(ctx: Any, x: Any) -> Any:
    """Keeps the result of a product apart, or repeats the product on widened operands."""
    product = x.owner
    if cpu_multiplies_bfloat16() or getattr(product, "name", None) != "stablehlo.dot_general":
        return _lower_settled(ctx, x)
    wide = mlir.dtype_to_ir_type(FLOAT32)
    operands = [_kept_apart(_converted(operand, wide)) for operand in product.operands]
    return [_again(product, operands, wide)]


def _converted(x: Any, element: Any) -> Any:
    shape = mlir.ir.RankedTensorType(x.type).shape
    result = mlir.ir.RankedTensorType.get(shape, element)
    return mlir.ir.Operation.create("stablehlo.convert", results=[result], operands=[x]).result


def _kept_apart(x: Any) -> Any:
    barrier = "stablehlo.optimization_barrier"
    return mlir.ir.Operation.create(barrier, results=[x.type], operands=[x]).result


def _lower_result(ctx: Any, x: Any) -> Any:
    platforms = ctx.module_context.platforms
    if "cpu" not in platforms:
        return [x]
    return _lower_on_cpu(ctx, x) if len(platforms) == 1 else _lower_settled(ctx, x)


def _lower_rounding(ctx: Any, x: Any, *, dtype: Any) -> Any:
    platforms = set(ctx.module_context.platforms)
    in_product = platforms <= set(GPUS) or (platforms == {"tpu"} and dtype != FLOAT32)
    return (_lower_rounded if in_product else _lower_convert)(ctx, x, dtype=dtype)


def _lower_sum(ctx: Any, x: Any, *, dtype: Any) -> Any:
    """Repeats a sum with low operands and a low result."""
    total = x.owner
    platforms = set(ctx.module_context.platforms)
    if not platforms <= set(GPUS) or getattr(total, "name", None) != "stablehlo.add":
        return [x]
    element = mlir.dtype_to_ir_type(dtype)
    low = _again(total, [_narrowed(operand, element) for operand in total.operands], element)
    return [_converted(low, mlir.dtype_to_ir_type(FLOAT32))]


def _narrowed(x: Any, element: Any) -> Any:
    """Returns an operand of low elements: as it was before it was widened, or repeated."""
    owner = x.owner
    name = getattr(owner, "name", None)
    if name == "stablehlo.broadcast_in_dim":
        return _again(owner, [_narrowed(owner.operands[0], element)], element)
    return _converted(x, element)


# Not cacheable: JAX would lower each as a function of its own, where no product is in sight. And
# one rule that asks for the platforms: JAX 0.12 fails on several rules that are not cacheable in a
# program that is exported for several platforms.
mlir.register_lowering(_result_p, _lower_result, cacheable=False)
mlir.register_lowering(_rounded_p, _lower_rounding, cacheable=False)
mlir.register_lowering(_summed_p, _lower_sum, cacheable=False)
