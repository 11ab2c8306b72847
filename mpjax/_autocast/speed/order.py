"""Orders the two gradients of a product on a GPU: the smaller one, a weight's, comes first.

Both read the cotangent. Nothing waits for the gradient of a weight, so that XLA:GPU's scheduler may
put it off to the end of the program; until then the product's input and the cotangent stay in
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.interpreters import mlir

from mpjax._autocast.speed.hints import hint
from mpjax._jaxpr.sizes import size

_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")


@hint("smaller_first", lambda ct, other, _: other)
def smaller_first(ct: Any, other: Any, shapes: Sequence[Sequence[Any]]) -> Any:
    """Returns the operand `other` of the larger gradient, `ct @ otherᵀ`.

    It is behind a barrier with the smaller gradient, the product that `ct` was in before, so that
    the smaller one is computed first. Where `ct` is larger than the result nothing is done: XLA
    computes `ct` in one kernel with the operation after it, and would need two.

    Args:
      ct: the lowered cotangent of the product.
      other: the lowered operand, mostly the weight.
      shapes: of both, and of the result, mostly the cotangent of the input.
    """
    cotangent, weight, made = map(size, shapes)
    if cotangent > made or weight >= made:
        return other
    block = mlir.ir.InsertionPoint.current.block  # a branch's values cannot be read outside it
    products = [use.owner.operation for use in ct.uses if use.owner.operation.name in _PRODUCTS]
    first = next((product.results[0] for product in products if product.block == block), None)
    if first is None:
        return other
    barrier = mlir.ir.Operation.create(
        "stablehlo.optimization_barrier", results=[other.type, first.type], operands=[other, first]
    )
    return barrier.results[0]
