"""Operations that hold programs: what they are called, where each program is, what goes in and out.

Whoever follows values through a jaxpr asks `parts`, and knows nothing of scans and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from mpjax._base import compat
from mpjax._jaxpr import hijax_programs

CHECKPOINTS = ("remat2", "checkpoint")  # the primitive of `jax.checkpoint`, by version
_WITH_RULES = {  # hold a program beside rules of its author's
    "composite": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_partitioning": "call",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
}
PLACED = ("compute_on", "xla_metadata_call")  # say where, or as what, a program is run
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


def is_call(eqn: Any) -> bool:
    """Whether autocast goes inside an equation."""
    name = eqn.primitive.name
    return name in _HOLDS_PROGRAMS or (
        name == hijax_programs.NAME and hijax_programs.program(eqn) is not None
    )


def single_program(eqn: Any) -> Any:
    """Returns the one jaxpr of a call, None for loops and branches."""
    if eqn.primitive.name == hijax_programs.NAME:
        return hijax_programs.program(eqn)
    return eqn.params[program_key(eqn)] if eqn.primitive.name in _SINGLE else None


def program_key(eqn: Any) -> str:
    """Returns the name of the parameter that is a call's one program."""
    keys = _SINGLE[eqn.primitive.name], "call_jaxpr", "jaxpr"  # by version
    return next(key for key in keys if key in eqn.params)


def has_rules(eqn: Any) -> bool:
    """Whether a call's author wrote rules for it, and for the types of its operands."""
    return eqn.primitive.name in _CUSTOM or hijax_programs.has_rules(eqn)


def applies_function(eqn: Any) -> bool:
    """Whether an update of a part, `x.at[i].apply(fun)`, puts a function's values there."""
    return eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None


class Part(NamedTuple):
    """A program inside an equation.

    Its inputs are operands of the equation. Its outputs are the equation's results; in a loop the
    first of them go back into the carried inputs, and a condition's goes nowhere else.
    """

    program: Any
    operands: Sequence[int]  # which of the equation's its inputs are
    carried: slice  # which of its inputs a loop carries; empty where there is none
    is_condition: bool = False

    @property
    def carries(self) -> int:
        """How many of its inputs a loop carries."""
        return self.carried.stop - self.carried.start


def parts(eqn: Any) -> list[Part]:
    """Returns the programs of a call, a loop or a branch, in the order of its parameters."""
    params, count = eqn.params, len(eqn.invars)
    if eqn.primitive.name == "cond":
        return [Part(branch, range(1, count), slice(0, 0)) for branch in params["branches"]]
    if eqn.primitive.name == "scan":
        consts, carries = compat.scan_counts(params)
        return [Part(params["jaxpr"], range(count), slice(consts, consts + carries))]
    if eqn.primitive.name == "while":
        asking, consts = params["cond_nconsts"], params["body_nconsts"]
        carried = range(asking + consts, count)
        asked = [*range(asking), *carried]
        return [
            Part(params["cond_jaxpr"], asked, slice(asking, len(asked)), is_condition=True),
            Part(params["body_jaxpr"], range(asking, count), slice(consts, count - asking)),
        ]
    return [Part(single_program(eqn), range(count), slice(0, 0))]


T = TypeVar("T")


def forward(
    eqn: Any,
    operands: Sequence[T],
    inner: Callable[[Any, tuple[T, ...]], Sequence[T]],
    join: Callable[[Sequence[T]], T],
) -> list[T]:
    """Returns what is known of the results of an equation that holds programs.

    Args:
      eqn: the equation.
      operands: what is known of its operands.
      inner: says of a program, given what is known of its inputs, what is of its outputs.
      join: what is known of a value that is one of several; in a loop it only ever grows.
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
    """Returns what is known of a program's inputs and outputs, in a loop of all iterations.

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


def function_name(eqn: Any) -> str:
    """Returns the name of the function that an equation calls."""
    if "name" in eqn.params:
        return eqn.params["name"]
    info = getattr(compat.closed(single_program(eqn)).jaxpr, "debug_info", None)
    return getattr(info, "func_name", "")
