"""The base of wrappers around an optimizer that have a state of their own form."""

import abc
from typing import Any

import optax

from mpjax._base.errors import message
from mpjax._base.typing import PyTree
from mpjax._scaling.transformation import check_transformation

OTHER_FORM = (
    "A checkpoint of another form: mpjax.optim.adopt_state(tx, opt_state, params).",
    "Else make one with tx.init(params).",
)
"""The advice for a state that the wrapper did not make."""


class Wrapper(abc.ABC):
    """A wrapper around `inner`, with a state of a type of its own."""

    name: str
    state_type: type[Any]

    def __init__(self, inner: optax.GradientTransformation) -> None:
        check_transformation(inner, f"{self.name}(inner)")
        self.inner = optax.with_extra_args_support(inner)

    @abc.abstractmethod
    def init(self, params: PyTree) -> PyTree:
        """Returns the state to start from."""

    @abc.abstractmethod
    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates, and the next state."""

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns the wrapper as optax has them."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def check_state(self, state: PyTree, where: str) -> None:
        """Raises ValueError for a state that is not of the wrapper's type."""
        if not isinstance(state, self.state_type):
            got = f"the state is no {self.state_type.__name__}; got a {type(state).__name__}."
            raise ValueError(message(where, got, *OTHER_FORM))
