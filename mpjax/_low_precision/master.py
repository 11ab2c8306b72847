"""Master weights: the optimizer's state stores more bits of 16-bit parameters than they hold.

An update smaller than half a unit in the last place of a bfloat16 parameter (0.4 % of it) is
lost when it is added to that parameter. Added to a copy with more bits it is not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import to_full
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.keywords import MASTER
from mpjax._low_precision.owner import RoundingOwner, map_narrow, nothing, unless_zero
from mpjax._low_precision.rounding import land, nearest


@exported
class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`: the float32 parameters, and the wrapped state."""

    master_params: PyTree  # f32 where the parameter is f16 or bf16, else nothing
    inner_state: Any

    owns_rounding_as = "with_master_weights"
    runs_inner = True


@exported
class SplitWeightsState(NamedTuple):
    """State of `with_master_weights(tx, bits=24)`: corrections of the parameters, and the rest."""

    corrections: PyTree  # i8, in 1/256 of a unit in the last place; nothing for f32 parameters
    inner_state: Any

    owns_rounding_as = "with_master_weights(bits=24)"
    runs_inner = True


@names_keywords(MASTER)
def with_master_weights(
    inner: optax.GradientTransformation, *, bits: int = 32
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` for float16 or bfloat16 parameters, with their missing bits in its state.

    With 32 bits the state holds float32 copies, as level O2 of Apex: 6 bytes a parameter with the
    parameter itself. With 24 it holds one byte for each, the correction in units of 1/256 of the
    parameter's last place: 3 bytes, and a weight of 16 significant bits from a bfloat16 parameter
    (19 from float16). An update below 2⁻¹⁷ of its weight (2⁻²⁰) is then lost: learning rates of
    1e-5 and more suit weights of ordinary size.

    `inner` sees float32 weights and gradients. The results are float32 updates with which
    `optax.apply_updates(params, updates)` gives the weights, rounded to the parameter's dtype, bit
    for bit.

    Training changes the state's weights, and `params` follow them: to load other parameters, type
    `state.with_params(params)` of a train step's state, or `tx.init(params)` again.

    Put it inside `with_loss_scale`, so that a skipped step leaves everything as it was:
    `with_loss_scale(with_master_weights(optax.adamw(1e-3)), DynamicLossScale())`.

    Args:
      inner: any optax transformation.
      bits: 32 or 24, of the weights that are trained.

    Returns:
      A transformation whose state is a `MasterWeightsState` or a `SplitWeightsState`; extra
      arguments go to `inner`.

    Raises:
      ValueError: `bits` is neither, or `inner` owns the rounding already; in `update`, `params`
        is missing or the state is of another form.

    Warns:
      PolicyWarning: no parameter is float16 or bfloat16: there is nothing to round.

    Dtypes:
      float16 and bfloat16 parameters; others are updated as they are.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.optim.with_master_weights(optax.sgd(1.0))
      >>> params = jnp.bfloat16(1)
      >>> state = tx.init(params)
      >>> for _ in range(4):  # 1 - 1/1024 is 1 in bfloat16
      ...     updates, state = tx.update(jnp.float32(2**-10), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params, state.master_params
      (Array(0.996094, dtype=bfloat16), Array(0.99609375, dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740;
      NVIDIA Apex, `amp`, opt_level O2; FlashOptim, 2026, https://arxiv.org/abs/2602.23349
    """
    if isinstance(bits, bool) or bits not in (24, 32):
        got = f"must be 32 or 24; got {bits!r}."
        fix = "32 keeps a float32 copy of each weight, 24 a one-byte correction of it."
        raise ValueError(message("with_master_weights(bits)", got, fix))
    return (_Copies if bits == 32 else _Corrections)(inner).transformation()


class _Copies(RoundingOwner):
    name = "with_master_weights"
    state_type = MasterWeightsState

    def start(self, params: PyTree) -> PyTree:
        return map_narrow(lambda p: jnp.array(to_full(p)), params, other=nothing)

    def kept(self, params: PyTree, field: PyTree) -> PyTree:
        del params
        return field

    def weight(self, p: Array, kept: Array) -> Array:
        del p
        return kept

    def move(self, p: Array, kept: Array, weight: Array, step: Array) -> tuple[Array, Array]:
        weight = unless_zero(step, kept + step, kept)
        return land(to_full(p), nearest(weight, p.dtype))[0], weight


class _Corrections(RoundingOwner):
    name = "with_master_weights"
    state_type = SplitWeightsState
    never = -128.0  # corrections are cut to 127

    def start(self, params: PyTree) -> PyTree:
        return map_narrow(lambda p: jnp.zeros_like(p, jnp.int8), params, other=nothing)

    def kept(self, params: PyTree, field: PyTree) -> PyTree:
        del params
        return field

    def weight(self, p: Array, kept: Array) -> Array:
        return joined(p, kept)

    def move(self, p: Array, kept: Array, weight: Array, step: Array) -> tuple[Array, Array]:
        weight = weight + step
        update, place = land(to_full(p), nearest(weight, p.dtype))
        return update, unless_zero(step, correction(weight, place, p.dtype), kept)


def joined(p: Array, correction: Array) -> Array:
    """Returns parameters plus their corrections, in float32."""
    full = to_full(p)
    return full + correction.astype(FLOAT32) * _unit(full, p.dtype)


def correction(weight: Array, place: Array, dtype: Any) -> Array:
    """Returns i8[...], the distance of weights from their parameters, the nearest 16-bit values.

    Half a unit in the last place is 128; a tie, the only one that far away, is cut to 127.
    """
    steps = (weight - place) / _unit(place, dtype)
    steps = jax.lax.round(steps, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.clip(steps, -127, 127).astype(jnp.int8)


def _unit(full: Array, dtype: Any) -> Array:
    """Returns 1/256 of the unit in the last place of a dtype's values, a normal power of two."""
    info = jnp.finfo(dtype)
    exponent = jax.lax.bitcast_convert_type(full, jnp.uint32) >> 23 & jnp.uint32(255)
    # Below the dtype's least normal value the unit is that of the least normal one.
    least = max(int(info.minexp) + 127, int(info.nmant) + 9)
    exponent = jnp.maximum(exponent, jnp.uint32(least)) - jnp.uint32(int(info.nmant) + 8)
    return jax.lax.bitcast_convert_type(exponent << 23, FLOAT32)
