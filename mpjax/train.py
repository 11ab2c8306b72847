"""The whole train step: loss function, optimizer and policy in, one jitted function out."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Never

from mpjax._base.errors import needed_by

with needed_by("mpjax.train"):
    import optax

import jax
import jax.numpy as jnp

from mpjax._base.dtypes import FLOAT32
from mpjax._base.foreign_errors import attributes_of
from mpjax._base.foreign_keywords import STEP
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import AxisName, PolicySpec, PyTree
from mpjax._hardware import check_policy
from mpjax._low_precision.chosen import check_rounding, warn_of_lost_updates, with_rounding
from mpjax._policies.policy import Policy, chosen_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._scaling.chains import skipped_whole
from mpjax._scaling.grad import get_loss_scale, name_of
from mpjax._scaling.loss_scale import LossScale
from mpjax._scaling.skip import select_like
from mpjax._training.adopt import adopted, params_to_adopt
from mpjax._training.checks import (
    check_alike,
    check_arguments,
    check_extra_state,
    check_own,
    check_scale_fits,
    check_start,
    checked_call,
    fields_of,
    one_batch,
)
from mpjax._training.history import (
    has_history,
    history_of,
    next_history,
)
from mpjax._training.optimizers import check_supported, naming_arguments
from mpjax._training.options import StepOptions
from mpjax._training.other_scale import warn_of_other_options
from mpjax._training.placed import on_its_mesh
from mpjax._training.state import Metrics, TrainState, checked_state, copied, copied_in_turn
from mpjax._training.step_loss import StepLoss
from mpjax._training.summary import counted, describe_step, grad_norm
from mpjax._training.under_policy import is_autocast, param_dtypes
from mpjax.numerics import Report, lost_updates
from mpjax.numerics._step import Differentiated, Progress, StepDiagnosis
from mpjax.numerics._watch import Seen, check_watch, watched
from mpjax.optim import apply_updates, current_loss_scale, find_states, update_with, with_loss_scale

__all__ = ["Metrics", "TrainState", "TrainStep", "make_train_step"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__, optax)


class TrainStep:
    """A jitted `(state, batch) → (state, metrics)`; made by `make_train_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        policy: Any,
        options: StepOptions,
    ) -> None:
        self.policy: Policy | PolicyMap = chosen_policy(policy, "make_train_step")
        tx = with_rounding(tx, options.rounding, self.policy, param_dtypes(self.policy))
        self._options = options
        self._loss = StepLoss(loss_fn, self.policy, options)
        self._given_tx = tx
        scale = options.loss_scale
        self._wrapped_tx = with_loss_scale(
            tx,
            get_loss_scale(self.policy) if scale is None else scale,
            max_consecutive_skips=options.max_consecutive_skips,
            axis_name=options.axis_name,
        )
        self._was_called = False
        self._jitted = jax.jit(self._step, donate_argnums=(0,) if options.donate else ())
        self._diagnosis = StepDiagnosis(
            name_of(loss_fn), self.policy, options.axis_name, self._twin
        )

    def __repr__(self) -> str:
        return describe_step(self._loss.fun, self.policy, self._options.chosen)

    def init(
        self, params: PyTree = None, extra_state: PyTree = None, *, batch: PyTree = None
    ) -> TrainState:
        """Returns the state to start from.

        Args:
          params: the parameters; they are copied, so that donating the state leaves yours.
          extra_state: what the model changes besides (BatchNorm statistics, EMA, PRNG keys);
            None for nothing.
          batch: for a `DelayedScaling`, which finds its products in it, and their first scales.
            With `axis_name`, one device's part: gradients of the whole are smaller.

        Dtypes:
          Parameters in the policy's `param_dtype`; `extra_state` as it is.
        """
        check_start(self._loss.fun, params, extra_state, "step.init")
        check_policy(self.policy, where="make_train_step")
        params = copied_in_turn(self._cast_to_param(params))
        extra_state = jax.tree.map(copied, extra_state)
        # Some optimizers start from the parameters themselves, or hold one array twice:
        # a buffer cannot be donated twice.
        opt_state = copied_in_turn(self._tx(params).init(params))
        warn_of_lost_updates(self.policy, params, opt_state, self._options.rounding)
        history = self._history_of(params, opt_state, extra_state, batch)
        state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, extra_state, history)
        return on_its_mesh(state)

    def _history_of(self, params: PyTree, opt_state: PyTree, extra: PyTree, batch: PyTree) -> Any:
        args = (params,) if extra is None else (params, extra)
        scale = current_loss_scale(opt_state)
        return history_of(self.policy, self._loss.fun, args, batch, self._loss.parts, scale)

    def adopt(self, state: Any, extra_state: PyTree = None, *, batch: PyTree = None) -> TrainState:
        """Returns a state that another policy left, or another loss scale, as one of this step.

        Restore a checkpoint into a state of the step that wrote it, then adopt that: a run in
        bfloat16 goes on in float16, or one without loss scaling with it. A dynamic loss scale goes
        on as it was, with its options, as all else does; a static one, or one of another kind, is
        this step's. The state given stays usable.

        Args:
          state: a `TrainState`; or a Flax `TrainState`, or a checkpoint that was restored as bare
            dictionaries, with `params`, `opt_state` and `step`.
          extra_state: a tree in place of the state's own; None for that.
          batch: as in `init`, where the state has no amax histories.

        Raises:
          TypeError: `state` is neither.
          ValueError: the optimizers differ in more than loss scale and dtypes.

        Dtypes:
          Parameters in this policy's `param_dtype`, moments as its optimizer keeps them.
        """
        old = fields_of(state)
        extra_state = old.get("extra_state") if extra_state is None else extra_state
        kept = old["params"], old["opt_state"]
        params, full = params_to_adopt(self._cast_to_param, *kept)
        params = jax.tree.map(copied, params)
        check_start(self._loss.fun, params, extra_state, "step.adopt")
        fresh = self._tx(params).init(params)
        warn_of_lost_updates(self.policy, params, fresh, self._options.rounding)
        opt_state = adopted(fresh, old["opt_state"], "train step.adopt", params, full)
        history = old.get("amax_history")
        if history is None or not has_history(self.policy):
            history = self._history_of(params, opt_state, extra_state, batch)
        rest = (jax.tree.map(copied, x) for x in (opt_state, extra_state, history))
        step = jnp.array(old["step"], jnp.int32, copy=True)
        return on_its_mesh(TrainState(step, params, *rest))

    def __call__(
        self, state: TrainState, *batch: PyTree, **named: Never
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics of this step, of a batch; `state` is donated."""
        result = checked_call(self._jitted, checked_state(state), one_batch(batch, named))
        if not self._was_called:
            self._was_called = True
            warn_of_other_options(self._options.loss_scale, result[0].opt_state)
        return result

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Returns the step lowered for these arguments (or specs of them), ahead of time."""
        return checked_call(self._jitted.lower, checked_state(state), batch)

    def diagnose(
        self,
        state: TrainState,
        batch: PyTree,
        metrics: Mapping[str, Any] | None = None,
        *,
        progress: Progress = None,
    ) -> Report:
        """Reports the operation that made the loss or a gradient not finite: `print` the result.

        A skipped step left everything as it was, so that it can be run once more, with a count on
        each operation. A step that is not diagnosed pays nothing for it.

        Args:
          state: the state that the skipped step returned.
          batch: the batch that it was given.
          metrics: its metrics; they hold the loss scale that it used. None for the loss scale
            of the state, which a skip has lowered.
          progress: as in `mpjax.numerics.diagnose`.

        Returns:
          A `mpjax.numerics.Report`.

        Raises:
          ValueError: an argument was donated, the metrics are of another step, or the step runs
            inside a `shard_map` (`axis_name=`).
          TypeError: `state` is no `TrainState`, or `metrics` are none.
        """
        return self._diagnosis.run(checked_state(state), batch, metrics, progress)

    def _twin(self, policy: Any) -> Differentiated:
        """Returns the function that this step differentiates, under its policy or another one."""
        same = policy == self.policy
        return (self._loss if same else StepLoss(self._loss.fun, policy, self._options)).of_arrays

    def _cast_to_param(self, params: PyTree) -> PyTree:
        if isinstance(self.policy, PolicyMap) and is_autocast(self.policy):
            # A rule may name the module of an operation, 'Net/head', which is no path of a
            # parameter: autocast warns of those that match nothing when it traces the loss.
            return self.policy.cast_to_param(params, warn=False)
        return self.policy.cast_to_param(params)

    def _tx(self, params: PyTree) -> optax.GradientTransformation:
        """Returns the optimizer, wrapped unless its user has wrapped it."""
        scale_paths: list[Any] = []

        def look(params: PyTree) -> None:
            opt_state = self._given_tx.init(params)
            check_supported(opt_state)
            scale_paths.extend(path for path, _ in find_states(opt_state))
            if scale_paths:
                check_scale_fits(opt_state, params, self._options.loss_scale, self.policy)

        jax.eval_shape(look, params)
        return skipped_whole(self._given_tx) if scale_paths else self._wrapped_tx

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        tx = optax.with_extra_args_support(self._tx(state.params))
        wanted = jax.eval_shape(self._cast_to_param, state.params)
        fresh = jax.eval_shape(tx.init, state.params)
        check_own(self.policy, state.params, wanted, state.opt_state, fresh)
        loss_scale = current_loss_scale(state.opt_state)
        loss, weight, extra_state, aux, grads, seen = self._loss.differentiate(
            loss_scale, state, batch
        )
        check_extra_state(extra_state, state.extra_state)
        arguments = (loss_scale, state.params, state.extra_state, batch, state.amax_history)
        look = Seen(state, loss_scale, self._twin(self.policy), arguments)
        state, watching = watched(self._options.watch, look, self.policy, self._options.axis_name)
        # For line searches and the like; `update_with` leaves out those that `tx` does not take.
        value_fn = self._loss.of_params(loss_scale, state, batch)
        extra = {"value": loss, "grad": grads, "value_fn": value_fn}
        with naming_arguments():
            updates, opt_state, applied = update_with(
                tx, grads, state.opt_state, state.params, extra
            )
        finite = find_states(opt_state)[0][1].grads_finite
        check_alike(finite, loss, state.params, self._options.axis_name)
        if weight is not None:  # a mean of nothing is NaN: no overflow, that would lower the scale
            opt_state = select_like(weight != 0, opt_state, state.opt_state)
        new_state = TrainState(
            step=state.step + finite.astype(jnp.int32),
            params=apply_updates(state.params, updates, opt_state),
            opt_state=opt_state,
            extra_state=select_like(finite, extra_state, state.extra_state),
            amax_history=next_history(self.policy, state.amax_history, seen, loss_scale, finite),
        )
        metrics = {
            "loss": loss.astype(FLOAT32),
            "grad_norm": grad_norm(loss_scale, grads, applied),
            "loss_scale": jnp.asarray(loss_scale.loss_scale, FLOAT32),
            **counted(find_states(opt_state)[0][1]),
            "grads_finite": finite,
        }
        if self._options.lost_updates:
            metrics["lost_updates"] = lost_updates(state.params, updates)
        return new_state, metrics | watching | ({"aux": aux} if self._options.has_aux else {})


@names_keywords(STEP)
def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    policy: PolicySpec = None,
    *,
    loss_scale: LossScale | float | None = None,
    has_aux: bool = False,
    accumulate: int = 1,
    accumulate_axes: Any = 0,
    weighted: bool = False,
    max_consecutive_skips: int | None = 50,
    axis_name: AxisName = None,
    donate: bool = True,
    rounding: str | None = None,
    watch: int | None = None,
    lost_updates: bool = False,
) -> TrainStep:
    """Returns a jitted train step for any precision: `state, metrics = step(state, batch)`.

    The step computes the loss under `policy`, differentiates it scaled, and updates the parameters
    unless the loss or a gradient is inf or NaN: then the whole state stays as it was, bit for bit,
    except for the loss scale and its counters. Gradients of parameters that `tx` freezes
    (`optax.set_to_zero`) do not count.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`; with extra state given to `init`,
        `loss_fn(params, extra_state, batch) -> (loss, new_extra_state)`. With `has_aux` the
        last of what it returns becomes a pair with aux: `(loss, aux)`, or
        `(loss, (new_extra_state, aux))`. PRNG keys go into the batch, or into the extra state.
      tx: any optax transformation. What clips is part of it, and sees true gradients. One that
        you wrapped in `with_loss_scale` yourself keeps that loss scale, and is not wrapped again;
        what a chain has behind it is skipped with it. It is given optax's `value` (the unscaled
        loss), `grad` and `value_fn`, so that `optax.lbfgs` and the like work; a line search sees
        the whole batch at once, without `accumulate` and `axis_name`. Not `optax.lookahead`, which
        has parameters in pairs, and not `optax.contrib.sam(opaque_mode=True)`.
      policy: whatever `get_policy` takes; None for the scoped default, or float32 without one.
      loss_scale: None for what the policy needs (dynamic for float16 compute); else as in
        `with_loss_scale`.
      has_aux: whether `loss_fn` returns something to report besides.
      accumulate: micro-batches in a step. Batch leaves are split along their first axis, whose
        size they share; scalars are repeated and a scalar PRNG key is folded with the
        micro-batch's index. `aux` comes back stacked. A non-finite micro-batch skips the whole
        step. The loss is the mean of the micro-batches' losses: where each of those is a mean over
        as many as its mask leaves, that is another loss than the whole batch's, unless `weighted`.
      accumulate_axes: along which axis each leaf is split: an axis, None for what every
        micro-batch gets whole, or a tree of them that is a prefix of the batch's, as `in_axes` of
        `jax.vmap`: `{"x": 0, "class_weights": None}`.
      weighted: whether the loss stands with its weight, `(loss, weight)` in its place: how many
        (tokens, rows) it is a mean over, as it counts in the mean over micro-batches and over
        `axis_name`. A micro-batch of weight 0 is ignored, even if its loss is NaN; a step without
        any weight is skipped, and neither the loss scale nor its counters change.
      max_consecutive_skips: as in `with_loss_scale`; see `raise_if_diverged`.
      axis_name: axis, or axes, of `shard_map` or `pmap` around the step, over which the loss
        and the gradients are averaged, and nothing else: average statistics in `loss_fn`, by
        `jax.lax.pmean(stats, "data")`. With plain shardings nothing is needed.
      donate: whether the step may reuse the memory of the state that it is given.
      rounding: of updates to 16-bit parameters ("bf16-true", "16-true"): "stochastic" or "kahan",
        as `mpjax.optim.with_stochastic_rounding` and `with_kahan` around `tx`; "nearest", which
        loses every update below half a unit in a parameter's last place. None means "nearest" with
        a warning, or the rounding that `tx` does itself.
      watch: every how many steps `metrics["watched"]` holds statistics of weights, activations and
        their gradients by module; NaN in the others. `mpjax.numerics.to_scalars` flattens them.
      lost_updates: whether `metrics["lost_updates"]` holds, by leaf, the share of updates that
        rounding loses; see `mpjax.numerics.lost_updates`.

    Returns:
      A `TrainStep`: `step.init(params)` or `step.init(params, extra_state)` gives the state
      (`.step .params .opt_state .extra_state`), `step(state, batch)` the next one and metrics:
      `loss` (f32, unscaled), `grad_norm` (f32, of the true gradients, before clipping; inf above
      1e19 and 0 below 1e-19, where `mpjax.optim.global_norm` is right), `loss_scale` (the one
      used), `grads_finite`, `skipped_steps`, `consecutive_skips`, `diverged`, and `aux` with
      `has_aux`. A plain dict, of the same names under every loss scale and without one (then
      `loss_scale` is 1): `grads_finite` is false where a step was skipped.
      `step.lower` is for ahead of time compilation. No host sync.

    Raises:
      ValueError: `accumulate` is less than 1 or does not divide the batch, or leaves of the batch
        differ in the size of the axis that is split; `rounding` is no name
        of one, or `tx` owns the rounding already; `watch` is less than 1; `weighted`, and the loss
        and its weight are returned in the other order; in a `shard_map` that splits the batch,
        `axis_name` is missing (types tell it, with `check_vma`); `tx` asks for an argument of its
        own.
      TypeError: the loss is no floating scalar, or `loss_fn` does not return what it should.

    Warns:
      PolicyWarning: in `init`, updates will be lost to rounding; `rounding` of float32 parameters;
        in the first step, the loss does not depend on the parameters.

    Dtypes:
      Parameters in `param_dtype`, computation in `compute_dtype`, gradients float32. Complex
      parameters stay complex; `tx` sees their gradients conjugated, as optax takes them.

    Transforms:
      jit (it is), scan, vmap, shard_map, pmap.

    Example:
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16-mixed")
      >>> state = step.init({"w": jnp.zeros(2)})
      >>> state, metrics = step(state, {"x": jnp.ones((4, 2)), "y": jnp.ones(4)})
      >>> float(metrics["loss"]), state.params["w"].dtype
      (1.0, dtype('float32'))

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """
    options = StepOptions(
        loss_scale=loss_scale,
        has_aux=has_aux,
        accumulate=accumulate,
        accumulate_axes=accumulate_axes,
        weighted=weighted,
        max_consecutive_skips=max_consecutive_skips,
        axis_name=axis_name,
        donate=donate,
        rounding=rounding,
        watch=watch,
        lost_updates=lost_updates,
    )
    check_arguments(loss_fn, tx, policy, options)
    check_rounding(rounding, "make_train_step(rounding)")
    check_watch(watch, "make_train_step(watch)")
    return TrainStep(loss_fn, tx, policy, options)
