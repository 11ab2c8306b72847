"""The base of wrappers that store moments in fewer bits than they are computed in."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.tree import is_array, is_floating, to_full
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.codes import decode, is_coded
from mpjax._low_precision.moments import Moment, map_moments, with_classes, with_containers
from mpjax._low_precision.rounding import scattered
from mpjax._low_precision.skipped import was_taken
from mpjax._low_precision.wrapper import OTHER_FORM, Wrapper
from mpjax._scaling.optim_state import find_states, gradient_params


class StoredMoments(Wrapper):
    """A wrapper that decodes the moments of `inner`, lets it compute, and encodes them again.

    `inner` sees gradients and moments in float32, and the parameters as they are.
    """

    @abc.abstractmethod
    def encode(self, moment: Moment, x: Array, random: Array, before: Any) -> Any:
        """Returns a moment as it is stored.

        Args:
          moment: its place.
          x: the moment in float32.
          random: u32 of its shape.
          before: how it was stored; None where the state is made.
        """

    @abc.abstractmethod
    def is_own(self, moment: Moment, x: Any, shape: tuple[int, ...]) -> bool:
        """Whether a moment is in this wrapper's own stored form."""

    @abc.abstractmethod
    def check_params(self, params: PyTree, moments: list[Moment]) -> None:
        """Refuses parameters or rules that do not fit, before the state is made."""

    def init(self, params: PyTree) -> PyTree:
        """Returns the state to start from."""
        inner_state = self.inner.init(params)
        params = gradient_params(params)
        count = jnp.zeros((), jnp.int32)
        moments: list[Moment] = []
        encoded = self._encoded(inner_state, params, count, moments, {})
        self.check_params(params, moments)
        return self.state_type(count, encoded)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates of `inner`, and the next state."""
        where = f"{self.name}.update"
        self.check_state(state, where)
        like = updates if params is None else gradient_params(params)
        before: dict[int, Any] = {}

        def decoded(moment: Moment, x: Any) -> Array:
            before[moment.number] = x
            if not (is_coded(x) or is_floating(x)):  # of a complex parameter: not stored here
                return x
            shape = jnp.shape(x.codes if is_coded(x) else x)
            if not self.is_own(moment, x, shape):
                got = f"the state is of another form; {moment.where!r} is {stored_form(x)}."
                raise ValueError(message(where, got, *OTHER_FORM))
            return decode(x) if is_coded(x) else to_full(x)

        old = map_moments(decoded, with_classes(state.inner_state), like, is_leaf=is_coded)
        grads = jax.tree.map(lambda g: to_full(g) if is_array(g) else g, updates)
        steps, new = self.inner.update(grads, old, params, **extra)
        count = jnp.where(was_taken(new), state.steps + 1, state.steps)
        encoded = self._encoded(new, like, count, [], before)
        if find_states(new):  # a step that was skipped inside leaves the stored bits as they are
            taken = was_taken(new)
            encoded = _choose_moments(taken, encoded, before, like)
        return steps, self.state_type(count, with_containers(encoded, state.inner_state))

    def _encoded(
        self,
        state: PyTree,
        params: PyTree,
        count: Array,
        moments: list[Moment],
        before: dict[int, Any],
    ) -> PyTree:
        def encode(moment: Moment, x: Any) -> Any:
            if not is_floating(x):
                return x
            moments.append(moment)
            random = scattered(x.shape, count, moment.number)
            return self.encode(moment, to_full(x), random, before.get(moment.number))

        return map_moments(encode, state, params)


def _choose_moments(taken: Array, new: PyTree, before: dict[int, Any], params: PyTree) -> PyTree:
    def choose(moment: Moment, x: Any) -> Any:
        return jax.tree.map(lambda a, b: jax.lax.select(taken, a, b), x, before[moment.number])

    return map_moments(choose, new, params, is_leaf=is_coded)


def stored_form(x: Any) -> str:
    """Returns the stored form of a moment, for a message."""
    if is_coded(x):
        return f"{x.codes.dtype.name} in {x.scales.shape[-1]} blocks"
    return str(x.dtype.name)
