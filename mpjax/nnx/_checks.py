"""Checks an optimizer or a state that a function for NNX models was given."""

from typing import Any

from mpjax._base.described import described
from mpjax._base.donated import refuse_donated
from mpjax._base.errors import message
from mpjax._scaling.optim_state import find_states, no_scale_text
from mpjax._training.state import TrainState, checked_state


def check_optimizer(optimizer: Any) -> None:
    """Raises for an argument of `undo_skipped` that is no optimizer in `with_loss_scale`."""
    where = "nnx.undo_skipped"
    if not hasattr(optimizer, "opt_state"):
        got = f"the first argument must be the nnx.Optimizer; got {described(optimizer)}."
        raise TypeError(message(where, got, "Type mpjax.nnx.undo_skipped(optimizer, model)."))
    if not find_states(optimizer.opt_state):
        raise ValueError(no_scale_text(optimizer.opt_state, where))


def state_of_step(state: Any, where: str = "train step", place: str = "first") -> TrainState:
    """Returns a state of an NNX step; raises TypeError for anything else."""
    return checked_state(state, where, place, made_by="step.init()")


def variables_of(state: Any, where: str, place: str = "first") -> tuple[Any, Any]:
    """Returns the parameters and the other variables in a state of an NNX step.

    Raises:
      TypeError: it is no such state.
      ValueError: it has been donated to a step.
    """
    state = state_of_step(state, where, place)
    refuse_donated(state, where)
    return state.params, state.extra_state
