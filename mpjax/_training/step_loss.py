"""The loss of a train step: run under its policy, and differentiated over its micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.averaged import averaged_over
from mpjax._base.tree import is_array, map_with_path
from mpjax._base.typing import Array, PyTree
from mpjax._policies.of_step import in_step
from mpjax._scaling.grad import localised, mean, of_shard
from mpjax._scaling.loss_scale import LossScale
from mpjax._training import kept_weights
from mpjax._training.checks import check_whole, split_outputs
from mpjax._training.dependence import check_trains
from mpjax._training.gradients import value_and_grad
from mpjax._training.history import of_policy, tracked, untracked
from mpjax._training.line_search import with_scaled_cotangents
from mpjax._training.microbatches import MicroBatches, divided, gradients, wide
from mpjax._training.options import StepOptions
from mpjax._training.state import TrainState
from mpjax._training.under_policy import under_policy


class StepLoss:
    """A loss function under a policy, as a train step differentiates it.

    Args:
      fun: the loss function, as it was given.
      policy: under which it runs.
      options: the step's.
    """

    def __init__(self, fun: Callable[..., Any], policy: Any, options: StepOptions) -> None:
        self.fun = fun
        self.policy = policy
        self.parts = MicroBatches(options.accumulate, options.accumulate_axes)
        self._options = options
        self._run = under_policy(fun, policy)

    def differentiate(self, loss_scale: LossScale, state: TrainState, batch: PyTree) -> Any:
        """Returns the mean loss, its weight, extra state, aux, mean scaled gradients, amaxes.

        Complex gradients are conjugated: so they point to where the loss grows, as optimizers take
        them. JAX's own do not.
        """

        @functools.wraps(self.fun, updated=())
        def loss_fn(*args: Any) -> Any:
            loss, rest = self._scalar(*args)
            return of_shard(loss, axis_name), rest

        axis_name = self._options.axis_name
        differentiate = value_and_grad(loss_fn, has_aux=True, loss_scale=loss_scale)
        check_whole(state.params, axis_name)
        # Averaged here, after accumulation, and not by value_and_grad in each micro-batch.
        inputs = tracked(state.params, state.amax_history, self.policy, loss_scale)
        params = localised((inputs,), 0, axis_name)[0]
        with averaged_over(axis_name, "make_train_step"):
            loss, weight, extra_state, aux, grads = gradients(
                differentiate, params, state.extra_state, batch, self.parts
            )
        if axis_name is not None:
            loss, weight, grads = (mean(x, axis_name) for x in (loss, weight, grads))
        if weight is not None:
            loss, grads = divided(weight, loss), divided(weight, grads)
        grads, seen = untracked(grads)
        return loss, weight, extra_state, aux, map_with_path(_conjugated, grads), seen

    def of_arrays(
        self, loss_scale: LossScale, params: PyTree, extra: PyTree, batch: PyTree, history: PyTree
    ) -> Any:
        """Returns the loss and its scaled gradients, as a function of arrays alone."""
        history = of_policy(self.policy, history)
        state = TrainState(jnp.zeros((), jnp.int32), params, None, extra, history)
        loss, _, _, _, grads, _ = self.differentiate(loss_scale, state, batch)
        return loss, grads

    def of_params(
        self, loss_scale: LossScale, state: TrainState, batch: PyTree
    ) -> Callable[[PyTree], Array]:
        """Returns the loss as a function of the parameters, for line searches."""

        def value(params: PyTree) -> Array:
            inputs = tracked(params, state.amax_history, self.policy, loss_scale)
            loss, _ = self._scalar(inputs, state.extra_state, batch)
            return wide(loss)

        return with_scaled_cotangents(value, loss_scale)

    def _scalar(self, params: PyTree, extra_state: PyTree, batch: PyTree) -> Any:
        """Runs the loss function under the policy; returns `loss, (weight, extra_state, aux)`."""
        guarded = extra_state is not None
        run, weights = self._run, kept_weights.places(extra_state)
        if weights:
            run = under_policy(kept_weights.keeping(self.fun, weights), self.policy)
        with in_step(self.policy):
            out = run(params, *((extra_state,) if guarded else ()), batch)
        loss, rest = split_outputs(
            out, extra_state, has_aux=self._options.has_aux, weighted=self._options.weighted
        )
        if weights:
            rest = kept_weights.put_back(rest, extra_state)
            kept_weights.check_kept(rest[1], extra_state)
        # A constant loss, which JAX differentiates too.
        loss = jnp.asarray(loss) if isinstance(loss, float) else loss
        weight, *others = rest
        loss = check_trains(loss, weight, params)
        return loss, (jax.lax.stop_gradient(weight), *others)


def _conjugated(_: Any, grad: Any) -> Any:
    is_complex = is_array(grad) and jnp.issubdtype(grad.dtype, jnp.complexfloating)
    return jnp.conj(grad) if is_complex else grad
