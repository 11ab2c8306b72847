"""Transformations of optax around `with_loss_scale`: those that may be, and the rest's refusal."""

from __future__ import annotations

from typing import Any

import optax
import optax.contrib

from mpjax._base.errors import message

RUN_INNER = (
    optax.MaskedState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)
"""States of what runs the transformation inside in every step."""
BREAKING = (
    optax.MultiStepsState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
    optax.contrib.SAMState,
)
"""States of what hands on scaled gradients, or does not forget one that is inf.

`optax.lookahead` and `schedule_free` around a loss scale are right, but for the bits of a skipped
step.
"""


def refusal(around: Any, where: str) -> str:
    """Returns the error text for a state of what wraps a loss scale in another way than a chain."""
    if isinstance(around, optax.MultiStepsState):
        got = "optax.MultiSteps is around with_loss_scale: one batch that is not finite would stay "
        got += "in its mean, and no step be taken again."
        fix = "Type with_loss_scale(optax.MultiSteps(tx, 4).gradient_transformation(), loss_scale),"
        fix += " or make_train_step(loss_fn, tx, policy, accumulate=4)."
        return message(where, got, "Allowed: with_loss_scale around it.", fix)
    got = f"a transformation with the state {type(around).__name__} is around with_loss_scale: it "
    got += "may read gradients that are still scaled, or act on a batch that is skipped."
    fix = "Put with_loss_scale around it, as in "
    fix += "mpjax.with_loss_scale(optax.contrib.schedule_free(tx))."
    return message(where, got, "Allowed around it: optax.chain.", fix)
