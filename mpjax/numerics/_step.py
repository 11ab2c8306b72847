"""Diagnoses a train step, for `step.diagnose`: checks its arguments, and runs it instrumented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax._base.errors import message
from mpjax._base.tree import to_full
from mpjax._scaling.optim_state import current_loss_scale
from mpjax.numerics._clock import Progress
from mpjax.numerics._diagnose import diagnose_step
from mpjax.numerics._program import check_alive
from mpjax.numerics._report import Report
from mpjax.numerics._subject import Subject, factor_as_scale

Differentiated = Callable[..., Any]
"""(loss scale, params, extra state, batch, amax history) → loss and scaled gradients."""

_WHERE = "step.diagnose"
_NAMES = ("params", "extra_state", "batch", "amax_history")


class StepDiagnosis:
    """The diagnosis of one train step; keeps its programs.

    Args:
      name: of the loss function.
      policy: the step's.
      axis_name: the step's.
      twin: policy → what the step differentiates, under that policy.
    """

    def __init__(
        self, name: str, policy: Any, axis_name: Any, twin: Callable[[Any], Differentiated]
    ) -> None:
        self._axis_name = axis_name

        def make(under: Any) -> Callable[..., Any]:
            run = twin(under)
            widened = under != policy  # the policy of a 16-bit state, tried in float32

            def fun(factor: Any, params: Any, *rest: Any) -> Any:
                if widened:
                    params = jax.tree.map(to_full, params)
                return run(factor_as_scale(factor, scaled=True), params, *rest)

            return fun

        self._subject = Subject(name, policy, make, True, _WHERE, _NAMES[0])

    def run(
        self,
        state: Any,
        batch: Any,
        metrics: Mapping[str, Any] | None,
        progress: Progress,
    ) -> Report:
        """Returns the report of a state, with parameters, extra state and optimizer state."""
        if self._axis_name is not None:
            got = f"the step runs inside a shard_map over {self._axis_name!r}, and this outside."
            fix = "Type mpjax.numerics.diagnose(loss, policy, loss_scale=metrics['loss_scale'])"
            fix += "(params, batch), where loss is jax.shard_map of the sum of the devices' losses,"
            fix += f" jax.lax.psum(loss_fn(params, batch), {self._axis_name!r}): a mean would"
            fix += " divide cotangents, which the step does not."
            raise ValueError(message(_WHERE, got, fix))
        args = (state.params, state.extra_state, batch, state.amax_history)
        check_alive((*args, state.opt_state), (*_NAMES, "opt_state"), _WHERE)
        scale = current_loss_scale(state.opt_state).loss_scale
        return diagnose_step(self._subject, _NAMES, args, scale, metrics, progress)
