"""Stochastic rounding: a parameter is rounded up or down by chance, so that the mean is exact."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import is_array, leaf_paths, to_full
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.keywords import ROUNDED
from mpjax._low_precision.owner import RoundingOwner, map_narrow, nothing
from mpjax._low_precision.rounding import land, stochastic
from mpjax._low_precision.skipped import was_taken


@exported
class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`: the source of the chances, and the wrapped state."""

    steps: Array  # i32[], the steps that were taken
    inner_state: Any

    owns_rounding_as = "with_stochastic_rounding"
    runs_inner = True


@names_keywords(ROUNDED)
def with_stochastic_rounding(
    inner: optax.GradientTransformation, seed: int | Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` for float16 or bfloat16 parameters, rounded up or down by chance.

    The mean is exact: an update of a hundredth of the unit in the last place moves the parameter by
    a whole unit in one step of a hundred. It stores nothing extra, so a parameter takes 2 bytes. It
    adds noise of half a unit in the last place (0.2 % of a bfloat16 weight) in each step.

    The chances come from `seed`, the number of steps taken and the parameter's path: a run that
    was restored goes on as if it had not stopped, a skipped step draws nothing, and replicas agree.
    Inside `shard_map` the shards of one parameter draw the same.

    Updates land on the rounded values as in `with_master_weights`, and it goes inside
    `with_loss_scale` as that does.

    Args:
      inner: any optax transformation.
      seed: an integer or a PRNG key; `jax.random.key(0, impl="rbg")` is cheaper on TPUs.

    Returns:
      A transformation whose state is a `StochasticRoundingState`; extra arguments go to `inner`.

    Raises:
      TypeError: `seed` is neither an integer nor a key.
      ValueError: `inner` owns the rounding already; in `update`, `params` is missing or the state
        is of another form.

    Warns:
      PolicyWarning: no parameter is float16 or bfloat16: there is nothing to round.

    Dtypes:
      float16 and bfloat16 parameters; others are updated as they are.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.optim.with_stochastic_rounding(optax.sgd(1.0), seed=0)
      >>> params = jnp.ones(4096, jnp.bfloat16)
      >>> updates, state = tx.update(jnp.full(4096, -(2**-9)), tx.init(params), params)
      >>> moved = optax.apply_updates(params, updates)  # to 1 or 1.0078125, a quarter of them
      >>> bool(abs(moved.astype(jnp.float32).mean() - (1 + 2**-9)) < 2**-12)
      True

    References:
      Ozkara et al., Stochastic Rounding for LLM Training, 2025,
      https://proceedings.mlr.press/v258/ozkara25b.html
    """
    return _Stochastic(inner, _as_key(seed)).transformation()


class _Stochastic(RoundingOwner):
    name = "with_stochastic_rounding"
    state_type = StochasticRoundingState
    by_chance = True

    def __init__(self, inner: optax.GradientTransformation, seed: int | Array) -> None:
        super().__init__(inner)
        self._seed = seed

    def start(self, params: PyTree) -> Array:
        del params
        return jnp.zeros((), jnp.int32)

    def kept(self, params: PyTree, field: Array) -> PyTree:
        """Returns the chances of this step."""
        key = jax.random.key(self._seed) if isinstance(self._seed, int) else self._seed
        key = jax.random.fold_in(key, field)
        paths = iter(leaf_paths(params))
        places = jax.tree.map(lambda _: np.uint32(zlib.crc32(next(paths).encode())), params)

        def draw(p: Array, place: np.uint32) -> Array:
            return _chances(key, place, p.shape)

        return map_narrow(draw, params, places, other=nothing)

    def weight(self, p: Array, kept: Array) -> Array:
        del kept
        return to_full(p)

    def move(self, p: Array, kept: Array, weight: Array, step: Array) -> tuple[Array, Array]:
        return land(weight, stochastic(weight + step, p.dtype, kept))[0], kept

    def after(self, field: Array, kept: PyTree, inner_state: PyTree) -> Array:
        del kept
        return jnp.where(was_taken(inner_state), field + 1, field)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _chances(key: Array, place: Array | np.uint32, shape: tuple[int, ...]) -> Array:
    """Returns u32[shape]; the upper 16 bits of each are random."""
    bits = jax.random.bits(jax.random.fold_in(key, place), shape, jnp.uint16)
    return bits.astype(jnp.uint32) << 16


def _as_key(seed: Any) -> Any:
    is_integer = isinstance(seed, int) and not isinstance(seed, bool)
    if is_integer:
        return seed
    is_key = is_array(seed) and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key)
    if is_key and np.shape(seed) == ():
        return seed
    got = f"must be an integer or one PRNG key; got {describe(seed)}."
    fix = "Type an integer, or jax.random.key(0)."
    raise TypeError(message("with_stochastic_rounding(seed)", got, fix))
