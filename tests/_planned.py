"""What autocast decides for a function: plans, as lists that two of them can be compared by."""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax import get_policy
from mpjax._autocast import api
from mpjax._autocast.decide import may, read_flags, reads, states
from mpjax._autocast.decide.decided import Action, Settings
from mpjax._autocast.known import constants, norms, walk, ways
from mpjax._base import compat
from mpjax._jaxpr import op_rules, sizes, structure

Kind = states.Kind
# fmt: off
__all__ = [  # the one door of tests to what is decided, to how, and to what is read
    "Planned", "dtypes", "plan_of",
    "api", "compat", "constants", "may", "norms", "op_rules", "read_flags", "reads",
    "sizes", "states", "structure", "walk", "ways",
    "Action", "Kind", "Settings",
]
# fmt: on


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
            rows += [row for inner in decision.call.programs for row in dtypes(inner)]
        low = [planned.states[v] for v in decision.eqn.outvars]
        how = decision.action, decision.low, decision.out_dtype
        rows.append((decision.eqn.primitive.name, how, low))
    return rows


class Planned:
    """The plan of a function under a policy, and the trace that it is of."""

    def __init__(self, fun, *args, policy="bf16-mixed", rules=None):
        overrides, widest = op_rules.parse_rules(rules)
        settings = Settings(get_policy(policy), tuple(sorted(overrides.items())), widest)
        arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), args)
        self.traced, self.plan = api.planned(fun, arrays, {}, settings)

    @property
    def groups(self):
        return [step.group for step in self.plan.steps if step.group is not None]

    def decisions(self, name):
        return [d for d in self.plan.decisions if d.eqn.primitive.name == name]

    def states(self, name):
        return [self.plan.states[v] for d in self.decisions(name) for v in d.eqn.outvars]

    def kinds(self, name):
        return [s.kind for s in self.states(name)]

    def call(self, name):
        (decision,) = self.decisions(name)
        return decision.call
