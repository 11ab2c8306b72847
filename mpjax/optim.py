"""The optax wrapper: unscales, and skips non-finite steps as if they had never been.

`with_loss_scale` takes part in every step; `current_loss_scale` and `raise_if_diverged` read its
state. A step chooses by `select` and not by `cond`: one fused pass over parameters and moments, and
no host in between.
"""

import inspect
from typing import TYPE_CHECKING, Any

from mpjax._base.errors import needed_by

with needed_by("mpjax.optim"):
    import optax

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mpjax._base.described import described
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.foreign_errors import attributes_of
from mpjax._base.foreign_keywords import WRAPPER
from mpjax._base.gradient_tags import is_gradient
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import (
    agree,
    first_difference,
    is_array,
    is_overwritten,
    leaves_finite,
    map_with_path,
    strong,
    to_full,
)
from mpjax._base.typing import Array, AxisName, PyTree
from mpjax._low_precision.apply import apply_updates, full_params
from mpjax._low_precision.bytes import BytesPerParameter, bytes_per_parameter
from mpjax._low_precision.codes import FirstMoment, SecondMoment
from mpjax._low_precision.kahan import KahanState, with_kahan
from mpjax._low_precision.master import (
    MasterWeightsState,
    SplitWeightsState,
    with_master_weights,
)
from mpjax._low_precision.norms import clip_by_global_norm, global_norm
from mpjax._low_precision.quantized import QuantizedState, with_quantized_state
from mpjax._low_precision.spread import MomentSpread, moment_spread
from mpjax._low_precision.state_dtypes import StateDtypesState, with_state_dtypes
from mpjax._low_precision.stochastic import StochasticRoundingState, with_stochastic_rounding
from mpjax._scaling.applied import applied_by
from mpjax._scaling.given_scale import as_loss_scale
from mpjax._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    unscale_once_read,
)
from mpjax._scaling.optim_state import (
    DYNAMIC_FIELDS,
    LossScaleState,
    current_loss_scale,
    find_states,
    gradient_params,
    unpack,
)
from mpjax._scaling.owned import without_owner
from mpjax._scaling.skip import select_like, update_where
from mpjax._scaling.slips import as_scaled_by
from mpjax._scaling.transformation import check_leaves, check_transformation, is_transformation
from mpjax._training.adopt import adopt_state
from mpjax._training.diverged import raise_if_diverged
from mpjax._training.inputs import refuse_not_finite

__all__ = [
    "with_loss_scale",
    "with_master_weights",
    "with_stochastic_rounding",
    "with_kahan",
    "with_state_dtypes",
    "with_quantized_state",
    "apply_updates",
    "full_params",
    "adopt_state",
    "bytes_per_parameter",
    "moment_spread",
    "global_norm",
    "clip_by_global_norm",
    "current_loss_scale",
    "find_states",
    "raise_if_diverged",
    "BytesPerParameter",
    "FirstMoment",
    "KahanState",
    "LossScaleState",
    "MasterWeightsState",
    "MomentSpread",
    "QuantizedState",
    "SecondMoment",
    "SplitWeightsState",
    "StateDtypesState",
    "StochasticRoundingState",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__, optax)


@names_keywords(WRAPPER)
def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | float | None = None,
    *,
    max_consecutive_skips: int | None = 50,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` for scaled gradients; it skips a step whose gradients hold an inf or NaN.

    `update` takes *scaled* gradients, as `value_and_grad` gives them with the loss scale of
    `current_loss_scale(opt_state)`, divides them by it in float32, and hands them to `inner`.
    Where any is inf or NaN, `inner`'s state stays as it was, bit for bit, and the update is -0.0,
    which leaves every parameter as it is, also one that is -0.0. Then the loss scale is adjusted.
    So it is where `value=`, the loss, is given and is inf or NaN. Gradients that no update depends
    on, of parameters frozen by `optax.set_to_zero`, say, are not judged.

    Clipping goes inside, where gradients are unscaled: `with_loss_scale(optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))`. So does a transformation that
    accumulates or filters (`optax.MultiSteps`): around it, its own arithmetic would make NaN of a
    skipped step. Behind it in a chain weight decay and momentum act on skipped steps too, except in
    `make_train_step`, which takes back all that a skipped step did.

    Args:
      inner: any optax transformation.
      loss_scale: a loss scale, your own class included, which a checkpoint then has to know
        (Flax's msgpack does not); a number for a static one; None for none: then it only skips.
      max_consecutive_skips: at that many skips in a row `diverged` becomes true and stays so,
        for `raise_if_diverged` to find; None for never. Non-finite gradients are never applied,
        whatever the number. A scale of 2²⁴ has been halved to 1 after 24 skips: who has seen 50
        in a row sees no overflow of scaled gradients.
      axis_name: axis, or axes, over which to agree whether to skip. Averaging gradients is the
        caller's business; under plain `jit` with shardings nothing is needed.

    Returns:
      A transformation whose state is a `LossScaleState`. Extra arguments go to `inner`; `grad`
      among them is taken as scaled, `value` and `value_fn` as true.

    Raises:
      TypeError: `inner` is no optax transformation, `loss_scale` no loss scale, or, in `init`, a
        parameter no array.
      ValueError: `max_consecutive_skips` is less than 1; in `init`, a parameter is inf or NaN, or
        `inner` holds a loss scale already; in `update`, the gradients' tree is not
        the parameters', or the state is of another transformation.

    Dtypes:
      `inner` sees float32 gradients (float64 and complex stay); its state keeps, in every step,
      the dtypes with which it was made.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.with_loss_scale(optax.sgd(0.5), mpjax.StaticLossScale(1024))
      >>> params = {"w": jnp.ones(2)}
      >>> updates, state = tx.update({"w": jnp.full(2, 1024.0)}, tx.init(params), params)
      >>> updates, bool(state.grads_finite)
      ({'w': Array([-0.5, -0.5], dtype=float32)}, True)

    References:
      optax, `apply_if_finite`; PyTorch, `GradScaler`
    """
    if is_transformation(loss_scale) and not is_transformation(inner):
        got = f"got {described(inner)} as the optimizer, and an optimizer as the loss scale."
        fix = "Swap them: mpjax.with_loss_scale(tx, loss_scale)."
        raise TypeError(message("with_loss_scale", got, fix))
    check_transformation(inner, "with_loss_scale(inner)")
    _check_skips(max_consecutive_skips)
    start = as_loss_scale(loss_scale, "with_loss_scale(loss_scale)")
    scaled = _LossScaled(inner, start, max_consecutive_skips, axis_name)
    return optax.GradientTransformationExtraArgs(scaled.init, scaled.update)


class _LossScaled:
    """The two functions of `with_loss_scale`, and its arguments."""

    holds_loss_scale = True  # for `is_wrapped`

    def __init__(
        self,
        inner: optax.GradientTransformation,
        loss_scale: LossScale,
        max_consecutive_skips: int | None,
        axis_name: AxisName,
    ) -> None:
        self.inner = optax.with_extra_args_support(inner)
        self._scalar, self._adjustment = _pack(loss_scale)
        self._limit = max_consecutive_skips
        self._axis_name = axis_name

    def init(self, params: PyTree) -> PyTree:
        check_leaves(params, "with_loss_scale.init", "tx.init({})")
        refuse_not_finite(params, "with_loss_scale.init")
        inner_state = self.inner.init(_without_overwritten(params))
        if find_states(inner_state):
            got = "what it wraps holds a loss scale already: gradients would be unscaled twice."
            fix = "Drop one of the two; make_train_step wraps only what is not wrapped."
            raise ValueError(message("with_loss_scale", got, "Allowed: one, around all.", fix))
        return LossScaleState(
            # New arrays each time: a donated state must not take the caller's with it.
            loss_scale=jnp.array(self._scalar),
            adjustment=jax.tree.map(jnp.array, self._adjustment),
            grads_finite=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            diverged=jnp.array(False),
            leaf_finite=jnp.ones((len(jax.tree.leaves(gradient_params(params))),), jnp.bool_),
            inner_state=jax.tree.map(strong, inner_state),
        )

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        return self.update_and_applied(updates, state, params, **extra)[:2]

    def update_and_applied(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree, list[bool]]:
        """Returns updates, the next state, and, by leaf, whether a gradient is applied."""
        _check_update(updates, state, params)
        scale = unpack(state)
        is_dynamic = bool(state.adjustment)
        given = as_scaled_by(scale, updates, is_dynamic=is_dynamic)
        grads = unscale_once_read(scale, _widened(given))
        if "grad" in extra:
            other = extra["grad"]  # line searches are given the gradient once more, scaled too
            is_same = other is updates
            extra["grad"] = grads if is_same else unscale_once_read(scale, _widened(other))
        axes = self._axis_name
        value_finite = agree(leaves_finite(extra.get("value")), axes)
        plain = _without_overwritten(params)  # their "gradient" is their next value
        judged: list[Array] = []

        def judge(applied: list[bool]) -> Array:
            judged.append(agree(leaves_finite(grads, _in_all(grads, applied)), axes))
            return jnp.all(judged[-1]) & jnp.all(value_finite)

        steps, inner_state, finite, applied = update_where(
            judge,
            lambda grads, inner_state: self.inner.update(grads, inner_state, plain, **extra),
            _without_overwritten(grads),
            state.inner_state,
        )
        steps = jax.tree.map(lambda u: _or_nothing(finite, u), steps)
        steps = _with_overwritten(finite, steps, grads, params)
        scalar, adjustment = _fields(_adjusted(scale, finite))
        skips = jnp.where(finite, 0, state.consecutive_skips + 1)
        limit = self._limit
        new = LossScaleState(
            loss_scale=state.loss_scale if scalar is None else jnp.asarray(scalar, FLOAT32),
            adjustment=adjustment,
            grads_finite=finite,
            skipped_steps=state.skipped_steps + (~finite).astype(jnp.int32),
            consecutive_skips=skips,
            diverged=state.diverged if limit is None else state.diverged | (skips >= limit),
            leaf_finite=jnp.where(finite, state.leaf_finite, judged[-1]),
            inner_state=inner_state,
        )
        return steps, new, _in_all(grads, applied)


def update_with(
    tx: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree, list[bool]]:
    """Returns the results of `tx.update`, and, by leaf, whether its gradient is applied.

    Gradients of parameters that the optimizer freezes are not applied. Extra arguments that an
    optimizer does not take are left out: `optax.contrib.sam` has the type of one that takes some.
    """
    scaled = getattr(tx.update, "__self__", None)
    named, more = _keywords(scaled.inner if isinstance(scaled, _LossScaled) else tx)
    extra = {name: value for name, value in extra.items() if more or name in named}
    try:
        if isinstance(scaled, _LossScaled):
            return scaled.update_and_applied(updates, state, params, **extra)
        applied = applied_by(lambda g, s: tx.update(g, s, params, **extra), updates, state)
        return *tx.update(updates, state, params, **extra), applied
    except TypeError as error:
        # By an optimizer in a chain. One that names it takes it: then its own code is at fault.
        others = [name for name in extra if name not in named]
        refused = [name for name in others if f"unexpected keyword argument '{name}'" in str(error)]
        if not refused:
            raise
    fewer = {name: value for name, value in extra.items() if name not in refused}
    return update_with(tx, updates, state, params, fewer)


def _keywords(tx: optax.GradientTransformationExtraArgs) -> tuple[frozenset[str], bool]:
    """Returns the names of the arguments that `tx.update` takes, and whether it takes any other."""
    try:
        parameters = inspect.signature(tx.update).parameters.values()
    except (TypeError, ValueError):  # it is not written in Python
        return frozenset(), True
    kinds = [p.kind for p in parameters]
    return frozenset(p.name for p in parameters), inspect.Parameter.VAR_KEYWORD in kinds


def _in_all(grads: PyTree, applied: list[bool]) -> list[bool]:
    """Returns the flags of all leaves; an overwriting leaf counts as applied."""
    flags = iter(applied)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return [True if is_overwritten(path) else next(flags) for path, _ in leaves]


def _fields(scale: LossScale) -> tuple[Any, Any]:
    """Returns a loss scale as its scalar and its other fields: None and None for a no-op.

    The fields of a user's own class are not known: the object itself stands for them.
    """
    scale = without_owner(scale)
    if isinstance(scale, NoOpLossScale):
        return None, None
    if isinstance(scale, StaticLossScale):
        return scale.loss_scale, {}
    if isinstance(scale, DynamicLossScale):
        return scale.loss_scale, {name: getattr(scale, name) for name in DYNAMIC_FIELDS}
    return scale.loss_scale, scale


def _pack(scale: LossScale) -> tuple[Any, Any]:
    """Returns the initial fields, on the host: a closure must not hold device memory."""
    scalar, adjustment = _fields(scale)
    scalar = np.float32(1) if scalar is None else _on_host(jnp.asarray(scalar, FLOAT32))
    return scalar, jax.tree.map(_on_host, adjustment)


def _adjusted(scale: LossScale, finite: Array) -> LossScale:
    """Returns the next loss scale; raises if a user's own class changes its tree."""
    new = scale.adjust(finite)
    forms = [
        (jax.tree.structure(x), [jnp.result_type(leaf) for leaf in jax.tree.leaves(x)])
        for x in (scale, new)
    ]
    if forms[0] == forms[1]:
        return new
    got = "what it returns differs from the loss scale itself in structure or dtypes."
    fix = "Return an object of the same class, its arrays in the same dtypes."
    raise ValueError(message(f"{type(scale).__name__}.adjust", got, fix))


def _on_host(x: Array) -> Any:
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _widened(grads: PyTree) -> PyTree:
    """Returns 16-bit gradients in float32: `inner` sees one dtype under every loss scale."""
    return map_with_path(lambda _, g: to_full(g) if is_array(g) else g, grads)


def _or_nothing(finite: Array, u: Any) -> Array:
    """Returns `u`, or -0.0, which leaves a parameter as it is: -0.0 + 0.0 would be 0.0."""
    u = jnp.asarray(u)
    nothing = -0.0 if jnp.issubdtype(u.dtype, jnp.inexact) else 0
    return jax.lax.select(finite, u, jnp.full_like(u, nothing))


def _without_overwritten(tree: PyTree) -> PyTree:
    """Returns `tree` with Flax's `_overwrite_with_gradient` leaves masked, as optax masks."""

    def mask(path: Any, x: Any) -> Any:
        return optax.MaskedNode() if is_overwritten(path) else x

    return jax.tree_util.tree_map_with_path(mask, tree)


def _with_overwritten(finite: Array, steps: PyTree, grads: PyTree, params: PyTree | None) -> PyTree:
    """Returns `steps` with the overwritten leaves' next values: new ones, or, skipped, the old."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    if not any(map(is_overwritten, paths)):
        return steps
    if params is None:
        got = "the tree has an '_overwrite_with_gradient' collection, and params is missing."
        fix = "Type tx.update(grads, opt_state, params)."
        raise ValueError(message("with_loss_scale.update", got, fix))

    def fill(path: Any, grad: Any, old: Any, step: Any) -> Any:
        return select_like(finite, grad, old) if is_overwritten(path) else step

    return jax.tree_util.tree_map_with_path(fill, grads, params, steps)


def _check_skips(limit: int | None) -> None:
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1):
        return
    got = f"must be a whole number of at least 1, or None; got {limit!r}."
    raise ValueError(message("with_loss_scale(max_consecutive_skips)", got, "Type, e.g., 50."))


def _check_update(updates: PyTree, state: Any, params: PyTree | None) -> None:
    where = "with_loss_scale.update"
    order = "The gradients come first: tx.update(grads, opt_state, params)."
    if not isinstance(state, LossScaleState):
        got = f"the state is no LossScaleState; got a {type(state).__name__}."
        fix = "Make it with tx.init(params); restore a checkpoint into that, not by itself."
        if isinstance(updates, LossScaleState):
            fix = order
        raise ValueError(message(where, got, fix))
    plain = gradient_params(params)
    if any(map(is_gradient, jax.tree.leaves(plain))):
        raise ValueError(message(where, "got gradients in place of the parameters.", order))
    if params is not None and jax.tree.structure(updates) != jax.tree.structure(plain):
        fix = ("Differentiate with respect to the parameters that you pass to update.",)
        pair = (("the gradients", updates), ("the parameters", plain))
        raise ValueError(first_difference(where, *pair, fix))
    count, flags = len(jax.tree.leaves(updates)), np.shape(state.leaf_finite)
    if flags != (count,):
        got = f"the state was made for {flags} gradients; got {count}."
        fix = "Make a state with tx.init(params) and restore into it what still fits."
        raise ValueError(message(where, got, "A restored state must be of this model.", fix))
