"""Operations with programs inside: their names, their programs, and how values enter and leave.

A pass over a jaxpr asks `parts` and needs to know nothing of scans and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from mpjax._base import compat
from mpjax._jaxpr import hijax_programs
from mpjax._jaxpr.caches import by_program
from mpjax._jaxpr.equation import Eqn, Jaxpr

CHECKPOINTS = ("remat2", "checkpoint")  # the primitive of `jax.checkpoint`, by version
_WITH_RULES = {  # have a program, and rules that its author wrote
    "composite": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_partitioning": "call",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
}
PLACED = ("compute_on", "xla_metadata_call")  # run a program on another device, or under a mark
_SINGLE = {
    "jit": "jaxpr",
    **dict.fromkeys(CHECKPOINTS, "jaxpr"),
    "shard_map": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    **dict.fromkeys(PLACED, "jaxpr"),
    **_WITH_RULES,
}
LOOPS = frozenset({"scan", "while"})
_MANY = LOOPS | {"cond"}
_HOLDS_PROGRAMS = _MANY | _SINGLE.keys()
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", *_WITH_RULES})


def is_call(eqn: Eqn) -> bool:
    """Whether an equation has a program inside that autocast enters: a `scan`, a `jit`."""
    name = eqn.primitive.name
    return name in _HOLDS_PROGRAMS or (
        name == hijax_programs.NAME and hijax_programs.program(eqn) is not None
    )


def single_program(eqn: Eqn) -> Any:
    """Returns the jaxpr of an equation that has one, such as a `jit`; None for loops, branches."""
    if eqn.primitive.name == hijax_programs.NAME:
        return hijax_programs.program(eqn)
    return eqn.params[program_key(eqn)] if eqn.primitive.name in _SINGLE else None


def program_key(eqn: Eqn) -> str:
    """Returns the name of the parameter that is a call's one program."""
    keys = _SINGLE[eqn.primitive.name], "call_jaxpr", "jaxpr"  # by version
    return next(key for key in keys if key in eqn.params)


def has_rules(eqn: Eqn) -> bool:
    """Whether a call has rules that its author wrote for the dtypes of its operands."""
    return eqn.primitive.name in _CUSTOM or hijax_programs.has_rules(eqn)


def applies_function(eqn: Eqn) -> bool:
    """Whether an equation applies a function to a part of an array: `x.at[i].apply(fun)`."""
    return eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None


@by_program
def operands(jaxpr: Jaxpr) -> list[list[Any]]:
    """Returns the variables that each equation of an open jaxpr reads, which most passes ask."""
    return list(map(compat.variables, jaxpr.eqns))


T = TypeVar("T")


class LoopOperands(NamedTuple, Generic[T]):
    """The operands of a `scan` or `while`, or facts of them, by what the loop does with them."""

    asked: Sequence[T]  # constants that a `while`'s condition alone reads
    consts: Sequence[T]
    carry: Sequence[T]
    xs: Sequence[T]  # which a `scan` slices


def loop_operands(eqn: Eqn, values: Sequence[T]) -> LoopOperands[T]:
    """Returns the operands of a loop, or facts of them, parted."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        consts, carries = compat.scan_counts(params)
        a, b, c = 0, consts, consts + carries
    else:
        a = params["cond_nconsts"]
        b, c = a + params["body_nconsts"], len(values)
    return LoopOperands(values[:a], values[a:b], values[b:c], values[c:])


class Part(NamedTuple):
    """A program inside an equation.

    Its inputs are operands of the equation. Its outputs are the equation's results; in a loop the
    first outputs go back into the carried inputs. The output of a `while`'s condition only ends the
    loop.
    """

    program: Any
    operands: Sequence[int]  # for each input, the place of its operand in the equation
    carried: slice  # of the inputs, those that a loop carries; empty outside loops
    is_condition: bool = False

    @property
    def carries(self) -> int:
        """The number of inputs that a loop carries."""
        return self.carried.stop - self.carried.start


def parts(eqn: Eqn) -> list[Part]:
    """Returns the programs of a call, a loop or a branch, in the order of its parameters."""
    params, count = eqn.params, len(eqn.invars)
    if eqn.primitive.name == "cond":
        return [Part(branch, range(1, count), slice(0, 0)) for branch in params["branches"]]
    if eqn.primitive.name in LOOPS:
        given = loop_operands(eqn, range(count))

        def part(key: str, consts: Sequence[int], *, is_condition: bool = False) -> Part:
            carried = slice(len(consts), len(consts) + len(given.carry))
            operands = [*consts, *given.carry, *given.xs]
            return Part(params[key], operands, carried, is_condition)

        if eqn.primitive.name == "scan":
            return [part("jaxpr", given.consts)]
        asking = part("cond_jaxpr", given.asked, is_condition=True)
        return [asking, part("body_jaxpr", given.consts)]
    return [Part(single_program(eqn), range(count), slice(0, 0))]


def outputs(
    jaxpr: Jaxpr,
    inputs: Sequence[T],
    made: Callable[[Eqn, list[T]], Sequence[T]],
    nothing: T,
    constant: T | None = None,
) -> tuple[T, ...]:
    """Returns the facts of a program's outputs, found forwards.

    Args:
      jaxpr: the program.
      inputs: the facts of its inputs.
      made: returns the facts of an equation's results, given those of its operands.
      nothing: the fact of a literal.
      constant: that of an array which the program closes over; None for `nothing` again.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    unknown = nothing if constant is None else constant

    def of(atom: Any) -> T:
        return nothing if compat.is_literal(atom) else known.get(atom, unknown)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, made(eqn, [of(v) for v in eqn.invars]), strict=True))
    return tuple(map(of, jaxpr.outvars))


def forward(
    eqn: Eqn,
    operands: Sequence[T],
    inner: Callable[[Any, tuple[T, ...]], Sequence[T]],
    join: Callable[[Sequence[T]], T],
) -> list[T]:
    """Returns the facts of the results of an equation with programs inside.

    A *fact* is whatever a pass knows of a value: its width, its origin.

    Args:
      eqn: the equation.
      operands: the facts of its operands.
      inner: returns the facts of a program's outputs, given those of its inputs.
      join: returns the fact of a value that is one of several. It must be monotone, or the search
        for the fixed point of a loop does not end.
    """
    outputs = [
        settled(part, operands, inner, join)[1] for part in parts(eqn) if not part.is_condition
    ]
    return outputs[0] if len(outputs) == 1 else [join(outs) for outs in zip(*outputs, strict=True)]


def settled(
    part: Part,
    operands: Sequence[T],
    inner: Callable[[Any, tuple[T, ...]], Sequence[T]],
    join: Callable[[Sequence[T]], T],
) -> tuple[list[T], list[T]]:
    """Returns the facts of a program's inputs and outputs; in a loop, those of all iterations.

    Arguments are those of `forward`.
    """
    inputs = [operands[i] for i in part.operands]
    while True:
        outs = inner(part.program, tuple(inputs))
        before = inputs[part.carried]
        after = [join(pair) for pair in zip(before, outs, strict=False)]
        if after == before:
            return inputs, [*before, *outs[len(before) :]]
        inputs[part.carried] = after


def function_name(eqn: Eqn) -> str:
    """Returns the name of the function that an equation calls."""
    if "name" in eqn.params:
        return eqn.params["name"]
    info = getattr(compat.closed(single_program(eqn)).jaxpr, "debug_info", None)
    return getattr(info, "func_name", "")
