"""How each value of a jaxpr is read: by a product, by an output, by neither.

Found backwards, through the operations that move values without rounding. It tells where rounding
costs nothing (a product would round anyway) and where it would be seen (an output).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mpjax import _compat
from mpjax._autocast import control, groups, scopes, states
from mpjax._op_rules import OP_RULES, OpClass

PRODUCT = 1  # read by a product, directly or moved
OUTPUT = 2  # read by an output of the program, directly, moved, or through sums
LATER = 4  # some product depends on it
WHOLE = 8  # read by a product with all of its elements: worth a low copy outside a loop
FULL = 16  # goes into what a loop carries in float32: an accumulator
GRADIENT = 32  # what a derivative taken inside the program gives to the rest of it
CARRIED = 64  # goes into what a loop carries in either dtype

_LINEAR = frozenset({"add", "sub", "add_any", "neg", "mul", "div", "convert_element_type"})
_ACCUMULATING = frozenset(
    {"select_n", "max", "min", "clamp", "concatenate", "stack", "pad", "dynamic_update_slice"}
    | {"scatter", "scatter-add", "scatter-max", "scatter-min"}
)
_RESIZING = frozenset(
    {"slice", "dynamic_slice", "gather", "broadcast_in_dim", "reduce_max", "reduce_min", "split"}
)


def of(jaxpr: Any, wants: tuple[int, ...]) -> dict[Any, int]:
    """Returns the flags of each variable of an open jaxpr whose outputs are read as `wants`."""
    flags: dict[Any, int] = {}

    def add(atom: Any, found: int) -> None:
        if found and not _compat.is_literal(atom):
            flags[atom] = flags.get(atom, 0) | found

    for atom, want in zip(jaxpr.outvars, wants, strict=True):
        add(atom, want)
    derived = {v for eqn in jaxpr.eqns if _is_backward(eqn) for v in eqn.outvars}
    for eqn in reversed(jaxpr.eqns):
        outs = [flags.get(v, 0) for v in eqn.outvars]
        for atom, found in zip(eqn.invars, _operands(eqn, outs), strict=True):
            add(atom, found)
        if derived and not _is_backward(eqn):
            for v in _compat.variables(eqn):
                add(v, GRADIENT if v in derived else 0)
    return flags


def _is_backward(eqn: Any) -> bool:
    return scopes.is_transposed(eqn.source_info.name_stack)


def _operands(eqn: Any, outs: list[int]) -> list[int]:
    name = eqn.primitive.name
    union = functools.reduce(int.__or__, outs, 0)
    later = union & LATER
    rule = OP_RULES.get(name)
    if only_sums(eqn):
        return [later] * len(eqn.invars)
    if only_scales(eqn):
        return [union & (OUTPUT | LATER | FULL | CARRIED)] * len(eqn.invars)
    if rule and rule.op_class is OpClass.LOWER:
        return [PRODUCT | LATER | WHOLE] * 2 + [0] * (len(eqn.invars) - 2)
    if control.is_call(eqn) and not groups.is_fusible_function(eqn):
        return control.operand_reads(eqn, tuple(outs), inner)
    if rule and rule.op_class is OpClass.KEEP:
        moved = union & ~WHOLE if name in _RESIZING else union
        return [moved] * len(eqn.invars)
    if name in _LINEAR:
        passed = OUTPUT | LATER | FULL | CARRIED
        if name not in ("mul", "div") or any(map(_compat.is_literal, eqn.invars)):
            passed |= GRADIENT
        return [union & passed] * len(eqn.invars)
    if name in _ACCUMULATING:
        return [union & (LATER | FULL)] * len(eqn.invars)
    return [later] * len(eqn.invars)


def only_sums(eqn: Any) -> bool:
    """Whether a product is a sum of elements, such as a squared norm: it reuses no operand."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    return all(
        v.aval.ndim == len(summed) + len(kept)
        for v, summed, kept in zip(eqn.invars, contracted, batch, strict=True)
    )


def only_scales(eqn: Any) -> bool:
    """Whether a product multiplies arrays by numbers, as the derivative of `vdot` does."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), batch = eqn.params["dimension_numbers"]
    numbers = any(v.aval.ndim == len(b) for v, b in zip(eqn.invars, batch, strict=True))
    return not contracted and numbers


def repeats(eqn: Any) -> bool:
    """Whether an operation is a broadcast that makes its operand larger."""
    return eqn.primitive.name == "broadcast_in_dim" and states.copies(eqn) > 1


@functools.lru_cache(maxsize=2048)
def inner(jaxpr: Any, wants: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the flags of a jaxpr's inputs."""
    opened = _compat.closed(jaxpr).jaxpr
    flags = of(opened, wants)
    return tuple(flags.get(v, 0) for v in opened.invars)


@functools.lru_cache(maxsize=4096)
def dependencies(jaxpr: Any) -> tuple[frozenset[int], ...]:
    """Returns, for each output of a jaxpr, the inputs that it depends on, by their places."""
    opened = _compat.closed(jaxpr).jaxpr
    found: dict[Any, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(opened.invars)}

    def of(atoms: Sequence[Any]) -> frozenset[int]:
        known = [found[v] for v in atoms if not _compat.is_literal(v) and v in found]
        return frozenset[int]().union(*known)

    for eqn in opened.eqns:
        union = of(eqn.invars)
        found.update((v, union) for v in eqn.outvars)
    return tuple(of([v]) for v in opened.outvars)
