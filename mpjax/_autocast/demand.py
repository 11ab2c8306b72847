"""How each value of a jaxpr is read: by a product, by an output, by neither.

Found backwards, through the operations that move values without rounding. It tells where rounding
costs nothing (a product would round anyway) and where it would be seen (an output).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from mpjax import _compat
from mpjax._autocast import control, fusible, scopes, states, structure, traits
from mpjax._autocast.attention import under_plan
from mpjax._autocast.caches import by_program
from mpjax._autocast.carries import direct
from mpjax._op_rules import OP_RULES, OpClass

PRODUCT = 1  # read by a product, directly or moved
OUTPUT = 2  # read by an output of the program, directly, moved, or through sums
LATER = 4  # some product depends on it
WHOLE = 8  # read by a product with all of its elements: worth a low copy outside a loop
FULL = 16  # goes into what a loop carries in float32: an accumulator
GRADIENT = 32  # what a derivative taken inside the program gives to the rest of it
CARRIED = 64  # goes into what a loop carries in either dtype
EXACT = 128  # goes into what rounding would ruin: a factorisation, a running sum, a user's "full"
STACKED = 256  # a loop stacks it: a copy of what it may carry in float32
ABSOLUTE = 512  # read by a sine or an exponential: of a large value, rounding leaves nothing


def of(jaxpr: Any, wants: tuple[int, ...], full: frozenset[str]) -> dict[Any, int]:
    """Returns the flags of each variable of an open jaxpr.

    Args:
      jaxpr: the program.
      wants: the flags of its outputs.
      full: operations that the user's `rules=` hold in float32.
    """
    flags: dict[Any, int] = {}

    def add(atom: Any, found: int) -> None:
        if found and not _compat.is_literal(atom):
            flags[atom] = flags.get(atom, 0) | found

    for atom, want in zip(jaxpr.outvars, wants, strict=True):
        add(atom, want)
    derived = {v for eqn in jaxpr.eqns if _is_backward(eqn) for v in eqn.outvars}
    for eqn in reversed(jaxpr.eqns):
        outs = [flags.get(v, 0) for v in eqn.outvars]
        for atom, found in zip(eqn.invars, _reads(eqn, outs, full), strict=True):
            add(atom, found)
        if derived and not _is_backward(eqn):
            for v in _compat.variables(eqn):
                add(v, GRADIENT if v in derived else 0)
    return flags


def _is_backward(eqn: Any) -> bool:
    return scopes.is_transposed(eqn.source_info.name_stack)


def _reads(eqn: Any, outs: list[int], full: frozenset[str]) -> list[int]:
    """Returns how an equation reads its operands."""
    if not under_plan.is_attention(eqn):
        return _operands(eqn, outs, full)
    if scopes.AS_WRITTEN in scopes.of(eqn):
        return [functools.reduce(int.__or__, outs, 0) & LATER] * len(eqn.invars)
    return [PRODUCT | LATER | WHOLE if low else LATER for low in under_plan.operands_low(eqn)]


def _operands(eqn: Any, outs: list[int], full: frozenset[str]) -> list[int]:
    name = eqn.primitive.name
    is_function = fusible.is_fusible_function(eqn)
    held = fusible.operations(eqn) & full if is_function and full else name in full
    if name in traits.UNFORGIVING or held:
        later = functools.reduce(int.__or__, outs, 0) & LATER
        return [later | EXACT] * len(eqn.invars)
    union = functools.reduce(int.__or__, outs, 0)
    later = union & LATER
    rule = OP_RULES.get(name)
    if only_sums(eqn):
        return [later] * len(eqn.invars)
    if adds_nothing(eqn):
        return [union & (OUTPUT | LATER | FULL | CARRIED | EXACT | ABSOLUTE)] * len(eqn.invars)
    if rule and rule.op_class is OpClass.LOWER:
        return _of_product(eqn, later)
    if structure.is_call(eqn) and not is_function:
        return control.operand_reads(eqn, tuple(outs), functools.partial(inner, full=full))
    if rule and rule.op_class is OpClass.KEEP:
        moved = union & ~WHOLE if name in traits.RESIZES else union
        return [moved] * len(eqn.invars)
    if name in traits.HANDS_ON:
        passed = OUTPUT | LATER | FULL | CARRIED | EXACT | ABSOLUTE
        if name not in ("mul", "div") or any(map(_compat.is_literal, eqn.invars)):
            passed |= GRADIENT
        return [union & passed] * len(eqn.invars)
    if name in traits.ACCUMULATES:
        return [union & (LATER | FULL | EXACT | ABSOLUTE)] * len(eqn.invars)
    if name in traits.ABSOLUTE:
        return [later | ABSOLUTE]
    if is_function:
        return _of_function(eqn, outs, later)
    is_unknown = rule is None and name not in traits.LOOKS
    return [later | EXACT if is_unknown else later] * len(eqn.invars)


def _of_product(eqn: Any, later: int) -> list[int]:
    if not has_default_precision(eqn):
        return [later | EXACT] * len(eqn.invars)
    if why_as_written(eqn) or scopes.AS_WRITTEN in scopes.of(eqn):
        return [later] * len(eqn.invars)
    return [PRODUCT | LATER | WHOLE] * 2 + [0] * (len(eqn.invars) - 2)


def _of_function(eqn: Any, outs: list[int], later: int) -> list[int]:
    """A small function hands on what is asked of its results where it hands on the value."""
    found = [later] * len(eqn.invars)
    for out, places in zip(outs, direct(structure.single_program(eqn)), strict=True):
        for i in places:
            found[i] |= out & (FULL | EXACT)
    return found


def why_as_written(eqn: Any) -> str:
    """Returns why a product is not made low whatever the policy, empty where it may be."""
    operands = eqn.invars[:2]
    if any(getattr(v.aval, "dtype", None) != np.float32 for v in (*operands, *eqn.outvars)):
        return "operands are not float32: as written"
    if not has_default_precision(eqn):
        return "its precision= asks for float32"
    if eqn.params.get("preferred_element_type") not in (None, np.float32):
        return "its preferred_element_type= was given"
    if any(v.aval.size == 0 for v in (*operands, *eqn.outvars)):
        return "of size zero"
    return ""


def has_default_precision(eqn: Any) -> bool:
    """Whether a product leaves its precision to JAX: any other one asks for float32."""
    precision = eqn.params.get("precision")
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in both)


def only_sums(eqn: Any) -> bool:
    """Whether a product is a sum of elements, such as a squared norm: it reuses no operand."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    return all(
        v.aval.ndim == len(summed) + len(kept)
        for v, summed, kept in zip(eqn.invars, contracted, batch, strict=True)
    )


def adds_nothing(eqn: Any) -> bool:
    """Whether a product contracts nothing, such as an outer one: it is elementwise."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return not contracted


def resizes(eqn: Any) -> bool:
    """Whether an operation picks or repeats elements."""
    return eqn.primitive.name in traits.RESIZES


def repeats(eqn: Any) -> bool:
    """Whether an operation is a broadcast that makes its operand larger."""
    return eqn.primitive.name == "broadcast_in_dim" and states.copies(eqn) > 1


@by_program
def inner(jaxpr: Any, wants: tuple[int, ...], full: frozenset[str]) -> tuple[int, ...]:
    """Returns the flags of a jaxpr's inputs."""
    opened = _compat.closed(jaxpr).jaxpr
    flags = of(opened, wants, full)
    return tuple(flags.get(v, 0) for v in opened.invars)


@by_program
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
