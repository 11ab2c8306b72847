"""The base of wrappers that round 16-bit parameters: updates that land on the chosen value.

optax adds an update to a parameter and rounds the sum to the nearest. A wrapper with another
rounding chooses the target itself and returns, in float32, the way there: then the sum is exactly
the target, and there is nothing left to round (`rounding.land`).
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._base.dtypes import FLOAT32, describe
from mpjax._base.errors import message, warn
from mpjax._base.tree import is_array, is_castable, is_overwritten, path_str, to_full
from mpjax._base.typing import Array, KeyPath, PyTree
from mpjax._low_precision.rounding import is_narrow
from mpjax._low_precision.wrapper import Wrapper


class RoundingOwner(Wrapper):
    """A wrapper that owns the rounding of the 16-bit parameters that it is given.

    `inner` sees float32 gradients, and float32 weights in place of the parameters. Beside the
    state of `inner` something may be kept for each narrow parameter.
    """

    never: float | None = None  # a value that no kept array has, if it holds the rounding's rest
    by_chance: bool = False  # whether what a step loses is not lost in the mean

    @abc.abstractmethod
    def start(self, params: PyTree) -> PyTree:
        """Returns the first field of the state to start from."""

    @abc.abstractmethod
    def kept(self, params: PyTree, field: PyTree) -> PyTree:
        """Returns a tree with the array kept for each narrow parameter, and nothing elsewhere."""

    @abc.abstractmethod
    def weight(self, p: Array, kept: Any) -> Array:
        """Returns a narrow parameter in float32, as exactly as it is known."""

    @abc.abstractmethod
    def move(self, p: Array, kept: Any, weight: Array, step: Array) -> tuple[Array, Any]:
        """Returns the update of a narrow parameter for a float32 step, and the array kept for it.

        A step of zero leaves the kept array as it is (`unless_zero`).
        """

    def after(self, field: PyTree, kept: PyTree, inner_state: PyTree) -> PyTree:
        """Returns the first field of the next state."""
        del field, inner_state
        return kept

    def init(self, params: PyTree) -> PyTree:
        """Returns the state to start from."""
        _warn_of_nothing_to_round(self.name, params)
        field = self.start(params)
        inner_state = self.inner.init(self._weights(params, self.kept(params, field)))
        _refuse_second(self.name, inner_state)
        return self.state_type(field, inner_state)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Returns updates that land on the chosen values, and the next state."""
        where = f"{self.name}.update"
        if params is None:
            fix = "Type tx.update(grads, opt_state, params)."
            raise ValueError(message(where, "params is missing.", fix))
        self.check_state(state, where)
        kept = self.kept(params, state[0])
        _refuse_other_dtypes(where, params, kept)
        weights = self._weights(params, kept)
        grads = jax.tree.map(lambda g: to_full(g) if is_array(g) else g, updates)
        steps, inner_state = self.inner.update(grads, state.inner_state, weights, **extra)
        moved = map_narrow(self._moved, params, kept, weights, steps, other=_as_it_is)
        updates = jax.tree.map(lambda m: m.update, moved, is_leaf=_is_moved)
        kept = jax.tree.map(lambda m: m.kept, moved, is_leaf=_is_moved)
        return updates, self.state_type(self.after(state[0], kept, inner_state), inner_state)

    def _weights(self, params: PyTree, kept: PyTree) -> PyTree:
        return map_narrow(self.weight, params, kept, other=lambda p, _: p)

    def _moved(self, p: Array, kept: Any, weight: Array, step: Array) -> "_UpdateAndKept":
        # Rounded, so that no compiler contracts the product that it is in one use and not another.
        step = jax.lax.reduce_precision(step.astype(FLOAT32), 8, 23)
        update, now = self.move(p, kept, weight, step)
        if self.by_chance:
            return _UpdateAndKept(update, now)
        if self.never is not None:
            # A step of zero is no step: it must not round the kept array into the parameter. And
            # the update has to read the kept array: if neither result reads the other, a TPU's
            # compiler makes two kernels of them behind a root or a division, 1.4 to 1.6 times the
            # traffic. Hence the comparison with `never`, which is always false.
            never = jnp.asarray(self.never, now.dtype)
            update = jnp.where((step == 0) | (now == never), -0.0, update)
        # A step that is lost on what is kept too is the update: added to the parameter it is lost
        # as well, and `numerics.lost_updates` counts it.
        is_lost = (update == 0) & (now == kept) & (step != 0) & (to_full(p) != 0)
        return _UpdateAndKept(jnp.where(is_lost, step, update), now)


def _refuse_other_dtypes(where: str, params: PyTree, kept: PyTree) -> None:
    """Refuses parameters of other dtypes than those that the state was made for.

    What the state keeps of a parameter of 16 bits would go stale; of one that was cast to 16 bits
    behind `tx.init` it keeps nothing, and updates would be lost.
    """

    def check(path: KeyPath, p: Any, kept: Any) -> None:
        if is_array(kept) == is_narrow_leaf(path, p):
            return
        got = f"{path_str(path)!r} is {describe(p)}, and the state was made "
        if is_array(kept):
            got += "for parameters of 16 bits."
            why = "params + updates is float32, as in eqx.apply_updates."
            fix = "Type params = mpjax.optim.apply_updates(params, updates), or "
            fix += "optax.apply_updates."
        else:
            got += "before it was cast to 16 bits, for another dtype, such as float32."
            why = "Allowed: a state that was made of the parameters that are updated."
            fix = "Type params = policy.cast_to_param(params), and tx.init(params) after it; or "
            fix += "mpjax.optim.adopt_state(tx, opt_state, params), which goes on from this state."
        raise ValueError(message(where, got, why, fix))

    jax.tree_util.tree_map_with_path(check, params, kept)


def unless_zero(step: Array, new: Array, old: Array) -> Array:
    """Returns `new`, or after a step of zero `old`, sign of zero included."""
    return jnp.where(step == 0, old, new)


class _UpdateAndKept(NamedTuple):
    update: Any
    kept: Any


def _is_moved(x: Any) -> bool:
    return isinstance(x, _UpdateAndKept)


def _as_it_is(p: Any, kept: Any, weight: Any, step: Any) -> _UpdateAndKept:
    del p, weight
    return _UpdateAndKept(step, kept)


def map_narrow(
    fun: Callable[..., Any], params: PyTree, *rest: PyTree, other: Callable[..., Any]
) -> PyTree:
    """Returns the tree of `fun` of each narrow parameter, and of `other` of the rest."""

    def apply(path: KeyPath, p: Any, *more: Any) -> Any:
        return (fun if is_narrow_leaf(path, p) else other)(p, *more)

    return jax.tree_util.tree_map_with_path(apply, params, *rest)


def is_narrow_leaf(path: KeyPath, p: Any) -> bool:
    """Whether a leaf is a 16-bit parameter, and one that is updated by addition."""
    return is_castable(p) and is_narrow(p.dtype) and not is_overwritten(path)


def nothing(*_: Any) -> optax.MaskedNode:
    """Returns optax's placeholder, for a parameter that a state keeps nothing for."""
    return optax.MaskedNode()


def owners(opt_state: PyTree) -> list[tuple[str, Any]]:
    """Returns the states of wrappers that own a rounding, with their paths, outermost first."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_owner)
    return [(path_str(path), x) for path, x in leaves if _is_owner(x)]


def _is_owner(x: Any) -> bool:
    return hasattr(type(x), "owns_rounding_as")


def _warn_of_nothing_to_round(name: str, params: PyTree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves or any(is_narrow_leaf(path, p) for path, p in leaves):
        return
    got = f"no parameter is float16 or bfloat16; {path_str(leaves[0][0])!r} is "
    got += f"{describe(leaves[0][1])}: here it does nothing."
    fix = "Train under 'bf16-true', cast the parameters first, or drop the wrapper."
    warn(message(name, got, fix))


def _refuse_second(name: str, inner_state: PyTree) -> None:
    inner_owners = owners(inner_state)
    if not inner_owners:
        return
    first = inner_owners[0][1].owns_rounding_as
    got = f"it was given an optimizer that owns the rounding already ({first})."
    allowed = "Allowed: one of with_master_weights, with_stochastic_rounding and with_kahan."
    fix = "Drop one; for some parameters the one and for others the other, use optax.partition."
    raise ValueError(message(name, got, allowed, fix))
