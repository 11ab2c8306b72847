"""`with_state_dtypes`: the moments of any optimizer in the dtypes that are asked for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._base.dtypes import FLOAT32, POLICY_DTYPES, DType, canonical_dtype
from mpjax._base.errors import message
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import Array, DTypeSpec, PyTree
from mpjax._low_precision.codes import is_coded
from mpjax._low_precision.keywords import STATE_DTYPES
from mpjax._low_precision.moments import Moment
from mpjax._low_precision.rounding import is_narrow, stochastic
from mpjax._low_precision.stored import StoredMoments


@exported
class StateDtypesState(NamedTuple):
    """State of `with_state_dtypes`: how many steps were rounded, and the state inside."""

    steps: Array  # i32[], the steps that were taken
    inner_state: Any

    runs_inner = True


@names_keywords(STATE_DTYPES)
def with_state_dtypes(
    inner: optax.GradientTransformation,
    *,
    mu_dtype: DTypeSpec = "float32",
    nu_dtype: DTypeSpec = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with its moments stored in the dtypes given, and computed in float32.

    optax's `mu_dtype` covers first moments of some optimizers. Here first moments are optax's `mu`,
    `trace`, `ema` and so on, and second moments are `nu`, `v`, `sum_of_squares`. Other state
    (counts, step sizes, distances) stays as it is.

    Moments are rounded up or down by chance, so their means are exact. An average with a decay of
    0.999 moves by less in one step than two bfloat16 numbers are apart; rounded to the nearest, it
    would stand still.

    Args:
      inner: any optax transformation.
      mu_dtype: of first moments: bfloat16, float32, or float16, in which one beyond 65504 is
        stored as 65504, and one below 6e-8 as 0 or 6e-8: steps are up to 14 times Adam's where
        gradients are 1e-8.
      nu_dtype: of second moments: bfloat16 or float32; squares of gradients below 2e-4 are 0 in
        float16.

    Returns:
      A transformation whose state is a `StateDtypesState`; extra arguments go to `inner`.

    Raises:
      TypeError, ValueError: a dtype is none that a moment can have.
      ValueError: in `init`, `inner` has no moment; in `update`, the state is of another form.

    Dtypes:
      The given dtypes; other moments are float32, also those of a bfloat16 parameter.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.optim.with_state_dtypes(optax.adam(1e-3), mu_dtype="bf16", nu_dtype="bf16")
      >>> state = tx.init({"w": jnp.ones(3)})
      >>> state.inner_state[0].mu["w"].dtype, state.inner_state[0].nu["w"].dtype
      (dtype(bfloat16), dtype(bfloat16))

    References:
      DeepSeek-V3 Technical Report, 2024, https://arxiv.org/abs/2412.19437
    """
    dtypes = (_moment_dtype(mu_dtype, "mu_dtype"), _moment_dtype(nu_dtype, "nu_dtype"))
    if dtypes[1] == POLICY_DTYPES["f16"]:
        got = "float16 makes 0 of the square of any gradient below 2e-4: the steps would explode."
        fix = "Type 'bfloat16', or use with_quantized_state, which scales blocks."
        raise ValueError(message("with_state_dtypes(nu_dtype)", got, fix))
    return _Narrowed(inner, dtypes).transformation()


class _Narrowed(StoredMoments):
    name = "with_state_dtypes"
    state_type = StateDtypesState

    def __init__(self, inner: optax.GradientTransformation, dtypes: tuple[DType, DType]) -> None:
        super().__init__(inner)
        self._dtypes = dtypes

    def encode(self, moment: Moment, x: Array, random: Array, before: Any) -> Array:
        del before
        dtype = self._dtypes[moment.is_second]
        return narrowed(x, dtype, random, is_second=moment.is_second)

    def is_own(self, moment: Moment, x: Any, shape: tuple[int, ...]) -> bool:
        del shape
        return not is_coded(x) and x.dtype in (self._dtypes[moment.is_second], jnp.float64)

    def check_params(self, params: PyTree, moments: list[Moment]) -> None:
        require_moments(self.name, params, moments)


def narrowed(x: Array, dtype: DType, random: Array, *, is_second: bool) -> Array:
    """Returns a moment rounded by chance to one of the 16-bit dtypes; else as it is."""
    if not is_narrow(dtype):
        return x
    x, largest = x.astype(FLOAT32), float(jnp.finfo(dtype).max)
    rounded = stochastic(x, dtype, random)
    # A moment beyond the range is cut off: inf would stay in it, and be in every later step.
    rounded = jnp.where(jnp.isfinite(x), jnp.clip(rounded, -largest, largest), rounded)
    if is_second:  # one that is not 0 must not become 0: a step would be 1/eps
        rounded = jnp.where((rounded == 0) & (x > 0), x, rounded)
    return rounded.astype(dtype)


def require_moments(name: str, params: PyTree, moments: list[Moment]) -> None:
    """Raises ValueError where an optimizer of some parameters has nothing to store."""
    if moments or not jax.tree.leaves(params):
        return
    got = "the optimizer has no moments that can be stored in fewer bits."
    allowed = "Allowed: mu, nu, trace, ema and the like, by these names; not the mu and nu of a "
    allowed += "centred RMSProp, of which nu - mu² must stay positive."
    fix = "Wrap an optimizer that has some (optax.adamw, optax.sgd with momentum), or drop it."
    raise ValueError(message(name, got, allowed, fix))


def _moment_dtype(spec: DTypeSpec, argument: str) -> DType:
    where = f"with_state_dtypes({argument})"
    try:
        dtype = canonical_dtype(spec, where)
    except TypeError:
        got = f"{jnp.dtype(spec).name} is no dtype of a moment."
        allowed = "Allowed: bfloat16, float32, and float16 for mu_dtype."
        fix = "For 8 bits use with_quantized_state(tx, 'int8'), which scales blocks."
        raise TypeError(message(where, got, allowed, fix)) from None
    if dtype.itemsize <= FLOAT32.itemsize:
        return dtype
    got = "float64 is no dtype to store a moment in that is computed in float32."
    raise ValueError(message(where, got, "Allowed: bfloat16, float32, and float16 for mu_dtype."))
