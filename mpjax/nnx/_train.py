"""The whole train step of an NNX model: its variables go in and come back by themselves."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Never, cast

import jax
import optax
from flax import nnx

from mpjax._autocast.arguments.nnx_names import name_modules
from mpjax._base.described import described
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import NNX_STEP
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import OVERWRITE_WITH_GRADIENT, first_difference
from mpjax._base.typing import AxisName, PolicySpec, PyTree
from mpjax._scaling.loss_scale import LossScale
from mpjax._training.checks import pair
from mpjax._training.summary import describe_step
from mpjax.nnx._checks import check_model, check_variables, state_of_step, variables_of
from mpjax.numerics import Report
from mpjax.numerics._clock import Progress
from mpjax.train import Metrics, TrainState, TrainStep
from mpjax.train import make_train_step as make_plain_train_step


class NNXTrainStep:
    """A jitted `(state, batch) → (state, metrics)` of an NNX model; made by `make_train_step`."""

    def __init__(
        self, model: nnx.Module, loss_fn: Callable[..., Any], wrt: Any, has_aux: bool
    ) -> None:
        self._model = model
        self.loss_fn = loss_fn
        self._wrt = wrt
        self._has_aux = has_aux
        self._graphdef, params, rest = nnx.split(model, wrt, ...)
        self.params: PyTree = params
        self._rest: PyTree = rest
        if not jax.tree.leaves(params):
            got = f"the model has no variables of wrt={wrt!r}."
            fix = "Type wrt=nnx.Param, or the kind of variables that you train."
            raise ValueError(message("nnx.make_train_step", got, fix))
        self._rest_paths = frozenset(path for path, _ in nnx.to_flat_state(rest))
        self.plain: TrainStep  # the step of pure functions that does the work

    def __repr__(self) -> str:
        return describe_step(self.loss_fn, self.plain.policy, {})

    def init(self, model: nnx.Module | None = None, *, batch: PyTree = None) -> TrainState:
        """Returns the state to start from: the variables of the model, copied.

        Args:
          model: another model of the same form; None for the one that the step was made with.
          batch: as in `TrainStep.init`.

        Returns:
          A `TrainState` of plain arrays: `params` are what `wrt` chose, `extra_state` all else
          (BatchNorm statistics, RNG streams, caches).
        """
        model = self._model if model is None else model
        fix = "Type step.init(), of the model that the step was made with, or step.init(model)."
        check_model(model, "nnx step.init", fix)
        _, params, rest = nnx.split(model, self._wrt, ...)
        known = self.params, self._rest
        check_variables((params, rest), known, "nnx step.init", "the model of the step")
        return self.plain.init(nnx.as_pure(params), nnx.as_pure(rest), batch=batch)

    def adopt(self, state: Any, *, batch: PyTree = None) -> TrainState:
        """Returns a state of another policy as one of this step; see `TrainStep.adopt`."""
        return self.plain.adopt(state, batch=batch)

    def __call__(
        self, state: TrainState, *batch: PyTree, **named: Never
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics of this step, of a batch; `state` is donated."""
        return self.plain(state_of_step(state), *batch, **named)

    def diagnose(
        self,
        state: TrainState,
        batch: PyTree,
        metrics: Mapping[str, Any] | None = None,
        *,
        progress: Progress = None,
    ) -> Report:
        """Returns the operation that made a skipped step not finite; see `TrainStep.diagnose`."""
        return self.plain.diagnose(state_of_step(state), batch, metrics, progress=progress)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Returns the step lowered for these arguments (or specs of them), ahead of time."""
        return self.plain.lower(state_of_step(state), batch)

    def merge(self, state: TrainState) -> nnx.Module:
        """Returns a model with the variables of `state`, to evaluate or to save."""
        variables = variables_of(state, "step.merge(state)")
        return nnx.merge(self._graphdef, *variables, copy=True)

    def update(self, model: nnx.Module, state: TrainState) -> None:
        """Gives `model` the variables of `state`, copied, in place."""
        where = "step.update(model, state)"
        variables = variables_of(state, where, "second")
        check_model(model, where, "Type model = step.merge(state), for a model of its own.")
        _, params, rest = nnx.split(model, self._wrt, ...)
        check_variables((params, rest), variables, where, "the state")
        nnx.update(model, *jax.tree.map(lambda x: x.copy(), variables))

    def loss_of_variables(self, params: PyTree, rest: PyTree, batch: PyTree) -> Any:
        """Returns the loss as a function of arrays, and the variables that the model changed."""
        model = name_modules(nnx.merge(self._graphdef, params, rest))
        out, aux = self.loss_fn(model, batch), None
        if self._has_aux:
            out, aux = pair(out, "(loss, aux)")
        left: Any = nnx.split(model, self._wrt, ...)[2]
        changed = nnx.to_flat_state(left)
        # Variables that the loss created (sown values) would change the state's tree, and retrace.
        kept = [(path, x) for path, x in changed if path in self._rest_paths]
        new = nnx.as_pure(nnx.from_flat_state(kept))
        if jax.tree.structure(new) != jax.tree.structure(rest):
            trees = ("what the loss function left", new), ("the model", rest)
            fix = ("Variables may change their values in the loss, and not go away.",)
            raise ValueError(first_difference("nnx.make_train_step", *trees, fix))
        return (out, (new, aux)) if self._has_aux else (out, new)


@names_keywords(NNX_STEP)
def make_train_step(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    policy: PolicySpec = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    wrt: Any = nnx.Param,
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
) -> NNXTrainStep:
    """Returns a jitted train step of an NNX model: `state, metrics = step(state, batch)`.

    The step splits the model into parameters and everything else, and runs the loss under `policy`.
    Changes that the model makes to itself, such as BatchNorm statistics, RNG counts and caches, go
    into the state. A step with an inf or NaN in its gradients leaves all of it as it was, bit for
    bit.

    Args:
      model: an NNX module. It is read when the step is made and at `step.init()`, in its mode
        (`train()` or `eval()`) at that time, and never changed.
      tx: any optax transformation, as `nnx.Optimizer` takes it; see `mpjax.make_train_step`.
      policy: whatever `get_policy` takes; None for the scoped default, or float32 without one.
      loss_fn: `loss_fn(model, batch) -> loss`, or `(loss, aux)` with `has_aux`. It may change
        the model's variables; new ones (sown values) are dropped, return them as aux.
      wrt: which variables to train, as in `nnx.Optimizer`.
      loss_scale, has_aux, accumulate, accumulate_axes, weighted, max_consecutive_skips: as in
        `mpjax.make_train_step`.
      axis_name, donate: as there.
      rounding, watch, lost_updates: as there.

    Returns:
      An `NNXTrainStep`: `step.init()` gives the state, `step(state, batch)` the next one and the
      metrics of `mpjax.make_train_step`; `step.merge(state)` is a model with these variables,
      `step.update(model, state)` writes them into yours.

    Raises:
      TypeError: `model` is no NNX module, or `loss_fn` no function; as `mpjax.make_train_step`.
      ValueError: the model has float8 scales, which `mpjax.nnx.value_and_grad` trains.

    Dtypes:
      Parameters in `param_dtype`, computation in `compute_dtype`, gradients float32; other
      variables keep their dtypes.

    Transforms:
      jit (it is), scan, vmap, shard_map.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(
      ...     nnx.Linear(2, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
      ... )
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x) ** 2)
      >>> step = mpjax.nnx.make_train_step(model, optax.sgd(0.1), "16-mixed", loss_fn)
      >>> state = step.init()
      >>> state, metrics = step(state, jnp.ones((8, 2)))
      >>> step.update(model, state)
      >>> int(model.layers[2].rngs.count.get_value())
      1

    References:
      flax, `nnx.Optimizer`, `nnx.split`
    """
    _check(model, loss_fn)
    step = NNXTrainStep(model, cast("Callable[..., Any]", loss_fn), wrt, has_aux)

    @functools.wraps(step.loss_fn, updated=())
    def loss_of_variables(*args: Any) -> Any:
        return step.loss_of_variables(*args)

    step.plain = make_plain_train_step(
        loss_of_variables,
        tx,
        policy,
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
    return step


def _check(model: Any, loss_fn: Any) -> None:
    where = "nnx.make_train_step"
    if not isinstance(model, nnx.Module):
        got = f"the first argument must be an NNX module; got {described(model)}."
        fix = "Type mpjax.nnx.make_train_step(model, tx, policy, loss_fn); for functions of "
        fix += "parameters there is mpjax.make_train_step(loss_fn, tx, policy)."
        raise TypeError(message(where, got, fix))
    if not callable(loss_fn):
        got = f"loss_fn must be a function; got {described(loss_fn)}."
        fix = 'Type mpjax.nnx.make_train_step(model, tx, "bf16-mixed", loss_fn).'
        raise TypeError(message(where, got, "Allowed: loss_fn(model, batch) -> loss.", fix))
    for _, x in nnx.iter_graph(model):
        if isinstance(x, nnx.Variable) and type(x).__name__ == OVERWRITE_WITH_GRADIENT:
            got = "the model holds float8 scales, which are trained by what their gradient says."
            fix = "Write the step with mpjax.nnx.value_and_grad and nnx.DiffState, or give the "
            fix += "linen model to mpjax.make_train_step."
            raise ValueError(message(where, got, fix))
