"""Kahan summation: the rounding error of a parameter is kept in 16 bits, and added to a step."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from mpjax._base.dtypes import FLOAT32, POLICY_DTYPES
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import to_full
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.keywords import ROUNDED
from mpjax._low_precision.owner import RoundingOwner, map_narrow, nothing, unless_zero
from mpjax._low_precision.rounding import land, nearest

BFLOAT16 = POLICY_DTYPES["bf16"]


@exported
class KahanState(NamedTuple):
    """State of `with_kahan`: the parameters' rounding errors, and the wrapped state."""

    compensations: PyTree  # bf16, also for f16 parameters; nothing for f32 ones
    inner_state: Any

    owns_rounding_as = "with_kahan"
    runs_inner = True


@names_keywords(ROUNDED)
def with_kahan(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` for float16 or bfloat16 parameters, whose rounding errors it adds back.

    The state stores the rounding error of each parameter's last step in bfloat16, and the next step
    adds it back. A parameter takes 4 bytes with its error. An update is lost only if it is below
    2⁻⁹ of the stored error, which is at most half a unit in the parameter's last place.

    A textbook's compensated sum does not work on GPUs: XLA deletes the rounding that it measures.
    This one works there (`reduce_precision`), and on TPUs.

    Updates land on the rounded values as in `with_master_weights`, and it goes inside
    `with_loss_scale` as that does.

    Args:
      inner: any optax transformation.

    Returns:
      A transformation whose state is a `KahanState`; extra arguments go to `inner`.

    Raises:
      ValueError: `inner` owns the rounding already; in `update`, `params` is missing or the state
        is of another form.

    Warns:
      PolicyWarning: no parameter is float16 or bfloat16: there is nothing to round.

    Dtypes:
      float16 and bfloat16 parameters; others are updated as they are.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.optim.with_kahan(optax.sgd(1.0))
      >>> params = jnp.bfloat16(1)
      >>> state = tx.init(params)
      >>> for _ in range(1000):
      ...     updates, state = tx.update(jnp.float32(-1e-3), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params
      Array(2, dtype=bfloat16)

    References:
      Zamirai et al., Revisiting BFloat16 Training, 2020, https://arxiv.org/abs/2010.06192
    """
    return _Kahan(inner).transformation()


class _Kahan(RoundingOwner):
    name = "with_kahan"
    state_type = KahanState
    never = float(jnp.finfo(BFLOAT16).max)  # of a finite parameter half a unit is kept at most

    def start(self, params: PyTree) -> PyTree:
        return map_narrow(lambda p: jnp.zeros_like(p, BFLOAT16), params, other=nothing)

    def kept(self, params: PyTree, field: PyTree) -> PyTree:
        del params
        return field

    def weight(self, p: Array, kept: Array) -> Array:
        return to_full(p) + kept.astype(FLOAT32)

    def move(self, p: Array, kept: Array, weight: Array, step: Array) -> tuple[Array, Array]:
        del weight
        full, way = to_full(p), kept.astype(FLOAT32) + step
        # `way` is the step with the last error; `way - update` is the part that rounding lost.
        update, _ = land(full, nearest(full + way, p.dtype))
        return update, unless_zero(step, (way - update).astype(BFLOAT16), kept)
