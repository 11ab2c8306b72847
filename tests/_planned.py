"""What autocast decides for a function: plans, as lists that two of them can be compared by."""

from typing import Any

import jax

from mpjax import get_policy
from mpjax._autocast import api
from mpjax._autocast.decide.decided import Settings


def plan_of(fun: Any, args: Any, policy: str = "bf16-mixed", **settings: Any) -> Any:
    """Returns the plan of a function, and the trace that it is of, which it holds weakly."""
    made = []

    def trace(*xs: Any) -> tuple[()]:
        made.append(api.planned(fun, xs, {}, Settings(get_policy(policy), **settings)))
        return ()

    jax.eval_shape(trace, *args)
    return made[0]


def dtypes(planned: Any) -> list[Any]:
    """Returns what a plan decides for each operation, in order: action, dtypes, what is low."""
    rows: list[Any] = []
    for decision in planned.decisions:
        if decision.call is not None:
            rows += [row for inner in decision.call.plans for row in dtypes(inner)]
        low = [planned.states[v] for v in decision.eqn.outvars]
        how = decision.action, decision.low, decision.out_dtype
        rows.append((decision.eqn.primitive.name, how, low))
    return rows
