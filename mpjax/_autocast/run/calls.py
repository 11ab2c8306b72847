"""Binds operations with programs inside: calls, loops, branches and functions with their own rules.

The public functions of JAX (`lax.scan`, `jax.jit`, `jax.checkpoint`, `jax.shard_map` ...) are
called on closures that run the plans; JAX itself makes inputs of the values that these close over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide.decided import Decision
from mpjax._autocast.decide.states import Kind
from mpjax._autocast.run import custom_rules, held_programs, sums
from mpjax._autocast.run.values import Value
from mpjax._base import compat
from mpjax._jaxpr import hijax_programs, holders, structure

Interpreter = Any
"""`run.interpreter.Interpreter`, which imports this file."""


def run(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    """Returns the results of an equation with programs inside, in the dtypes of `out_states`."""
    eqn = decision.eqn
    runner = runner.recording(runner.history.inside(decision))
    how = _RUN.get(eqn.primitive.name, _run_inline)
    if hijax_programs.is_checkpoint(eqn):
        how = _run_remat
    elif hijax_programs.given_name(eqn) is not None:
        how = _run_named
    elif how is _run_inline and structure.has_rules(eqn):
        how = _run_held
    return list(how(runner, decision, values))


def _operands(decision: Decision, values: Sequence[Value]) -> list[Any]:
    operand_states = decision.call.operand_states
    return [v.form(s) for v, s in zip(values, operand_states, strict=True)]


def _low_copies(plan: Plan, values: Sequence[Value]) -> list[Any]:
    return [
        None if dtype is None else v.low(dtype)
        for v, dtype in zip(values, plan.low_copies, strict=True)
    ]


def _made_low_copies(plan: Plan, values: Sequence[Value]) -> list[Any]:
    """Returns the low copies that exist already.

    A copy made here would be an input of the checkpointed function, and so saved for its backward
    pass.
    """
    return [
        None if dtype is None else v.made_low(dtype)
        for v, dtype in zip(values, plan.low_copies, strict=True)
    ]


def _run_inline(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    (plan,) = decision.call.programs
    return runner.run(plan, _operands(decision, values), _low_copies(plan, values))


def _with_low_copies(
    runner: Interpreter, plan: Plan, low_copies: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Returns the plan as a function of its inputs, followed by those low copies that exist."""
    count = len(plan.in_states)
    given = [low_copy is not None for low_copy in low_copies]

    def fun(*args: Any) -> list[Any]:
        rest = iter(args[count:])
        return runner.run(plan, args[:count], [next(rest) if has else None for has in given])

    return fun


def _all_operands(
    decision: Decision, values: Sequence[Value], low_copies: Sequence[Any]
) -> list[Any]:
    return [*_operands(decision, values), *(s for s in low_copies if s is not None)]


def _run_jit(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    eqn = decision.eqn
    (plan,) = decision.call.programs
    # The plan remembers the function, so that eager mode too compiles it once.
    key = (runner.products, *compat.hashable_jit_params(eqn.params))
    compiled = {} if runner.history.arrays else plan.compiled  # no tracers may stay with the plan
    if key not in compiled:
        fun = _with_low_copies(runner, plan, plan.low_copies)
        fun.__name__ = fun.__qualname__ = eqn.params["name"]
        extra = [i for i, dtype in enumerate(plan.low_copies) if dtype is not None]
        compiled[key] = jax.jit(fun, **compat.jit_options(eqn.params, extra))
    return compiled[key](*_all_operands(decision, values, _low_copies(plan, values)))


def _run_remat(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    eqn = decision.eqn
    (plan,) = decision.call.programs
    policy = (hijax_programs.holder(eqn) or eqn).params["policy"]
    inner = runner
    if policy is not None and runner.products is None:  # nested checkpoints share the names
        inner = runner.inside_checkpoint()
    ask = None if inner.products is None else inner.products.translated(policy)
    low_copies = _made_low_copies(plan, values)
    fun = _with_low_copies(inner, plan, low_copies)
    args = _all_operands(decision, values, low_copies)
    return holders.checkpoint(eqn, fun, args, ask)


def _run_named(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    """Names a value in the dtype in which it was made, in which a checkpoint's policy saves it."""
    name = hijax_programs.given_name(decision.eqn)
    return [checkpoint_name(x, name) for x in _run_inline(runner, decision, values)]


def _run_shard_map(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    eqn = decision.eqn
    (plan,) = decision.call.programs
    specs = eqn.params["in_specs"]
    extra = [spec for spec, dtype in zip(specs, plan.low_copies, strict=True) if dtype is not None]
    operands = _all_operands(decision, values, _low_copies(plan, values))
    inner = _with_low_copies(runner, plan, plan.low_copies)
    lows = {i: s.dtype for i, s in enumerate(plan.in_states) if s.kind == Kind.LOW}
    for i in lows:  # cast inside: the transpose of a replicated input is a psum, here of float32
        operands[i] = values[i].full

    def fun(*args: Any) -> list[Any]:
        return inner(*(a.astype(lows[i]) if i in lows else a for i, a in enumerate(args)))

    in_specs, out_specs = (*specs, *extra), list(eqn.params["out_specs"])
    return holders.shard_map(eqn, fun, in_specs, out_specs)(*operands)


def _run_scan(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    (plan,) = decision.call.programs
    given = structure.loop_operands(decision.eqn, _operands(decision, values))
    first, count = len(given.consts), len(given.carry)
    read_consts = [_read_in_loop(v, x) for v, x in zip(values, given.consts, strict=False)]
    # Each slice of `xs` is read once: a low copy of all of `xs` would only use memory for longer.
    # One that there is already, as a loop around this one has it for all its turns, is cut up too.
    pairs = list(zip(values, plan.low_copies, strict=True))
    low_copies = [None if dtype is None else v.low(dtype) for v, dtype in pairs[:first]]
    low_copies += [None] * count
    low_xs = [None if dtype is None else v.made_low(dtype) for v, dtype in pairs[first + count :]]
    out_states = (*decision.call.out_states[:count], *plan.out_states[count:])

    def body(carry: Any, slices: tuple[Any, Any, Any]) -> list[Any]:
        xs, low_slices, amaxes = slices  # each iteration has its own slice of the histories
        return runner.recording(runner.history.inside(decision, amaxes)).run(
            plan,
            [*(read() for read in read_consts), *carry, *xs],
            [*low_copies, *low_slices],
            out_states,
        )

    slices = given.xs, low_xs, list(runner.history.arrays)
    return holders.scan(decision.eqn, body, given.carry, slices)


def _read_in_loop(value: Value, operand: Any) -> Callable[[], Any]:
    """Returns a function by which the body of a loop reads a value that no iteration changes."""
    if value.is_low and sums.is_low(operand):
        return sums.detached(operand, value.full)
    return lambda: operand


def _run_while(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    cond, body = decision.call.programs
    given = structure.loop_operands(decision.eqn, _operands(decision, values))
    body_values = values[len(given.asked) : len(given.asked) + len(given.consts)]
    low_copies = [
        None if dtype is None else v.low(dtype)
        for v, dtype in zip(body_values, body.low_copies, strict=False)
    ]
    low_copies += [None] * len(given.carry)

    def going(carry: Any) -> Any:
        return runner.run(cond, [*given.asked, *carry])[0]

    def iteration(carry: Any, beside: Any) -> tuple[list[Any], Any]:
        inputs = [*given.consts, *carry]
        return runner.run(body, inputs, low_copies, decision.call.out_states), beside

    return holders.while_loop(decision.eqn, going, iteration, given.carry)[0]


def _run_cond(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    call = decision.call
    index, *operands = _operands(decision, values)

    def branch(plan: Plan) -> Callable[..., list[Any]]:
        low_copies = _low_copies(plan, values[1:])
        return lambda *args: runner.run(plan, args, low_copies, call.out_states)

    return holders.cond(decision.eqn, index, [branch(p) for p in call.programs], *operands)


def _run_custom(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    (plan,) = decision.call.programs
    return custom_rules.run(runner, decision.eqn, plan, [v.full for v in values])


def _run_held(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    (plan,) = decision.call.programs
    return held_programs.run(runner, decision.eqn, plan, [v.full for v in values])


def _run_placed(runner: Interpreter, decision: Decision, values: Sequence[Value]) -> list[Any]:
    """Binds a `compute_on` or an `xla_metadata_call` around the plan's own program."""
    eqn = decision.eqn
    (plan,) = decision.call.programs
    operands = _operands(decision, values)
    inner = jax.make_jaxpr(lambda *args: runner.run(plan, args))(*operands)
    return eqn.primitive.bind(*operands, **{**eqn.params, "jaxpr": inner})


_RUN: dict[str, Callable[..., Any]] = {
    "jit": _run_jit,
    **dict.fromkeys(structure.CHECKPOINTS, _run_remat),
    "shard_map": _run_shard_map,
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    **dict.fromkeys(structure.PLACED, _run_placed),
    "custom_jvp_call": _run_custom,
    "custom_vjp_call": _run_custom,
}
