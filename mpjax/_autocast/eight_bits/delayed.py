"""Amax histories: the products of a plan that have one, and how each product gets its own.

A *history* is a pytree of plain containers. For each product it has an f32[3, steps]: the maxima of
its input, its weight and the gradient of its result in the last steps, newest first. Its recipe
says of how many steps. Lengths of scans around the product are leading axes. A product scales by
the maxima of its history, `amaxes`, and the cotangent of `amaxes` is the new maxima
(`product.recorded`).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._autocast.known import scopes
from mpjax._autocast.product import Config, current
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.tree import OVERWRITE_WITH_GRADIENT, RECORDED
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.quantized_policy import QuantizedPolicy, recipes_in

KEEPING = frozenset({"jit", "scan", *structure.CHECKPOINTS})
"""Calls whose products can have histories: their programs run a known number of times."""


class HistorySite(NamedTuple):
    """One product with a history: its name, the lengths of the scans around it, its steps."""

    name: str
    shape: tuple[int, ...]
    steps: int


def has_history(policy: scopes.Policies) -> bool:
    """Whether a policy, or a policy of a map, has a recipe with amax histories."""
    return any(recipe.has_history for recipe in recipes_in(policy))


def without_history(policy: Any) -> Any:
    """Returns a policy that scales by the values at hand in place of those of earlier steps."""
    if not has_history(policy):
        return policy
    if isinstance(policy, QuantizedPolicy):
        recipe: Any = policy.recipe
        return QuantizedPolicy(policy.base, recipe.without_history)
    rules = [(pattern, without_history(chosen)) for pattern, chosen in policy.rules]
    return type(policy)(without_history(policy.default), rules)


# -- products with histories ---------------------------------------------------------------------


def sites(plan: Any) -> tuple[HistorySite, ...]:
    """Returns the products of a plan that have a history, in the order in which they run."""
    all_sites = [site for decision in plan.decisions for site in _of(decision)]
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for site in all_sites:
        counts[site.name] += 1
        again = f"#{counts[site.name]}" if counts[site.name] > 1 else ""
        named.append(site._replace(name=site.name + again))
    return tuple(named)


def _of(decision: Any) -> Iterator[HistorySite]:
    """Yields the sites of one equation, named by the paths of their weights."""
    eqn = decision.eqn
    if decision.how is not None and decision.how.records:
        yield HistorySite(decision.path or "weight", (), decision.how.history)
    if decision.call is None or not keeps(eqn):
        return
    lengths = (eqn.params["length"],) if eqn.primitive.name == "scan" else ()
    for inner in decision.call.programs[0].decisions:
        for site in _of(inner):
            yield site._replace(shape=(*lengths, *site.shape))


def keeps(eqn: Eqn) -> bool:
    """Whether products inside a call may have histories: in a `jit`, a `scan`, a checkpoint."""
    return eqn.primitive.name in KEEPING and not eqn.params.get("differentiated", False)


class Amaxes:
    """The maxima of earlier steps for the products of one plan.

    Args:
      arrays: f32[3] for each product with a history, in order.
      calibrates: whether products scale by the values at hand, and record their maxima.
    """

    def __init__(self, arrays: Sequence[Any] = (), *, calibrates: bool = False) -> None:
        self.arrays = arrays
        self.calibrates = calibrates
        self._found: dict[int, tuple[Any, ...]] = {}

    def assigned(self, plan: Any) -> Amaxes:
        """Returns the same maxima, each assigned to a decision of `plan`."""
        if not self.arrays:
            return NONE
        amaxes = Amaxes(calibrates=self.calibrates)
        rest = iter(self.arrays)
        for decision in plan.decisions:
            if mine := tuple(next(rest) for _ in _of(decision)):
                amaxes._found[id(decision)] = mine
        return amaxes

    def inside(self, decision: Any, arrays: Sequence[Any] | None = None) -> Amaxes:
        """Returns the maxima for the program of a call: its own, or `arrays` in their place."""
        mine = self._found.get(id(decision), ()) if arrays is None else arrays
        return Amaxes(mine, calibrates=self.calibrates) if mine else NONE

    def of(self, decision: Any, how: Config) -> tuple[Config, Any]:
        """Returns the config of one product, and its maxima of earlier steps or None."""
        if not how.records:
            return how, None
        mine = self._found.get(id(decision))
        if mine is None:
            return current(how, records=False), None
        return (current(how, records=True) if self.calibrates else how), mine[0]


NONE = Amaxes()
"""No maxima: nothing is recorded."""


def check_not_differentiated(plan: Any, where: str) -> None:
    """Refuses a function that differentiates inside: maxima of its gradients could not come out."""
    for eqn in compat.equations(plan.jaxpr):
        transposed = scopes.is_transposed(eqn)
        if eqn.primitive.name in PRODUCTS and transposed:
            got = "the function differentiates, and what its gradients see could not come out."
            fix = f"Differentiate outside: jax.grad(fast.apply), of fast = {where}(loss, policy)."
            raise ValueError(message(where, got, fix))


# -- histories -----------------------------------------------------------------------------------


def wrapped(by_name: Mapping[str, Any]) -> Any:
    """Returns arrays by product in a tree whose gradients loss scaling leaves unscaled."""
    return {OVERWRITE_WITH_GRADIENT: {RECORDED: dict(by_name)}}


def unwrapped(history: Any) -> dict[str, Any]:
    """Returns the arrays by product.

    Raises:
      TypeError: `history` is not one.
    """
    try:
        return dict(history[OVERWRITE_WITH_GRADIENT][RECORDED])
    except (TypeError, KeyError, IndexError):
        got = f"got {type(history).__name__} as the history."
        fix = "Type history = fast.init(params, batch), or what fast.update returned."
        raise TypeError(message("with_amax_history", got, fix)) from None


def zeros(products: Sequence[HistorySite]) -> Any:
    """Returns the histories of products before their first step: zeros."""
    shapes = {site.name: (*site.shape, 3, site.steps) for site in products}
    return wrapped({name: jnp.zeros(shape, FLOAT32) for name, shape in shapes.items()})


def amaxes_of(history: Any) -> Any:
    """Returns the maxima of histories by which products scale: f32[..., 3], 0 if none is known.

    The cotangent of a maximum goes to the newest entry of its history.
    """

    def amax(x: jax.Array) -> jax.Array:
        fixed = jax.lax.stop_gradient(x)
        return jnp.max(fixed, axis=-1) + (x[..., 0] - fixed[..., 0])

    return jax.tree.map(amax, history)


def updated(history: Any, seen: Any, finite: Any = True) -> Any:
    """Returns the histories with the maxima of one step in front; a 0, inf or NaN is left out.

    Args:
      history: f32[..., 3, steps] by product.
      seen: the maxima, f32[..., 3] by product.
      finite: whether the step counts: a skipped step leaves the histories as they are.
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
        fix = "Make them anew, with init; of a train step: step.adopt(state, batch=batch)."
        raise ValueError(message(where, got, fix))
    return [by_name[name] for name in wanted]


@jax.tree_util.register_pytree_with_keys_class
class Tracked:
    """The first argument of a function, and the maxima of earlier steps for its products.

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
    def tree_unflatten(cls, calibrates: bool, children: Any) -> Tracked:
        """Returns an instance with other leaves."""
        return cls(*children, calibrates=calibrates)

    def for_plan(self, plan: Any) -> Amaxes:
        """Returns the maxima for the products of a plan."""
        check_not_differentiated(plan, "with_amax_history")
        arrays = arrays_for(plan, self.amaxes, "with_amax_history")
        return Amaxes(arrays, calibrates=self.calibrates)
