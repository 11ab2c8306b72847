"""Recognises gradients that an optimizer unscaled though they had no scale: updates vanish."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.tree import is_array
from mpjax.numerics._program import LossProgram
from mpjax.numerics._report import Cause, Report, whole


def judged(
    report: Report, program: LossProgram, given: Sequence[Any], grads: Any, where: str
) -> Report:
    """Returns a report that says, of finite gradients, whether they were taken without the scale.

    Args:
      report: of the same run.
      program: it returns true gradients.
      given: its arguments.
      grads: the gradients that the user's step gave its optimizer.
      where: the function that messages speak for.

    Raises:
      ValueError: `grads` are not those of the parameters.
    """
    leaves = [g for g in jax.tree.leaves(grads) if is_array(g)]
    outs = program.outputs(given)[1:]
    shapes = [[jnp.shape(x) for x in tree] for tree in (leaves, outs)]
    if shapes[0] != shapes[1]:
        got = f"got {len(leaves)} gradients of other shapes than the {len(outs)} of the parameters."
        raise ValueError(
            message(f"{where}(grads)", got, "Give what went into tx.update, as it is.")
        )
    largest, wanted = (max((_amax(x) for x in tree), default=0.0) for tree in (leaves, outs))
    known = report.finite and 0 < largest < math.inf and wanted > 0 and report.loss_scale >= 4
    # Within a factor of two: another batch, another rounding, but no other scale.
    if not known or abs(math.log2(largest / wanted)) > 1:
        return report
    scale = report.loss_scale
    text = f"the gradients that were given are not scaled: the largest is {largest:.3g}, under the "
    text += f"loss scale {whole(scale)} it would be {scale * wanted:.3g}. An optimizer in "
    text += f"with_loss_scale divides by {whole(scale)} all the same, and its updates are "
    text += f"{whole(scale)} times too small."
    fix = "Take them by mpjax.value_and_grad(loss_fn, loss_scale=mpjax.current_loss_scale("
    fix += "opt_state)), or let mpjax.make_train_step do it."
    return dataclasses.replace(report, cause=Cause("unscaled", text, fix))


def _amax(x: Any) -> float:
    return float(jnp.max(jnp.abs(jnp.asarray(x)).astype(jnp.float32), initial=0))
