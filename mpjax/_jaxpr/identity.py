"""Primitives that are the identity, and helpers for their lowerings: copies of operations, casts.

Wherever such a primitive is traced it is the identity. A backend lowers it in its own way, for
example to an optimization barrier, so that its compiler does not undo a rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive


def identity_primitive(name: str, platforms: dict[str, Callable[[Any], Any]]) -> Primitive:
    """Returns an identity that some platforms lower to another program with the same result."""
    primitive = own_primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x.update(weak_type=False))
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    lower_on(primitive, platforms)
    batching.primitive_batchers[primitive] = functools.partial(batched, primitive)
    ad.deflinear(primitive, lambda ct: [ct])
    return primitive


def lower_on(primitive: Primitive, platforms: dict[str, Callable[..., Any]]) -> None:
    """Lowers a primitive on each platform as the function given for that platform."""
    for platform, fun in platforms.items():
        rule = mlir.lower_fun(fun, multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)


def batched(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """Binds an elementwise primitive to batched operands: its batching rule."""
    return primitive.bind(*args, **params), dims[0]


def in_front(x: Any, dim: Any, size: int) -> Any:
    """Returns an argument of a batching rule with its batch axis first; adds one if it has none."""
    if compat.is_batched(dim):
        return jnp.moveaxis(x, dim, 0)
    return jnp.broadcast_to(x, (size, *x.shape))


def repeated(operation: Any, operands: Any, element: Any) -> Any:
    """Returns the result of a copy of an operation with other operands or another element type."""
    shape = mlir.ir.RankedTensorType(operation.results[0].type).shape
    again = mlir.ir.Operation.create(
        operation.name,
        results=[mlir.ir.RankedTensorType.get(shape, element)],
        operands=list(operands),
        attributes={name: operation.attributes[name] for name in operation.attributes},
        loc=operation.location,
    )
    return again.result


_PLACED = "sdy.sharding_constraint"
"""Follows every operation in a program with explicit shardings."""


def maker(x: Any) -> Any:
    """Returns the operation that made a value of a lowered program, past a sharding constraint."""
    owner = x.owner
    return owner.operands[0].owner if getattr(owner, "name", None) == _PLACED else owner


def placed(made: Any, like: Any) -> Any:
    """Returns a value of a lowered program with the sharding constraint of the one it replaces."""
    owner = like.owner
    if getattr(owner, "name", None) != _PLACED:
        return made
    return repeated(owner, [made], mlir.ir.RankedTensorType(made.type).element_type)


def converted(x: Any, element: Any) -> Any:
    """Returns a value of a lowered program, converted to another element type."""
    shape = mlir.ir.RankedTensorType(x.type).shape
    result = mlir.ir.RankedTensorType.get(shape, element)
    return mlir.ir.Operation.create("stablehlo.convert", results=[result], operands=[x]).result
