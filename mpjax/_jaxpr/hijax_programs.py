"""JAX's high-level primitives: the programs inside them, and copies with other programs.

`lax.custom_root` is one; JAX plans to make `scan`, `checkpoint` and functions with rules such
primitives. All are one JAX primitive, whose parameter is an object with methods: `expand` computes,
others differentiate and batch. The methods call functions and programs that are attributes of the
object, so that another program is put into a copy of the object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import hijax

from mpjax._jaxpr.caches import by_identity
from mpjax._jaxpr.equation import Eqn

NAME = "call_hi_primitive"
_PARAM = "_prim"
_KINDS: tuple[type, ...] = (hijax.HiPrim,) if hasattr(hijax, "HiPrim") else ()
_CHECKPOINT, _LOOP = "RematTraced", "Scan3"
_NAMES = ("CheckpointName", "CheckpointNameFwd")


def holder(eqn: Eqn) -> Any:
    """Returns the object in an equation's parameters, None where there is none of a known kind."""
    prim = eqn.params.get(_PARAM) if eqn.primitive.name == NAME else None
    return prim if isinstance(prim, _KINDS) else None


def program(eqn: Eqn) -> Any:
    """Returns the program that an equation's object computes, None if it cannot be traced."""
    prim = holder(eqn)
    if prim is None:
        return None
    return prim.params["jaxpr"] if is_checkpoint(eqn) else _expanded(prim)


def is_checkpoint(eqn: Eqn) -> bool:
    """Whether an equation is a `jax.checkpoint`."""
    return type(holder(eqn)).__name__ == _CHECKPOINT


def given_name(eqn: Eqn) -> str | None:
    """Returns the name that an equation gives its operand, for a checkpoint's policy, or None."""
    return holder(eqn).params["name"] if type(holder(eqn)).__name__ in _NAMES else None


def has_rules(eqn: Eqn) -> bool:
    """Whether an equation is a function with rules that its author wrote for its dtypes."""
    prim = holder(eqn)
    return prim is not None and type(prim).__name__ not in (_CHECKPOINT, _LOOP, *_NAMES)


@by_identity
def _expanded(prim: Any) -> Any:
    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, arrays)))

    try:
        made = jax.make_jaxpr(flat)(*prim.in_avals_flat)
    except NotImplementedError:  # some are lowered only, or have types of their own
        return None
    return None if made.consts else made


def changed(eqn: Eqn, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> dict[str, Any]:
    """Returns an equation's parameters, with each function in its object replaced.

    Args:
      eqn: the equation.
      change: returns the replacement of a function of arrays, and of whatever else JAX hands to a
        rule.
    """
    prim = holder(eqn)
    new = copy.copy(prim)
    new.params = {name: _changed(value, change) for name, value in prim.params.items()}
    vars(new).update(new.params)
    return {**eqn.params, _PARAM: new}


def _changed(value: Any, change: Callable[..., Any]) -> Any:
    if isinstance(value, jax.stages.Traced):
        args, kwargs = value.in_avals  # pyright: ignore[reportAttributeAccessIssue]
        fun = change(value)
        fun.__name__ = fun.__qualname__ = value.fun_name
        return jax.jit(fun).trace(*args, **kwargs)
    if isinstance(value, tuple):
        return tuple(_changed(x, change) for x in value)
    is_function = callable(value) and not isinstance(value, type)
    return change(value) if is_function else value
