"""Flax NNX under a policy: dtypes by module path, scaled gradients, skipped steps undone."""

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

from mpjax._base.errors import needed_by
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords

with needed_by("mpjax.nnx"):
    from flax import nnx

import jax
import jax.numpy as jnp

from mpjax._autocast.arguments import nnx_names
from mpjax._base.errors import message
from mpjax._base.foreign_errors import attributes_of
from mpjax._base.tree import select_tree
from mpjax._base.typing import PolicySpec
from mpjax._flax.module_dtypes import AS_WRITTEN, ModuleTable, as_checked_policy, row_of, warn_of
from mpjax._flax.nnx_modules import mark_of, modules_of, parameters_of, path_text, set_dtypes
from mpjax._low_precision.forms import keeps_weights
from mpjax._scaling.optim_state import find_states
from mpjax._training.adopt import adopted
from mpjax.nnx._checks import check_optimizer
from mpjax.nnx._gradients import grad, value_and_grad
from mpjax.nnx._train import NNXTrainStep, make_train_step

__all__ = [
    "NNXTrainStep",
    "adopt_state",
    "grad",
    "make_train_step",
    "name_operations",
    "set_policy",
    "tabulate",
    "undo_skipped",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__, nnx)


M = TypeVar("M", bound=nnx.Module)


@names_keywords(POLICIES_OF)
def set_policy(model: M, policy: PolicySpec = None, *, override: bool = False) -> M:
    """Returns `model`, the dtypes of a policy set in place on all its modules, by module path.

    Every module gets `dtype` from the policy's `compute_dtype` and `param_dtype` from its
    `param_dtype`, and its parameters (`nnx.Param`) are cast to the latter. Everything else
    (BatchNorm statistics, RNG state, caches) stays as it is. A second call, with another policy,
    replaces the dtypes of the first.

    A dtype that the model sets itself stays. It counts as set if it is neither the default of
    the argument in the constructor of its class nor such a default of a module above, passed
    down. `nnx.Embed` does not tell an explicit float32 from its default.

    A rule's path is that of the module, as in `nnx.iter_modules`, joined by '/':
    'layers/0/norm', or 'Net/layers/0/norm' after the model's class. The parameters below it
    follow the same rule, unless one before it names their own path, as 'layers/0/norm/scale'.

    The result of an NNX module has its last layer's dtype; `policy.cast_to_output(model(x))`
    applies the policy's `output_dtype`.

    Args:
      model: an NNX module; one of shapes alone (`nnx.eval_shape`) will do.
      policy: whatever `get_policy` takes; a `PolicyMap` for dtypes by path.
      override: whether the policy also replaces dtypes that the model sets itself.

    Returns:
      The same model, as `mpjax.linen.with_policy` returns one.

    Raises:
      TypeError: `model` is no NNX module.
      ValueError: a dtype is float64 and 64-bit types are off.

    Warns:
      PolicyWarning: a rule matches no module, decides nothing because an earlier one matches
        too, or changes nothing; or a module of your own has parameters and no `dtype`.

    Dtypes:
      Layers without a `dtype` (Dropout) work in the dtype of their input. The carry of a recurrent
      cell has the wider of `param_dtype` and `compute_dtype`. On CPUs JAX refuses float16 in
      `jax.nn.dot_product_attention`, which NNX's attention calls; `mpjax.autocast` runs it.

    Transforms:
      Call it outside of any; `nnx.jit`, `nnx.grad`, `nnx.scan`, `nnx.remat` and `nnx.vmap` take the
      model as before. A stack of modules that one of them made counts as one module.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs))
      >>> policies = mpjax.PolicyMap("bf16-mixed", {"layers/1": "float32"})
      >>> model = mpjax.nnx.set_policy(model, policies)
      >>> [layer.dtype.dtype.name for layer in model.layers]
      ['bfloat16', 'float32']

    References:
      flax, `nnx.Module.set_attributes`; Keras, `DTypePolicyMap`
    """
    chosen = as_checked_policy(model, policy, "set_policy")
    findings, parameters = set_dtypes(model, chosen, override=override)
    warn_of(chosen, findings, "set_policy", model=type(model).__name__, also=parameters)
    return model


@names_keywords()
def name_operations(model: M) -> M:
    """Puts the paths of its modules on a model's operations, in place, and returns the model.

    The rules of a `PolicyMap` match these paths, and `explain` and profiles show them, as with Flax
    linen. `mpjax.autocast` names the modules among a function's arguments by itself. A model that
    the function makes by `nnx.merge` is no argument: call this function on it there.

    Args:
      model: an NNX module. Its modules become instances of subclasses of their classes, of the
        same names; a pickle of them holds the classes themselves.

    Raises:
      TypeError: `model` is no NNX module.

    Dtypes:
      Unchanged.

    Transforms:
      All of JAX's and NNX's, around it and inside.

    Example:
      >>> from flax import nnx
      >>> graphdef, params = nnx.split(nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
      >>> def fun(params, x):
      ...     return mpjax.nnx.name_operations(nnx.merge(graphdef, params))(x)
      >>> [row.module for row in mpjax.explain(fun, "bf16-mixed")(params, jnp.ones((1, 4))).rows]
      ['Sequential/layers/0', 'Sequential/layers/0']

    References:
      flax, `nn.enable_named_call`
    """
    modules_of(model, "name_operations")  # its error says what is allowed
    return nnx_names.name_modules(model)


@names_keywords()
def tabulate(model: nnx.Module) -> ModuleTable:
    """Returns a table of the dtypes that the modules of a model use, with the reasons.

    Args:
      model: an NNX module, with a policy or without.

    Returns:
      A `ModuleTable`: print it, with rich in colour; read it by `.rows`, `table["encoder"]` or
      `.to_dict()`. Its `dtype` is 'inputs' if a module computes in the dtype of its inputs, and '-'
      if it has no dtype; `param_dtype` is that of the parameters that exist.

    Raises:
      TypeError: `model` is no NNX module.

    Dtypes:
      Those of the modules' attributes and parameters.

    Transforms:
      None: it is for people.

    Example:
      >>> from flax import nnx
      >>> model = mpjax.nnx.set_policy(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "bf16-mixed")
      >>> print(mpjax.nnx.tabulate(model))
      Linear
      module  class   dtype  param_dtype  parameters  reason
      .       Linear  bf16   f32          10          policy

    References:
      flax, `nnx.tabulate`
    """
    rows: list[Any] = []
    for path, module in modules_of(model, "tabulate"):
        mark = mark_of(module)
        reason = mark.reason if mark else AS_WRITTEN
        rows.append(row_of(path_text(path), module, parameters_of(module), reason))
    return ModuleTable(type(model).__name__, tuple(rows))


# -- skipped steps -----------------------------------------------------------------------------


@contextlib.contextmanager
def undo_skipped(optimizer: nnx.Optimizer[Any], *nodes: Any) -> Generator[None]:
    """Undoes every other change of the `with` block if `optimizer` skips its step.

    `with_loss_scale` around the optax transformation leaves parameters and moments alone when a
    gradient is not finite. But the forward pass has by then written BatchNorm statistics (with
    that step's NaN in them), counted RNG streams on, perhaps updated an EMA; and the optimizer
    counts the step. All of that is put back, bit for bit, as if the batch had never been.

    Args:
      optimizer: an `nnx.Optimizer` whose transformation is wrapped in `with_loss_scale`. It is
        updated once inside the block.
      *nodes: modules, metrics, `nnx.Rngs`, `nnx.EMA`: every variable in them is guarded. A
        variable that is created inside the block is not undone.

    Raises:
      TypeError: the first argument is no optimizer.
      ValueError: the optimizer is not wrapped in `with_loss_scale`; or a variable changes its
        shape or dtype.

    Dtypes:
      Unchanged.

    Transforms:
      nnx.jit, nnx.scan, nnx.vmap, nnx.shard_map: inside, around the whole step.

    Example:
      >>> from flax import nnx
      >>> model = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
      >>> tx = mpjax.with_loss_scale(optax.sgd(0.1), mpjax.DynamicLossScale(8.0))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit
      ... def step(model, optimizer, x):
      ...     scale = mpjax.current_loss_scale(optimizer)
      ...     loss_fn = lambda model: jnp.mean(model(x) ** 2)
      ...     differentiate = mpjax.nnx.grad(loss_fn, loss_scale=scale)
      ...     with mpjax.nnx.undo_skipped(optimizer, model):
      ...         optimizer.update(model, differentiate(model))
      >>> step(model, optimizer, jnp.array([[1.0, jnp.nan], [0.0, 1.0]]))
      >>> model.mean.get_value(), int(optimizer.step.get_value())
      (Array([0., 0.], dtype=float32), 0)
    """
    check_optimizer(optimizer)
    variables = {id(v): v for node in (*nodes, optimizer.step) for v in _variables(node)}
    before = [(v, v.get_value()) for v in variables.values()]
    yield
    scaled = [scale_state for _, scale_state in find_states(optimizer.opt_state)]
    finite = jnp.all(jnp.stack([jnp.asarray(scale_state.grads_finite) for scale_state in scaled]))
    for variable, old in before:
        new = variable.get_value()
        if new is not old:
            variable.set_value(select_tree(finite, new, old))


# -- checkpoints -------------------------------------------------------------------------------


@names_keywords()
def adopt_state(
    optimizer: nnx.Optimizer[Any], old: nnx.Optimizer[Any], model: nnx.Module | None = None
) -> None:
    """Gives `optimizer` the state of `old`, the same one under another precision, in place.

    For a checkpoint from before `with_loss_scale`, or from a run with another loss scale or
    policy: restore it into an optimizer as it was written, and adopt that. Moments, counts and the
    step are taken over. The loss scale is too if both are of one kind (dynamic, static, none);
    otherwise it starts as the transformation of `optimizer` says.

    Args:
      optimizer: the `nnx.Optimizer` that goes on, its transformation in `with_loss_scale` or
        not.
      old: the `nnx.Optimizer` that holds the checkpoint; it stays as it is.
      model: the model with the restored parameters; only for a state that stores bits of them
        (`with_master_weights`, `with_kahan`).

    Raises:
      TypeError: one of them is no `nnx.Optimizer`.
      ValueError: `model` is missing, or they differ in more than loss scale and dtypes; the message
        names where first.

    Dtypes:
      Those that the state of `optimizer` has: moments are cast.

    Transforms:
      nnx.jit.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> old = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
      >>> tx = mpjax.with_loss_scale(optax.adam(0.1), mpjax.DynamicLossScale(8))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> mpjax.nnx.adopt_state(optimizer, old)
      >>> mpjax.current_loss_scale(optimizer).loss_scale
      Array(8., dtype=float32)

    References:
      `mpjax.optim.adopt_state`, for states that are pytrees
    """
    for given in (optimizer, old):
        if not isinstance(given, nnx.Optimizer):
            got = f"got a {type(given).__name__}."
            fix = "Restore the checkpoint into the nnx.Optimizer that wrote it, and give that."
            raise TypeError(message("adopt_state", got, "Allowed: an nnx.Optimizer.", fix))
    fresh, was = nnx.as_pure(optimizer.opt_state), nnx.as_pure(old.opt_state)
    if model is None and keeps_weights(fresh):
        got = "the optimizer keeps bits of the parameters, and was not given the model."
        raise ValueError(message("adopt_state", got, "Type adopt_state(optimizer, old, model)."))
    params = None if model is None else nnx.as_pure(nnx.state(model, optimizer.wrt))
    state = jax.tree.map(jnp.copy, adopted(fresh, was, "adopt_state", params))
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step.set_value(jnp.copy(old.step.get_value()))


def _variables(node: Any) -> list[Any]:
    return [x for _, x in nnx.iter_graph(node) if isinstance(x, nnx.Variable)]
