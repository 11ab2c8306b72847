"""Master weights: float32 copies of half-precision parameters, kept by the optimizer.

An update smaller than half a unit in the last place of a bfloat16 parameter (0.4 % of it) is
lost when it is added to that parameter. Added to a float32 copy it is not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._dtypes import FLOAT32
from mpjax._errors import message
from mpjax._tree import is_array, is_castable, to_full
from mpjax._typing import PyTree


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`: the float32 parameters, and the state of what it wraps."""

    master_params: PyTree  # f32 where the parameter is f16 or bf16, else as the parameter
    inner_state: Any


def with_master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` for float16 or bfloat16 parameters, of which it keeps float32 copies.

    `inner` sees the copies and float32 gradients. What comes back are float32 updates with which
    `optax.apply_updates(params, updates)` gives the new copy, rounded to the parameter's dtype:
    exactly, unless a parameter shrinks to less than 1/8192 of itself in one step; then it is
    within 2⁻²⁴ of its former size, and exact again after the next step. This is level O2 of Apex.

    The copies are what is trained: after loading other parameters, make a new state.

    With loss scaling it goes inside, so that a skipped step leaves the copies alone:
    `with_loss_scale(with_master_weights(optax.adamw(1e-3)), DynamicLossScale())`.

    Args:
      inner: any optax transformation.

    Returns:
      A transformation whose state is a `MasterWeightsState`; extra arguments go to `inner`.

    Raises:
      ValueError: in `update`, `params` is missing.

    Dtypes:
      float16 and bfloat16 parameters get a float32 copy; others are updated as they are.

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
      NVIDIA Apex, `amp`, opt_level O2
    """
    wrapped = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        # Copies also of float32 leaves: both trees may be donated.
        masters = jax.tree.map(lambda p: jnp.array(to_full(p)) if is_array(p) else p, params)
        return MasterWeightsState(masters, wrapped.init(masters))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            fix = "Type tx.update(grads, opt_state, params)."
            raise ValueError(message("with_master_weights.update", "params is missing.", fix))
        grads = jax.tree.map(lambda g: to_full(g) if is_array(g) else g, updates)
        steps, inner_state = wrapped.update(grads, state.inner_state, state.master_params, **extra)
        masters = optax.apply_updates(state.master_params, steps)
        updates = jax.tree.map(_difference, params, masters, steps)
        return updates, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _difference(p: Any, master: Any, step: Any) -> Any:
    """Returns what leads from a parameter to its rounded copy."""
    if not is_castable(p) or p.dtype.itemsize >= 4:
        return step
    target = master.astype(p.dtype).astype(FLOAT32)
    # Adding -0.0 leaves a parameter as it is, also one that is -0.0.
    return jnp.where(target == p.astype(FLOAT32), jnp.float32(-0.0), target - p.astype(FLOAT32))
