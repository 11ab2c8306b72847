"""Flax linen under a policy: dtypes by module path, a table of them, guarded train states."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from mpjax._base.errors import needed_by
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords

with needed_by("mpjax.linen"):
    import flax.linen as nn

import jax
import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.foreign_errors import attributes_of
from mpjax._base.tree import is_array_or_shape, is_overwritten, select_tree
from mpjax._base.typing import PolicySpec, PyTree
from mpjax._flax.linen_modules import Setting, journal, policied
from mpjax._flax.module_dtypes import AS_WRITTEN, ModuleRow, ModuleTable, as_checked_policy, row_of
from mpjax._policies.policy import shown_name
from mpjax._scaling.optim_state import current_loss_scale, find_states

__all__ = ["apply_gradients", "tabulate", "with_policy"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__, nn)


M = TypeVar("M")


@names_keywords(POLICIES_OF)
def with_policy(model: M, policy: PolicySpec = None, *, override: bool = False) -> M:
    """Returns `model` with the dtypes of a policy in all of its modules, by module path.

    Every module gets `dtype` from the policy's `compute_dtype` and `param_dtype` from its
    `param_dtype`: submodules made in `setup` or a compact method, given as attributes, shared, or
    inside `nn.scan`, `nn.remat`, `nn.vmap` and `nn.jit`. The model's results are cast to the
    `output_dtype` of the default. The given model stays as it is; variables, their names and the
    modules' classes are the same for Flax.

    A dtype that the model sets itself stays. It counts as set if it is neither the default of
    its field nor what the policy gave to a module above: a model that passes `dtype=self.dtype`
    down is under the policy, one that writes `dtype=jnp.float32` for a layer keeps it there.

    A rule's path is that of the module, as in `variables["params"]`: 'encoder/norm_0'. Before it
    may stand the model's name, as in `autocast`: 'Net/encoder/norm_0'.

    Args:
      model: a linen module, unbound; or a module class, as `nn.remat` and `nn.scan` take it.
      policy: whatever `get_policy` takes; a `PolicyMap` for dtypes by path.
      override: whether the policy also replaces dtypes that the model sets itself.

    Returns:
      A module of a subclass of the model's class, with the same fields; equal, and hashing
      equal, for equal models and policies.

    Raises:
      TypeError: `model` is no linen module.
      ValueError: it is bound to variables, or inside another module; or a dtype is float64 and
        64-bit types are off.

    Warns:
      PolicyWarning: while variables are initialised: a rule matches no module, decides nothing
        because an earlier one matches too, or changes nothing; or a module of your own has
        parameters and no `dtype`.

    Dtypes:
      Layers without a `dtype` (Dropout) work in the dtype of their input. Statistics (BatchNorm)
      stay float32, as Flax makes them. The carries of recurrent cells have the dtype with which
      they come in.

    Transforms:
      All of JAX's, and Flax's lifted ones, around it and inside.

    Example:
      >>> import flax.linen as nn
      >>> model = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)])
      >>> policies = mpjax.PolicyMap("bf16-mixed", {"layers_1": "float32"})
      >>> model = mpjax.linen.with_policy(model, policies)
      >>> table = mpjax.linen.tabulate(model, jnp.ones((1, 4)))
      >>> [(row.path, row.dtype) for row in table.rows[1:]]
      [('layers_0', 'bf16'), ('layers_1', 'f32'), ('layers_2', 'bf16')]

    References:
      Keras, `DTypePolicyMap`; Haiku, `hk.mixed_precision.set_policy`
    """
    name = getattr(model, "name", None) or getattr(model, "__name__", type(model).__name__)
    setting = Setting(as_checked_policy(model, policy, "with_policy"), override, model=name)
    if isinstance(model, type) and issubclass(model, nn.Module):
        return cast("M", policied(model, setting))
    if not isinstance(model, nn.Module):
        raise TypeError(_no_module(model))
    if model.scope is not None or model.parent is not None:
        got = f"the {type(model).__name__} is bound: it has variables, or is part of a module."
        fix = "Give the whole model a PolicyMap, or the class: with_policy(nn.Dense, policy)(8)."
        raise ValueError(message("with_policy", got, fix))
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    # Fields of Modules are adopted when it is bound, as those of any module that is cloned.
    return cast("M", policied(type(model), setting)(**fields))


def _no_module(model: object) -> str:
    fix = "Type with_policy(MyModel(), 'bf16-mixed')."
    if any(base.__module__.startswith("flax.nnx") for base in type(model).__mro__):
        fix = "An NNX module is changed in place: mpjax.nnx.set_policy(model, 'bf16-mixed')."
    elif callable(model):
        fix = "For a function there is mpjax.autocast(fun, 'bf16-mixed')."
    got = f"got a {type(model).__name__}."
    return message("with_policy", got, "Allowed: a flax.linen.Module, or a class of one.", fix)


def tabulate(
    model: nn.Module,
    *args: Any,
    rngs: Any = None,
    method: Any = None,
    **kwargs: Any,
) -> ModuleTable:
    """Returns a table of the dtypes that the modules of a model use, with the reasons.

    Args:
      model: a linen module, with a policy or without.
      *args, **kwargs: arguments of a call; arrays may be `jax.ShapeDtypeStruct`s.
      rngs: as for `model.init`; None for a key that serves all streams.
      method: as for `model.init`.

    Returns:
      A `ModuleTable`: print it, with rich in colour; read it by `.rows`, `table["encoder"]` or
      `.to_dict()`. Its `dtype` is 'inputs' if a module computes in the dtype of its inputs, and '-'
      if it has no dtype.

    Raises:
      TypeError: `model` is no linen module.

    Dtypes:
      Those of the modules' attributes, and of the parameters that `model.init` would make.

    Transforms:
      None: it is for people. Nothing is computed; the model is traced abstractly.

    Example:
      >>> import flax.linen as nn
      >>> model = mpjax.linen.with_policy(nn.Dense(2), "bf16-mixed")
      >>> print(mpjax.linen.tabulate(model, jnp.ones((1, 4))))
      Dense under bf16-mixed
      module  class  dtype  param_dtype  parameters  reason
      .       Dense  bf16   f32          10          policy

    References:
      flax, `nn.tabulate`
    """
    if not isinstance(model, nn.Module):
        raise TypeError(_no_module(model).replace("with_policy", "tabulate", 1))
    kinds: dict[str, type] = {}
    modules: dict[str, nn.Module] = {}

    def record(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, path = context.module, "/".join(context.module.path)
        if context.method_name != "setup":
            kinds.setdefault(path, type(module))  # here, for the order in which they are called
        out = next_fun(*args, **kwargs)
        # Flax tries out the setup of a lifted module on a copy, whose path is that of the root.
        if type(module) is kinds.get(path):
            modules.setdefault(path, module)  # its dtypes are set by now
        return out

    with nn.intercept_methods(record), journal() as reasons:
        variables = _abstract_init(model, args, kwargs, rngs=rngs, method=method)
    rows = [_row(path, modules[path], variables, reasons.get(path, AS_WRITTEN)) for path in kinds]
    setting: Setting | None = getattr(model, "mpjax_setting", None)
    title = type(model).__name__ + (f" under {shown_name(setting.policy)}" if setting else "")
    return ModuleTable(title, tuple(rows))


def _abstract_init(model: nn.Module, args: Any, kwargs: Any, *, rngs: Any, method: Any) -> Any:
    """Returns the variables that `init` would make, as shapes; only arrays are traced."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_traced = [is_array_or_shape(x) for x in leaves]

    def init(rngs: Any, arrays: list[Any]) -> Any:
        values = iter(arrays)
        given = [next(values) if t else x for t, x in zip(is_traced, leaves, strict=True)]
        args, kwargs = structure.unflatten(given)
        return model.init(rngs, *args, method=method, **kwargs)

    arrays = [x for t, x in zip(is_traced, leaves, strict=True) if t]
    return jax.eval_shape(init, jax.random.key(0) if rngs is None else rngs, arrays)


def _row(path: str, module: Any, variables: Any, reason: str) -> ModuleRow:
    held: Any = variables.get("params", {})
    for part in path.split("/") if path else ():
        held = held.get(part, {}) if isinstance(held, Mapping) else {}
    own = [x for x in held.values() if not isinstance(x, Mapping)]
    return row_of(path, module, jax.tree.leaves(own), reason)


# -- train states ------------------------------------------------------------------------------


class TrainStateLike(Protocol):
    """The part of a train state, as `flax.training.train_state`, that `apply_gradients` needs."""

    opt_state: Any
    params: Any

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Any:
        """Returns the state after one update."""

    def replace(self, **kwargs: Any) -> Any:
        """Returns the state with other values in some fields."""


S = TypeVar("S", bound=TrainStateLike)


def apply_gradients(state: S, *, grads: PyTree, **changes: Any) -> S:
    """Returns `state.apply_gradients(grads=grads, **changes)`, or `state` if the step is skipped.

    With `with_loss_scale` around the optimizer, a step with a non-finite gradient leaves parameters
    and moments as they are. The rest of a `TrainState` does not: its counter would go on, and
    BatchNorm statistics or an EMA from the same forward pass would be NaN from then on. This
    function leaves them as they were too, bit for bit, and also the float8 scales of
    `_overwrite_with_gradient`.

    Args:
      state: a `flax.training.train_state.TrainState`, or a subclass with fields of its own.
      grads: *scaled* gradients, as `with_loss_scale` takes them.
      **changes: fields to replace, e.g. `batch_stats=...`.

    Returns:
      The new state. Its loss scale has been adjusted in either case.

    Raises:
      ValueError: the optimizer is not wrapped in `with_loss_scale`; or a field changes its
        structure, shape or dtype.

    Dtypes:
      Unchanged.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> from flax.training.train_state import TrainState
      >>> tx = mpjax.with_loss_scale(optax.sgd(0.5), mpjax.StaticLossScale(8.0))
      >>> state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
      >>> skipped = mpjax.linen.apply_gradients(state, grads={"w": jnp.array([jnp.inf, 0])})
      >>> int(skipped.step), skipped.params
      (0, {'w': Array([1., 1.], dtype=float32)})

    References:
      flax, `TrainState.apply_gradients`
    """
    new = state.apply_gradients(grads=grads, **changes)
    scaled = [scale_state for _, scale_state in find_states(new.opt_state)]
    if not scaled:
        current_loss_scale(new.opt_state)  # its error says what is missing
    finite = jnp.all(jnp.stack([scale_state.grads_finite for scale_state in scaled]))
    kept = {
        f.name: select_tree(finite, getattr(new, f.name), getattr(state, f.name))
        for f in dataclasses.fields(cast("Any", state))
        if f.metadata.get("pytree_node", True) and f.name not in ("opt_state", "params")
    }
    return new.replace(params=_overwritten_kept(finite, new.params, state.params), **kept)


def _overwritten_kept(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new parameters; overwritten ones keep their old value if a step is skipped."""

    def choose(path: Any, a: Any, b: Any) -> Any:
        return select_tree(finite, a, b) if is_overwritten(path) else a

    return jax.tree_util.tree_map_with_path(choose, new, old)
