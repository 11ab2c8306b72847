"""Checks an optimizer, a state or a model that a function for NNX models was given."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._base.described import described
from mpjax._base.donated import refuse_donated
from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.tree import leaf_paths
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


def check_model(model: Any, where: str, fix: str) -> None:
    """Raises TypeError for anything but an NNX module; `fix` is what to type instead."""
    if not isinstance(model, nnx.Module):
        raise TypeError(message(where, f"got {described(model)} in place of a model.", fix))


def check_variables(given: tuple[Any, Any], known: tuple[Any, Any], where: str, of: str) -> None:
    """Raises ValueError for a model of another form.

    Variables that are not trained, such as caches, may have other shapes, and there may be more.

    Args:
      given: the parameters of the model, and its other variables.
      known: those that it should have.
      where: the method that it was given to.
      of: what has these, 'the state'.
    """
    ours, theirs = map(_by_path, given), map(_by_path, known)
    fix = "Give a model of the form that the step was made with; step.merge(state) makes one."
    for kind, mine, other in zip(("parameters", "variables"), ours, theirs, strict=True):
        missing, more = other.keys() - mine.keys(), mine.keys() - other.keys()
        if missing or (more and kind == "parameters"):
            name = of if missing else "the given model"
            got = f"the {kind} differ; {min(missing or more)!r} is only in {name}."
            raise ValueError(message(where, got, fix))
        for path in other if kind == "parameters" else ():
            if jnp.shape(mine[path]) != jnp.shape(other[path]):
                got = f"{path!r} is {describe(mine[path])} in the given model, "
                got += f"and {describe(other[path])} in {of}."
                raise ValueError(message(where, got, fix))


def _by_path(tree: Any) -> dict[str, Any]:
    tree = nnx.as_pure(tree)
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
