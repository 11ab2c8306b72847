"""Operations and small functions that XLA computes in one kernel with their neighbours.

A function of fusible operations, such as an activation, is taken as a whole: it has one class.
"""

from __future__ import annotations

from typing import Any

from mpjax._autocast.known import scopes, traits
from mpjax._autocast.known.activations import is_activation, is_in_a_derivative
from mpjax._base import compat
from mpjax._base.dtypes import keeps
from mpjax._jaxpr import structure
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import COMPARISONS, OP_RULES, OpClass
from mpjax._jaxpr.sizes import is_float32, size

_MAX_FUNCTION = 64  # equations: larger functions are planned inside


def is_fusible(eqn: Eqn) -> bool:
    """Whether XLA computes an operation in one kernel with its neighbours, cheaply."""
    return eqn.primitive.name in traits.FUSIBLE or is_pick(eqn)


def is_pick(eqn: Eqn) -> bool:
    """Whether an equation gathers one element, or one slice, of each of many rows."""
    return eqn.primitive.name == "gather" and _picks_one(eqn.invars[0].aval, eqn)


def _picks_one(operand: Any, eqn: Eqn) -> bool:
    dims = eqn.params["dimension_numbers"]
    if len(dims.start_index_map) != 1:
        return False
    (axis,), sizes = dims.start_index_map, eqn.params["slice_sizes"]
    if not dims.operand_batching_dims and operand.shape[axis] != 1:
        return False  # one row of a table
    whole = (sizes[i] == n for i, n in enumerate(operand.shape) if i not in _pointed(dims))
    indices = eqn.invars[1].aval.shape[:-1]
    rows = [n for i, n in enumerate(indices) if i in dims.start_indices_batching_dims]
    return sizes[axis] == 1 and all(whole) and size(indices) == size(rows)


def _pointed(dims: Any) -> set[int]:
    return {*dims.start_index_map, *dims.operand_batching_dims}


def is_fusible_function(eqn: Eqn) -> bool:
    """Whether an equation is a small function of fusible operations, such as an activation."""
    if eqn.primitive.name not in ("jit", "custom_jvp_call", "custom_vjp_call") or eqn.effects:
        return False
    return _fusible_program(structure.single_program(eqn)) or is_in_a_derivative(eqn)


@by_program
def _fusible_program(jaxpr: Any) -> bool:
    opened = compat.closed(jaxpr).jaxpr
    if len(opened.eqns) > _MAX_FUNCTION or opened.constvars or not opened.outvars:
        return False
    return all(
        ((is_fusible(eqn) and not eqn.effects) or is_fusible_function(eqn))
        and not scopes.of(eqn)  # a region, or a path: what stands inside is looked at
        for eqn in opened.eqns
    ) and bool(opened.eqns)


def operations(eqn: Eqn) -> frozenset[str]:
    """Returns the names of a fusible function, and of the operations and functions inside it."""
    inside = _operations(structure.single_program(eqn))
    return inside | {structure.function_name(eqn)}


@by_program
def _operations(jaxpr: Any) -> frozenset[str]:
    eqns = compat.closed(jaxpr).jaxpr.eqns
    calls = [eqn for eqn in eqns if structure.single_program(eqn) is not None]
    return frozenset(eqn.primitive.name for eqn in eqns).union(*map(operations, calls))


def holds_a_custom_vjp(eqn: Eqn) -> bool:
    """Whether an equation is a fusible function with a `custom_vjp` rule, or has one inside."""
    if structure.single_program(eqn) is None:
        return False
    return "custom_vjp_call" in operations(eqn) | {eqn.primitive.name}


def function_class(eqn: Eqn) -> OpClass:
    """Returns how a fusible function's result is held: activations follow their input."""
    if is_activation(eqn):
        return OpClass.FOLLOW
    return OpClass.FULL if _holds_full(structure.single_program(eqn)) else OpClass.FOLLOW


def holds_only_what_fits(eqn: Eqn, dtype: Any) -> bool:
    """Whether `dtype` can hold the constants inside a function, or it is a known activation."""
    return is_activation(eqn) or _fits_inside(structure.single_program(eqn), dtype)


@by_program
def _fits_inside(jaxpr: Any, dtype: Any) -> bool:
    for eqn in compat.closed(jaxpr).jaxpr.eqns:
        if structure.single_program(eqn) is not None:
            if not holds_only_what_fits(eqn, dtype):
                return False
        elif eqn.primitive.name not in COMPARISONS:
            literals = (v for v in eqn.invars if compat.is_literal(v) and is_float32(v))
            if not all(v.aval.shape or keeps(dtype, float(v.val)) for v in literals):
                return False
    return True


@by_program
def _holds_full(jaxpr: Any) -> bool:
    for eqn in compat.closed(jaxpr).jaxpr.eqns:
        program = structure.single_program(eqn)
        if program is not None:
            if function_class(eqn) is OpClass.FULL:
                return True
        elif (rule := OP_RULES.get(eqn.primitive.name)) and rule.op_class is OpClass.FULL:
            return True
    return False
