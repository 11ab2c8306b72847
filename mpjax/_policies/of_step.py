"""The policy of the train step that is being traced: warns where autocast inside has another."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from mpjax._base.errors import message, warn
from mpjax._policies.parts import policies_in

_step = jax.make_user_context(None)


@contextmanager
def in_step(policy: Any) -> Generator[None]:
    """Tells autocast the policy of a train step while that step traces its loss."""
    with _step(policy):
        yield


def warn_of_other_step(policy: Any, where: str) -> None:
    """Warns of autocast to a 16-bit dtype that the step around it does not know, nor scale for."""
    step = _step.value
    if step is None:
        return
    known = {p.compute_dtype for p in policies_in(step)}
    low = {p.compute_dtype for p in policies_in(policy)}
    if any(dtype.itemsize < 4 and dtype not in known for dtype in low):
        got = f"autocast to {policy} runs inside a train step of {step}."
        allowed = "The step keeps parameters, and scales the loss, for its own policy only."
        fix = f"Type make_train_step(loss_fn, tx, {str(policy)!r}), and drop autocast."
        warn(message(where, got, allowed, fix))
