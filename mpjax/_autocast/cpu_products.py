"""What XLA:CPU needs before it can run a bfloat16 product with a float32 result.

It has kernels for `[batch, free, contract] × [batch, contract, free]`. When it folds a transpose
into the product, of an operand or of the result, none fits and the program fails when it runs
(`UNIMPLEMENTED: ... DotThunk::Execute: BF16 x BF16 = F32`). So operands are put in that order, and
on CPUs alone what XLA would fold is kept apart. Other platforms see identities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


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


def _identity_primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x.update(weak_type=False))
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), dims[0])
    ad.deflinear(primitive, lambda ct: [ct])
    return primitive


_operand_p = _identity_primitive("settled_operand")
_result_p = _identity_primitive("settled_result")


def _settled(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, 8, 23)  # keeps every bit, and XLA from folding what reads it


@dataclass(frozen=True)
class Barriers:
    """What the operands and the result of a bfloat16 product pass through."""

    operand: Callable[[Any], Any]
    result: Callable[[Any], Any]


NONE = Barriers(lambda x: x, lambda x: x)
CPU = Barriers(lax.optimization_barrier, _settled)
TRACED = Barriers(_operand_p.bind, _result_p.bind)
"""For programs that may still be lowered for any platform."""

for _primitive, _fun in ((_operand_p, CPU.operand), (_result_p, CPU.result)):
    _rule = mlir.lower_fun(_fun, multiple_results=False)
    mlir.register_lowering(_primitive, _rule, platform="cpu")
