"""`explain`: the decisions of autocast for a function with their reasons, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mpjax._autocast import api
from mpjax._autocast.arguments import parameters, stateful
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide.decided import Settings
from mpjax._autocast.eight_bits import delayed
from mpjax._autocast.tracing import trace
from mpjax._autocast.why import provenance
from mpjax._autocast.why.explanation import Casts, Explanation, Row
from mpjax._base import compat
from mpjax._base.dtypes import short_name
from mpjax._base.foreign_keywords import EXPLAIN
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import PolicySpec
from mpjax._jaxpr.op_rules import parse_rules
from mpjax._policies.order import refuse_policy_first
from mpjax._policies.policy import get_policy, shown_name

Describe = Callable[[Any, Any], Explanation]


@names_keywords(EXPLAIN, behind="(params, batch)")
def explain(
    fun: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    rules: Any = None,
    dot_precision: Any = None,
    params: Any = None,
) -> Callable[..., Explanation]:
    """Returns a function that shows the decisions of `autocast` for `fun`.

    Args:
      fun: a function of arrays.
      policy, rules, dot_precision, params: as for `autocast`.

    Returns:
      A function of the arguments of `fun`, which may be arrays or `jax.ShapeDtypeStruct`s; it
      computes nothing. Its result prints as a table of modules with their operations, dtypes and
      reasons. Layers that differ only in a number share their lines. `.rows`, `.casts` and
      `.to_dict()` are complete.

    Raises:
      ValueError, TypeError: as `autocast`.

    Dtypes:
      The table names the dtype of a product's operands, and the dtype of any other operation's
      result. A result that XLA fuses between two low values, and never stores, is float32.

    Transforms:
      None: it is for people.

    Example:
      >>> table = mpjax.explain(lambda w, x: jnp.sum(jnp.exp(x @ w)), "bf16-mixed")(
      ...     jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> [(row.operation, row.dtype) for row in table.rows]
      [('dot_general', 'bf16'), ('exp', 'f32'), ('reduce_sum', 'f32')]

    References:
      autocast
    """
    refuse_policy_first(fun, policy, "explain", "fun")
    overrides, widest = parse_rules(rules)
    fun, owner = stateful.with_owner(fun)
    # The table is the same without histories: products then scale by the values at hand.
    stateless = policy if policy is None else delayed.without_history(get_policy(policy))
    fast = api.autocast(fun, stateless, rules=rules, dot_precision=dot_precision, params=params)
    named = parameters.checked(params, "explain")

    def describe(args: Any, kwargs: Any) -> Explanation:
        chosen: Any = get_policy(policy)
        ordered = tuple(sorted(overrides.items()))
        settings = Settings(chosen, ordered, widest, None, params=named)
        # A plan refers weakly to its jaxpr, which `_traced` keeps alive.
        _traced, plan = api.planned(fun, args, kwargs, settings)
        program = trace(fast, args, kwargs).jaxpr.jaxpr
        name = getattr(fun, "__name__", type(fun).__name__)
        return Explanation(name, shown_name(chosen), _rows(plan), _casts(program))

    return _Explained(describe, owner, fun)


class _Explained:
    """The function that `explain` returns; printed, it says that it has to be called."""

    def __init__(self, describe: Describe, owner: tuple[Any, ...], fun: Any) -> None:
        self._describe = describe
        self._owner = owner
        self._name = getattr(fun, "__name__", type(fun).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        """Returns the decisions for these arguments."""
        return _on_arrays(self._describe, (*self._owner, *args), kwargs)

    def __repr__(self) -> str:
        name = self._name
        call = f"print(explain({name}, policy)(params, batch))"
        return f"<explain of {name}: call it with the arguments of {name}, as in {call}>"


def _on_arrays(describe: Describe, args: Any, kwargs: Any) -> Explanation:
    """Returns `describe(args, kwargs)` with a tracer in place of each `ShapeDtypeStruct`."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    tables: list[Explanation] = []

    def inside(*arrays: Any) -> None:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        tables.append(describe(*jax.tree.unflatten(treedef, full)))

    jax.eval_shape(inside, *(leaves[i] for i in places))
    return tables[0]


def _rows(plan: Plan) -> tuple[Row, ...]:
    counts: dict[tuple[Any, ...], int] = {}
    places: dict[tuple[Any, ...], str] = {}
    for decided in provenance.findings(plan):
        cause = (decided.cause.operation, decided.cause.module) if decided.cause else ("", "")
        key = (decided.module, decided.operation, decided.dtype, decided.reason, cause)
        counts[key] = counts.get(key, 0) + 1
        places.setdefault(key, decided.where)
    rows = [
        Row(module, operation, count, dtype, reason, places[key], *cause)
        for key, count in counts.items()
        for module, operation, dtype, reason, cause in [key]
    ]
    order = {row.module: i for i, row in reversed(list(enumerate(rows)))}
    return tuple(sorted(rows, key=lambda row: order[row.module]))


def _casts(jaxpr: Any) -> tuple[Casts, ...]:
    counts: dict[tuple[str, str], list[int]] = {}
    for eqn in compat.equations(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        source, target = eqn.invars[0].aval, eqn.outvars[0].aval
        floats = [jax.numpy.issubdtype(a.dtype, jax.numpy.floating) for a in (source, target)]
        if all(floats) and source.dtype != target.dtype:
            key = (short_name(source.dtype), short_name(target.dtype))
            entry = counts.setdefault(key, [0, 0])
            entry[0] += 1
            entry[1] += target.size * target.dtype.itemsize
    return tuple(Casts(*key, *entry) for key, entry in counts.items())
