"""Prepares the operands and the result of a low product for each backend.

Nothing here changes a value: these primitives are the identity, or a rounding, wherever they are
traced, and one backend lowers each in its own way.

XLA:CPU has kernels for `[batch, free, contract] × [batch, contract, free]` of bfloat16 with a
float32 result. When it folds a transpose into the product, of an operand or of the result, none
fits and the program fails when it runs (`UNIMPLEMENTED: ... DotThunk::Execute: BF16 x BF16 =
F32`). So operands are put in that order, and a barrier separates the product from a transpose that
XLA would fold. On a CPU without instructions for bfloat16 products the float32 kernel gives the
same numbers faster: products of two bfloat16 numbers are exact in float32.

XLA:GPU cancels a rounding to low against the widening of a later reader, and then stores float32.
So the product itself has a low result; it accumulates in float32 all the same. It has one on a TPU
too, where that changes one thing: a product whose contracted axis is sharded over several chips
sends its partial sums in 16 bits, as in a model that is cast by hand. (A barrier after every low
value would separate it from a transpose or a pad that XLA computes in the same kernel.)
cuDNN has no convolution of low operands with a float32 result: XLA would widen its operands, whole
activations. So it has a low result, which is widened where float32 was asked for. In float16 the
gradient of a kernel may overflow there, as in a model that is cast by hand; the loss scale is there
for that.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching, mlir

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.own_primitives import GPUS, own_primitive
from mpjax._jaxpr.identity import (
    batched,
    converted,
    identity_primitive,
    maker,
    placed,
    repeated,
)


def plain_layout(x: jax.Array, y: jax.Array, dims: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Returns operands `[batch, free, contract]` and `[batch, contract, free]`, and dimensions."""
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


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products; True if the system does not say."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return True
    words = set(info.read_text().split())
    return not words.isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def _in_order(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def lower_operand(ctx: Any, x: Any) -> Any:
    """Lowers an operand so that XLA:CPU stores it in the order of its dimensions.

    XLA:CPU would turn a transpose into a change of layout, find no bfloat16 kernel for that layout,
    and widen both operands: 16 ms instead of 6 for a weight gradient of 512 × 1024 × 1024.
    """
    ordered = compat.layouts_can_be_asked_for(ctx)
    fun = _in_order if ordered else lax.optimization_barrier
    return mlir.lower_fun(fun, multiple_results=False)(ctx, x)


_operand_p = identity_primitive("settled_operand", {})
mlir.register_lowering(_operand_p, lower_operand, platform="cpu")
_result_p = identity_primitive("settled_result", {})


@dataclass(frozen=True)
class Backend:
    """How a product is bound: the functions that its operands and its result pass through."""

    operand: Callable[[Any], Any] = lambda x: x
    result: Callable[[Any], Any] = lambda x: x
    low_results: bool = False  # whether the product itself has a low result
    low_convolutions: bool = False  # whether convolutions of low operands have low results alone
    ordered: bool = False  # whether operands are put into the order of `plain_layout`
    usual_convolutions: bool = False  # whether convolutions are turned to `in_usual_order`
    hides: Callable[[Any], Any] = lambda x: x  # applied to every operand, of any dtype
    rounds: bool = True  # whether the result is rounded here, and not by `linked` afterwards


OTHER = Backend()
TRACED = Backend(_operand_p.bind, _result_p.bind, ordered=True)
"""For programs that may still be lowered for any platform."""
WRITTEN = Backend(ordered=True, low_results=True, rounds=False)
"""For a forward product: its result is low in the jaxpr, and its operands are hidden already.

A user's checkpoint policy saves results in the dtype of the jaxpr. `lower_result` repeats the
product with a float32 result where a backend accumulates in the dtype of the result.
"""
WRITTEN_WIDE = Backend(ordered=True, rounds=False)
"""The same with float32 results, for a checkpoint's policy that saves rounded results by name."""
CPU = Backend(_operand_p.bind, _result_p.bind, ordered=True, usual_convolutions=True)
CPU_WIDE = Backend(
    lambda x: lax.optimization_barrier(x.astype("float32")), ordered=True, usual_convolutions=True
)
GPU = Backend(low_results=True, low_convolutions=True)
TPU = Backend(low_results=True)


def cpu() -> Backend:
    """Returns the backend of bfloat16 products on this CPU; called when a program is lowered."""
    return CPU if cpu_multiplies_bfloat16() else CPU_WIDE


# -- `rounded_p`: the rounding of a product's result, where a GPU rounds in the product ----------

_rounded_p = own_primitive("rounded_result")


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
    if not backend.rounds:
        return lax.conv_general_dilated(x, y, **params)
    if backend.usual_convolutions and params.get("out_sharding") is None:
        return _rounded_p.bind(in_usual_order(x, y, params), dtype=dtype)
    return _rounded_p.bind(lax.conv_general_dilated(x, y, **params), dtype=dtype)


def in_usual_order(x: jax.Array, y: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Returns a convolution, run on images NHWC and kernels HWIO as XLA:CPU's fast routine needs.

    Outside of loops and branches XLA:CPU transposes operands by itself. Inside, a gradient's
    convolution runs in plain loops: one of 8 images of 32 × 32 × 32 takes thirteen times as long.
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
    """Returns an operand with its dimensions transposed, and stored in that order."""
    if list(order) == list(range(x.ndim)):
        return x
    return _operand_p.bind(lax.transpose(x, order))


def _convert(x: jax.Array, *, dtype: Any) -> jax.Array:
    return lax.convert_element_type(x, dtype)


_rounded_p.def_impl(_convert)
_rounded_p.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
batching.primitive_batchers[_rounded_p] = functools.partial(batched, _rounded_p)
ad.deflinear2(_rounded_p, lambda ct, x, *, dtype: [lax.convert_element_type(ct, x.aval.dtype)])

_ROUND_THEMSELVES = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})


def _lower_rounded(ctx: Any, x: Any, *, dtype: Any) -> Any:
    """Repeats the product with a low result; XLA removes the first one, which is then unused."""
    product = maker(x)
    if getattr(product, "name", None) not in _ROUND_THEMSELVES or "algorithm" in product.attributes:
        return _lower_convert(ctx, x, dtype=dtype)  # an algorithm fixes the dtype of its result
    element = mlir.dtype_to_ir_type(dtype)
    if dtype != FLOAT32:
        return [placed(repeated(product, product.operands, element), x)]
    low = mlir.ir.RankedTensorType(product.operands[0].type).element_type
    return [placed(converted(repeated(product, product.operands, low), element), x)]


def _lower_convert(ctx: Any, x: Any, *, dtype: Any) -> Any:
    del ctx
    return [placed(converted(x, mlir.dtype_to_ir_type(dtype)), x)]


def _lower_settled(ctx: Any, x: Any) -> Any:
    """Stops XLA from folding the next operation into a product: rounds to float32's own bits."""
    del ctx
    bits = mlir.ir.IntegerType.get_signless(32)
    sizes = {"exponent_bits": 8, "mantissa_bits": 23}
    operation = mlir.ir.Operation.create(
        "stablehlo.reduce_precision",
        results=[x.type],
        operands=[x],
        attributes={name: mlir.ir.IntegerAttr.get(bits, size) for name, size in sizes.items()},
    )
    return [placed(operation.result, x)]


def _cpu_reads_low(ctx: Any) -> bool:
    return cpu_multiplies_bfloat16() and compat.cpu_may_multiply_low(ctx)


def _lower_on_cpu(ctx: Any, x: Any) -> Any:
    """Separates the result of a product, or repeats the product on widened operands."""
    product = maker(x)
    if _cpu_reads_low(ctx) or getattr(product, "name", None) != "stablehlo.dot_general":
        return _lower_settled(ctx, x)
    wide = mlir.dtype_to_ir_type(FLOAT32)
    operands = [_kept_apart(converted(operand, wide)) for operand in product.operands]
    return [placed(repeated(product, operands, wide), x)]


def _lower_result(ctx: Any, x: Any) -> Any:
    platforms = ctx.module_context.platforms
    if "cpu" not in platforms:
        return [x]
    return _lower_on_cpu(ctx, x) if len(platforms) == 1 else _lower_settled(ctx, x)


def _lower_rounding(ctx: Any, x: Any, *, dtype: Any) -> Any:
    platforms = set(ctx.module_context.platforms)
    in_product = platforms <= set(GPUS) or (platforms == {"tpu"} and dtype != FLOAT32)
    return (_lower_rounded if in_product else _lower_convert)(ctx, x, dtype=dtype)


def lower_result(ctx: Any, x: Any, *, dtype: Any, settles: bool) -> Any:
    """Lowers `linked`, which a forward product's result passes through: to the result in `dtype`.

    Args:
      ctx: of the lowering rule.
      x: the result as it is written, low or float32.
      dtype: the dtype of the result.
      settles: whether XLA:CPU must not fold the next operation into the product.
    """
    platforms = set(ctx.module_context.platforms)
    element = mlir.dtype_to_ir_type(dtype)
    product = maker(x)
    name = getattr(product, "name", None)
    if dtype != FLOAT32 and x.type.element_type == element:
        if settles and platforms == {"cpu"} and not _cpu_reads_low(ctx):
            return _lower_rounding(ctx, *_lower_on_cpu(ctx, x), dtype=dtype)
        rounds_itself = platforms <= set(GPUS) or platforms == {"tpu"}
        if rounds_itself or name not in _ROUND_THEMSELVES or "algorithm" in product.attributes:
            return [x]
        x = placed(repeated(product, product.operands, mlir.dtype_to_ir_type(FLOAT32)), x)
    if settles and "cpu" in platforms:
        (x,) = _lower_on_cpu(ctx, x) if len(platforms) == 1 else _lower_settled(ctx, x)
    if dtype == FLOAT32 and name != "stablehlo.convolution":
        return [x]
    return _lower_rounding(ctx, x, dtype=dtype)


def _kept_apart(x: Any) -> Any:
    barrier = "stablehlo.optimization_barrier"
    return mlir.ir.Operation.create(barrier, results=[x.type], operands=[x]).result


# Not cacheable: JAX would lower each as a function of its own, where no product is in sight. And
# one rule that asks for the platforms: JAX 0.12 fails on several rules that are not cacheable in a
# program that is exported for several platforms.
mlir.register_lowering(_result_p, _lower_result, cacheable=False)
mlir.register_lowering(_rounded_p, _lower_rounding, cacheable=False)
