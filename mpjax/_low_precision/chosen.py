"""The rounding of a train step's parameters, by name; a warning if none was chosen."""

from collections.abc import Iterable
from typing import Any

import jax
import optax

from mpjax._base.dtypes import FLOAT16, DType
from mpjax._base.errors import message, nearest, warn
from mpjax._base.typing import PyTree
from mpjax._low_precision.kahan import with_kahan
from mpjax._low_precision.moments import Moment, map_moments
from mpjax._low_precision.owner import is_narrow_leaf, owners
from mpjax._low_precision.rounding import is_narrow
from mpjax._low_precision.stochastic import with_stochastic_rounding

ROUNDINGS = ("nearest", "stochastic", "kahan")
_WRAPPERS = {"stochastic": with_stochastic_rounding, "kahan": with_kahan}


def check_rounding(rounding: Any, where: str) -> None:
    """Raises ValueError for anything but one of the names, or None."""
    if rounding is None or (isinstance(rounding, str) and rounding in ROUNDINGS):
        return
    got = f"unknown rounding {rounding!r}."
    accepted = f"Accepted: {', '.join(map(repr, ROUNDINGS))}, or None."
    close = nearest(rounding, ROUNDINGS, 1) if isinstance(rounding, str) else []
    raise ValueError(message(where, got, accepted, *(f"Did you mean {x!r}?" for x in close)))


def with_rounding(
    tx: optax.GradientTransformation, rounding: str | None, policy: Any, dtypes: Iterable[DType]
) -> optax.GradientTransformation:
    """Returns an optimizer that rounds as a name says.

    Args:
      tx: any optax transformation.
      rounding: one of `ROUNDINGS`, or None.
      policy: of the train step, for the message.
      dtypes: in which it keeps parameters.

    Warns:
      PolicyWarning: none of them has 16 bits: there is nothing to round.
    """
    if rounding not in _WRAPPERS:
        return tx
    kept = sorted({dtype.name for dtype in dtypes if not is_narrow(dtype)})
    if any(map(is_narrow, dtypes)):
        return _WRAPPERS[rounding](tx)
    got = f"{policy} keeps parameters in {' and '.join(kept)}, where {rounding!r} does nothing."
    fix = "Leave it out, or train under 'bf16-true' or '16-true'."
    text = message("make_train_step(rounding)", got, fix)
    warn(text)
    return tx


def warn_of_lost_updates(
    policy: Any, params: PyTree, opt_state: PyTree, rounding: str | None
) -> None:
    """Warns of 16-bit parameters whose updates are rounded to the nearest unasked.

    Args:
      policy: of the train step, for the message.
      params: the parameters, in the dtypes of training.
      opt_state: the optimizer's state, or specs of it.
      rounding: as it was given.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    narrow = [p.dtype for path, p in leaves if is_narrow_leaf(path, p)]
    if rounding is not None or not narrow or owners(opt_state):
        return
    least = {"bfloat16": "2⁻⁹", "float16": "2⁻¹²"}[narrow[0].name]
    text = f"make_train_step: {policy} keeps weights in {narrow[0].name}, and loses an update "
    text += f"below {least} of its weight: type rounding='stochastic' or 'kahan', or wrap tx in "
    text += "mpjax.optim.with_master_weights; rounding='nearest' if this is meant."
    warn(text + _lost_squares(params, opt_state))


def _lost_squares(params: PyTree, opt_state: PyTree) -> str:
    """Returns a sentence about second moments in float16, as Adam's, or nothing."""
    found: list[str] = []

    def look(moment: Moment, leaf: Any) -> None:
        if moment.is_second and getattr(leaf, "dtype", None) == FLOAT16:
            found.append(moment.field)

    map_moments(look, opt_state, params)
    if not found:
        return ""
    text = f" Second moments ({found[0]}) are float16, too: squares of gradients below 2e-4 are 0, "
    text += "and steps up to 30 times too long; mpjax.optim.with_state_dtypes(tx) keeps them right."
    return text
