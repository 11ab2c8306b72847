"""Reads from an optimizer state, if a loss scale is inside, whether its last step was taken."""

import functools
from typing import Any

import jax.numpy as jnp

from mpjax._base.typing import Array
from mpjax._scaling.optim_state import find_states


def was_taken(inner_state: Any) -> Array:
    """Returns bool[]: false if every `with_loss_scale` inside has skipped the step."""
    flags = [state.grads_finite for _, state in find_states(inner_state)]
    return functools.reduce(jnp.logical_or, flags) if flags else jnp.asarray(True)
