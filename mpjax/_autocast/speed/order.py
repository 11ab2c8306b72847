"""In which order a GPU makes the two gradients of a product: the smaller, a weight's, first.

Both read the cotangent. Nothing waits for the gradient of a weight, so XLA:GPU's scheduler may put
it off to the end of the program, and until then the product's input and the cotangent are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import mlir

from mpjax._autocast.decide.states import size
from mpjax._autocast.speed.hints import hint

_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


@hint("smaller_first", lambda ct, other, _: other)
def smaller_first(ct: Any, other: Any, shapes: Sequence[Sequence[Any]]) -> Any:
    """Returns the other operand of the product that gives the larger of two gradients.

    It stands behind a barrier beside what the cotangent was multiplied into before, so that this is
    made first. Where the cotangent is the larger one it is left: XLA makes what both products read
    in one kernel with what comes next, and would need two.

    Args:
      ct: the lowered cotangent of the product.
      other: the lowered operand, as a rule the weight.
      shapes: of both, and of what the product gives, as a rule the cotangent of the input.
    """
    cotangent, weight, made = map(size, shapes)
    if cotangent > made or weight >= made:
        return other
    block = mlir.ir.InsertionPoint.current.block  # what a branch makes is not read outside
    products = [use.owner.operation for use in ct.uses if use.owner.operation.name in _PRODUCTS]
    first = next((product.results[0] for product in products if product.block == block), None)
    if first is None:
        return other
    barrier = mlir.ir.Operation.create(
        "stablehlo.optimization_barrier", results=[other.type, first.type], operands=[other, first]
    )
    return barrier.results[0]
