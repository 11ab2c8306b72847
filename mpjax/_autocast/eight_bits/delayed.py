"""Amax histories: which products of a plan have one, and how they are handed to where they are.

A *history* is a pytree of plain containers: by product, the largest values of its input, its weight
and the gradient of its result in the last steps, newest first: f32[3, steps], with the lengths of
the scans around it in front. Its products read the largest of each, `amaxes`, and what they saw is
the cotangent of that (`product.recorded`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._autocast.decide import scopes
from mpjax._autocast.product import Config, current
from mpjax._base import compat
from mpjax._base.errors import message
from mpjax._base.tree import OVERWRITE_WITH_GRADIENT, RECORDED
from mpjax._jaxpr import structure
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.quantized_policy import QuantizedPolicy, recipes_in

KEEPING = frozenset({"jit", "scan", *structure.CHECKPOINTS})
"""Calls whose products keep histories: what each of them holds is run as often as is known."""

_FLOAT32 = jnp.dtype("float32")


class HistorySite(NamedTuple):
    """One product that keeps a history: its name, and the lengths of the scans around it."""

    name: str
    shape: tuple[int, ...]


def has_history(policy: scopes.Policies) -> bool:
    """Whether a policy, or a policy of a map, has a recipe that needs a place for its state."""
    return bool(_recipes(policy))


def without_history(policy: Any) -> Any:
    """Returns a policy with the scales of the values at hand in place of those of earlier steps."""
    if not has_history(policy):
        return policy
    if isinstance(policy, QuantizedPolicy):
        recipe: Any = policy.recipe
        return QuantizedPolicy(policy.base, recipe.without_history)
    rules = [(pattern, without_history(chosen)) for pattern, chosen in policy.rules]
    return type(policy)(without_history(policy.default), rules)


def history_length(policy: scopes.Policies) -> int:
    """Returns how many steps the histories of a policy hold: the most of any recipe of a map."""
    return max(recipe.amax_history_len for recipe in _recipes(policy))


def _recipes(policy: scopes.Policies) -> list[Any]:
    return [recipe for recipe in recipes_in(policy) if recipe.has_history]


# -- which products ------------------------------------------------------------------------------


def sites(plan: Any) -> tuple[HistorySite, ...]:
    """Returns the products of a plan that keep a history, in the order in which they are run."""
    all_sites = [site for decision in plan.decisions for site in _of(decision)]
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for site in all_sites:
        counts[site.name] += 1
        again = f"#{counts[site.name]}" if counts[site.name] > 1 else ""
        named.append(HistorySite(site.name + again, site.shape))
    return tuple(named)


def _of(decision: Any) -> Iterator[HistorySite]:
    """Yields the sites of one equation, named by the paths of their weights."""
    eqn = decision.eqn
    if decision.how is not None and decision.how.records:
        yield HistorySite(decision.path or "weight", ())
    if decision.call is None or not keeps(eqn):
        return
    lengths = (eqn.params["length"],) if eqn.primitive.name == "scan" else ()
    for inner in decision.call.plans[0].decisions:
        for site in _of(inner):
            yield HistorySite(site.name, (*lengths, *site.shape))


def keeps(eqn: Any) -> bool:
    """Whether products inside a call may keep histories."""
    return eqn.primitive.name in KEEPING and not eqn.params.get("differentiated", False)


class Amaxes:
    """What the products of one plan read of earlier steps, on its way to where each is run.

    Args:
      arrays: those of a plan's products, in order.
      calibrates: whether products scale by the values at hand, and record what they see.
    """

    def __init__(self, arrays: Sequence[Any] = (), *, calibrates: bool = False) -> None:
        self.arrays = arrays
        self.calibrates = calibrates
        self._found: dict[int, tuple[Any, ...]] = {}

    def assigned(self, plan: Any) -> Amaxes:
        """Returns these, looked up by the decisions of `plan`."""
        if not self.arrays:
            return NONE
        amaxes = Amaxes(calibrates=self.calibrates)
        rest = iter(self.arrays)
        for decision in plan.decisions:
            if mine := tuple(next(rest) for _ in _of(decision)):
                amaxes._found[id(decision)] = mine
        return amaxes

    def inside(self, decision: Any, arrays: Sequence[Any] | None = None) -> Amaxes:
        """Returns those for the program of a call; `arrays` take the place of them."""
        mine = self._found.get(id(decision), ()) if arrays is None else arrays
        return Amaxes(mine, calibrates=self.calibrates) if mine else NONE

    def of(self, decision: Any, how: Config) -> tuple[Config, Any]:
        """Returns how one product is run, and what it reads of earlier steps, or None."""
        if not how.records:
            return how, None
        mine = self._found.get(id(decision))
        if mine is None:
            return current(how, records=False), None
        return (current(how, records=True) if self.calibrates else how), mine[0]


NONE = Amaxes()
"""Where nothing is recorded."""


def check_not_differentiated(plan: Any, where: str) -> None:
    """Refuses a function that has derivatives inside: what they see could not come out."""
    for eqn in compat.equations(plan.jaxpr):
        transposed = scopes.is_transposed(eqn.source_info.name_stack)
        if eqn.primitive.name in PRODUCTS and transposed:
            got = "the function differentiates, and what its gradients see could not come out."
            fix = f"Differentiate outside: jax.grad(fast.apply), of fast = {where}(loss, policy)."
            raise ValueError(message(where, got, fix))


# -- histories -----------------------------------------------------------------------------------


def wrapped(by_name: Mapping[str, Any]) -> Any:
    """Returns arrays by product as a tree that gradients leave as they are: no one scales them."""
    return {OVERWRITE_WITH_GRADIENT: {RECORDED: dict(by_name)}}


def unwrapped(history: Any) -> dict[str, Any]:
    """Returns the arrays by product.

    Raises:
      TypeError: it is no history.
    """
    try:
        return dict(history[OVERWRITE_WITH_GRADIENT][RECORDED])
    except (TypeError, KeyError, IndexError):
        got = f"got {type(history).__name__} as the history."
        fix = "Type history = fast.init(params, batch), or what fast.update returned."
        raise TypeError(message("with_amax_history", got, fix)) from None


def zeros(products: Sequence[HistorySite], length: int) -> Any:
    """Returns the histories of products that have seen nothing."""
    return wrapped({site.name: jnp.zeros((*site.shape, 3, length), _FLOAT32) for site in products})


def amaxes_of(history: Any, policy: scopes.Policies) -> Any:
    """Returns what products read, the largest values: f32[..., 3]; 0 where nothing was seen yet.

    Its cotangent is that of the newest entry of each history.
    """
    newest = all(recipe.amax_compute_algo == "most_recent" for recipe in _recipes(policy))

    def amax(x: jax.Array) -> jax.Array:
        kept = jax.lax.stop_gradient(x)
        largest = kept[..., 0] if newest else jnp.max(kept, axis=-1)
        return largest + (x[..., 0] - kept[..., 0])

    return jax.tree.map(amax, history)


def updated(history: Any, seen: Any, finite: Any = True) -> Any:
    """Returns the histories with what one step saw in front; 0 and what is not finite is not.

    Args:
      history: f32[..., 3, steps] by product.
      seen: f32[..., 3] by product.
      finite: whether the step counts: the histories of one that was skipped stay.
    """

    def push(old: jax.Array, new: jax.Array) -> jax.Array:
        shifted = jnp.concatenate([new[..., None], old[..., :-1]], axis=-1)
        counts = jnp.isfinite(new) & (new > 0) & finite
        return jnp.where(counts[..., None], shifted, old)

    return jax.tree.map(push, history, seen)


def arrays_for(plan: Any, amaxes: Any, where: str) -> list[Any]:
    """Returns the arrays of a plan's products in order.

    Raises:
      ValueError: the histories are of another function.
    """
    by_name = unwrapped(amaxes)
    wanted = {site.name: (*site.shape, 3) for site in sites(plan)}
    given = {name: tuple(x.shape) for name, x in by_name.items()}
    if given != wanted:
        odd = sorted(set(given.items()) ^ set(wanted.items()))[0][0]
        got = f"the histories are of another function or policy: {odd!r} is "
        got += f"{given.get(odd, 'not among them')}, and {wanted.get(odd, 'no product')} here."
        raise ValueError(message(where, got, "Make them anew, with init."))
    return [by_name[name] for name in wanted]


@jax.tree_util.register_pytree_with_keys_class
class WithAmaxes:
    """The first argument of a function, and what its products read of earlier steps.

    Args:
      params: the argument.
      amaxes: f32[..., 3] by product, `wrapped`.
      calibrates: as in `Amaxes`.
    """

    def __init__(self, params: Any, amaxes: Any, calibrates: bool = False) -> None:
        self.params = params
        self.amaxes = amaxes
        self.calibrates = calibrates

    def tree_flatten_with_keys(self) -> Any:
        """Returns both with their names, so that paths of parameters begin with 'params'."""
        names = map(jax.tree_util.GetAttrKey, ("params", "amaxes"))
        return tuple(zip(names, (self.params, self.amaxes), strict=True)), self.calibrates

    @classmethod
    def tree_unflatten(cls, calibrates: bool, children: Any) -> WithAmaxes:
        """Returns one of other leaves."""
        return cls(*children, calibrates=calibrates)

    def for_plan(self, plan: Any) -> Amaxes:
        """Returns the arrays for the products of a plan."""
        check_not_differentiated(plan, "with_amax_history")
        arrays = arrays_for(plan, self.amaxes, "with_amax_history")
        return Amaxes(arrays, calibrates=self.calibrates)
