"""Checks the arguments of `make_train_step` and of its step; errors say what to type instead."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.averaged import step_without
from mpjax._base.compat import axis_names, varying_axes
from mpjax._base.described import MODULES, described
from mpjax._base.donated import is_donated, refuse_donated
from mpjax._base.dtypes import FLOAT32, describe
from mpjax._base.errors import message
from mpjax._base.tree import (
    check_axes,
    first_difference,
    is_array,
    is_inexact,
    leaf_paths,
    path_str,
)
from mpjax._base.typing import Array, AxisName, PyTree
from mpjax._base.users_line import NEEDS_VALUES, users_line
from mpjax._policies.order import is_policy
from mpjax._policies.policy import Policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._scaling.given_scale import as_loss_scale
from mpjax._scaling.grad import get_loss_scale
from mpjax._scaling.loss_scale import NoOpLossScale
from mpjax._scaling.optim_state import find_states, gradient_params, is_wrapped, refuse_before
from mpjax._scaling.transformation import check_transformation, is_transformation
from mpjax._training.adopt import kind_of
from mpjax._training.inputs import check_params
from mpjax._training.micro_axes import check_micro_axes
from mpjax._training.options import StepOptions


def check_arguments(loss_fn: Any, tx: Any, policy: Any, options: StepOptions) -> None:
    """Refuses arguments that `make_train_step` cannot work with, before it uses them."""
    where = "make_train_step"
    if is_transformation(loss_fn) or is_policy(loss_fn):
        got = f"got {described(loss_fn)} as the loss function."
        allowed = "Allowed, in this order: make_train_step(loss_fn, tx, policy)."
        fix = 'Swap them: make_train_step(loss_fn, optax.adam(1e-3), "bf16-mixed").'
        raise TypeError(message(where, got, allowed, fix))
    if not callable(loss_fn) or isinstance(loss_fn, type):
        got = f"the loss function must be a function; got {described(loss_fn)}."
        allowed = "Allowed: loss_fn(params, batch) -> loss, a floating scalar."
        fix = "Type make_train_step(loss_fn, optax.adam(1e-3)), loss_fn without parentheses."
        raise TypeError(message(where, got, allowed, fix))
    if described(loss_fn) in MODULES:
        got = f"got {described(loss_fn)} as the loss function."
        fix = "Write one: def loss_fn(params, batch), which calls the model and returns a scalar."
        raise TypeError(message(where, got, "Allowed: loss_fn(params, batch) -> loss.", fix))
    _refuse_policy(tx, policy)
    check_transformation(tx, f"{where}(tx)")
    if is_transformation(policy):
        got = "got an optax transformation as the policy."
        raise TypeError(message(where, got, 'Type make_train_step(loss_fn, tx, "bf16-mixed").'))
    if options.loss_scale is not None:
        as_loss_scale(options.loss_scale, f"{where}(loss_scale)")
    if is_wrapped(tx):
        _refuse_two(options.loss_scale)
    _check_accumulate(options.accumulate)
    check_micro_axes(options.accumulate_axes)
    for name in ("has_aux", "weighted", "donate", "lost_updates"):
        if not isinstance(value := getattr(options, name), bool):
            got = f"must be True or False; got {described(value)}."
            raise TypeError(message(f"{where}({name})", got, f"Type {name}=True, or leave it out."))
    for name in axis_names(options.axis_name):
        if not isinstance(name, str):
            got = f"must be the name of an axis, or several; got {described(name)}."
            fix = "Type axis_name='data', as it stands in the mesh; under plain jit leave it out."
            raise TypeError(message(f"{where}(axis_name)", got, fix))


def _refuse_policy(tx: Any, policy: Any) -> None:
    """Raises TypeError for a policy as the optimizer; a text alone may be that of an optimizer."""
    if not is_policy(tx) or (isinstance(tx, str) and not is_transformation(policy)):
        return
    got = f"got the policy {str(tx)!r} as the optimizer."
    allowed = "Allowed, in this order: make_train_step(loss_fn, tx, policy)."
    fix = f"Swap them: make_train_step(loss_fn, optax.adam(1e-3), {str(tx)!r})."
    raise TypeError(message("make_train_step", got, allowed, fix))


def _refuse_two(loss_scale: Any) -> None:
    if loss_scale is not None:
        got = "got a loss_scale, and an optimizer that holds one already."
        fix = "Drop loss_scale=, or the with_loss_scale around the optimizer."
        raise ValueError(message("make_train_step", got, fix))


def _check_accumulate(accumulate: Any) -> None:
    is_count = isinstance(accumulate, int) and not isinstance(accumulate, bool)
    if not (is_count and accumulate >= 1):
        got = f"must be a whole number of at least 1; got {accumulate!r}."
        raise ValueError(message("make_train_step(accumulate)", got, "Type, for example, 4."))


def check_whole(params: PyTree, axis_name: AxisName) -> None:
    """Refuses axes that are not there, and parameters of which each device holds another part.

    The mean of their gradients over that axis would be one of different parts. Types tell it, where
    `shard_map` tracks them (`check_vma`).
    """
    check_axes(axis_name, "make_train_step")
    names = axis_names(axis_name)
    for path, x in jax.tree.leaves_with_path(params) if names else ():
        parts = [name for name in names if is_array(x) and name in varying_axes(x)]
        if parts:
            got = f"each device of {parts[0]!r} holds another part of {path_str(path)!r}, and "
            got += f"axis_name={parts[0]!r} averages its gradients over these devices."
            allowed = "Allowed: parameters that are whole on each device, with in_specs of P(), "
            allowed += "or an axis over which only the batch is split."
            where = "make_train_step(axis_name)"
            raise ValueError(message(where, got, allowed, step_without(parts[0])))


def check_alike(finite: Array, loss: Array, params: PyTree, axis_name: AxisName) -> None:
    """Refuses a step without `axis_name` on devices with the same parameters and other batches.

    JAX would refuse the results, and advise check_vma=False: then each device trains other weights.

    Args:
      finite: whether the step is taken; another value on each device if nobody joined them.
      loss, params: those of the step.
      axis_name: the step's.
    """
    of_params = frozenset[object]().union(
        *map(varying_axes, filter(is_array, jax.tree.leaves(params)))
    )
    apart = (varying_axes(finite) & varying_axes(loss)) - of_params
    if axis_name is None and apart:
        names = sorted(apart, key=str)
        name = repr(tuple(names) if len(names) > 1 else names[0])
        got = f"each device of {name} has a loss of its own, and all have the same parameters: a "
        got += "step without axis_name does not average their gradients."
        allowed = "Allowed: axis_name=, or a loss that is the same on all devices: "
        allowed += f"jax.lax.pmean(loss, {name})."
        fix = f"Type make_train_step(loss_fn, tx, policy, axis_name={name}). With check_vma=False "
        fix += "in its place each device would train other weights."
        raise ValueError(message("make_train_step(axis_name)", got, allowed, fix))


def check_start(
    loss_fn: Callable[..., Any], params: PyTree, extra_state: PyTree, where: str
) -> None:
    """Refuses parameters that cannot be trained, and extra state that the loss has no place for."""
    check_params(params, where)
    given = ("params", "batch") if extra_state is None else ("params", "extra_state", "batch")
    if _changes_arguments(loss_fn):
        return
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        takes = ", ".join(signature.parameters)
        got = f"the loss function {name}({takes}) cannot take ({', '.join(given)}): {error}."
        allowed = "Allowed: loss_fn(params, batch), or with extra state"
        allowed += " loss_fn(params, extra_state, batch) -> (loss, new_extra_state)."
        fix = "Type step.init(params, extra_state), or give it as extra_state= to step.adopt."
        if extra_state is not None:
            fix = f"Type {where}({'state' if where.endswith('adopt') else 'params'}) without it,"
            fix += f" or def {name}(params, extra_state, batch)."
        several = _several(signature) if extra_state is None else ""
        also = []
        if several:
            of = next(iter(signature.parameters))
            also = [f"Are {several} the batch: def {name}({of}, batch): {several} = batch,"]
            also[0] += f" and step(state, ({several}))."
        elif where == "step.init" and extra_state is not None:
            also = ["A batch goes into the step itself: step(state, batch)."]
        raise TypeError(message(where, got, allowed, fix, *also)) from None


def _several(signature: inspect.Signature) -> str:
    """Returns the names of a loss function's arguments after the parameters, if several."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in kinds]
    return ", ".join(names[1:]) if len(names) > 2 else ""


def _changes_arguments(fun: Any) -> bool:
    """Whether a wrapper may take other arguments than its signature, that of the wrapped function.

    Those of JAX and autocast do not: they pass arguments on as they are.
    """
    while hasattr(fun, "__wrapped__"):
        maker = getattr(fun, "__globals__", {}).get("__name__") or type(fun).__module__
        if not maker.startswith(("jax.", "jaxlib.", "mpjax._autocast.")):
            return True
        fun = fun.__wrapped__
    return False


def check_scale_fits(
    tx_state: PyTree, params: PyTree, loss_scale: Any, policy: Policy | PolicyMap
) -> None:
    """Refuses an optimizer whose own wrapper does not go with the rest of the arguments.

    Args:
      tx_state: the initial state of the given optimizer; it holds a loss scale.
      params: the parameters to optimize.
      loss_scale: the loss scale that was given beside it.
      policy: the step's.
    """
    _refuse_two(loss_scale)
    refuse_before(tx_state, "make_train_step", is_optimizer=True)
    wanted = get_loss_scale(policy)
    scale_states = [state for _, state in find_states(tx_state)]
    reached = sum(state.leaf_finite.size for state in scale_states)
    leaves = len(jax.tree.leaves(gradient_params(params)))
    if reached < leaves and any(state.adjustment is not None for state in scale_states):
        got = f"with_loss_scale sees {reached} arrays of {leaves} parameters: what is around it "
        got += "splits or joins them, and may leave some gradients scaled."
        fix = "Type with_loss_scale(optax.partition(...)), or with optax.masked or optax.flatten"
        fix += " in its place: the wrapper around all of it."
        raise ValueError(message("make_train_step", got, fix))
    if not isinstance(wanted, NoOpLossScale) and all(x.adjustment is None for x in scale_states):
        got = f"{policy} computes in float16, and with_loss_scale(tx) was given no loss scale: "
        got += "gradients below 2**-24 would vanish."
        fix = "Type with_loss_scale(tx, mpjax.DynamicLossScale()), or give tx unwrapped;"
        fix += " without scaling: make_train_step(loss_fn, tx, loss_scale=mpjax.NoOpLossScale())."
        raise ValueError(message("make_train_step", got, fix))


def check_own(
    policy: Policy | PolicyMap, params: PyTree, wanted: PyTree, opt_state: PyTree, fresh: PyTree
) -> None:
    """Refuses, while tracing, the state of another policy: it would train in that one.

    Args:
      policy: the step's.
      params, opt_state: of the state that was given.
      wanted, fresh: the parameters and the initial state that the step would make of these.
    """
    fix = "A checkpoint of another policy: step.adopt(state). Else start with step.init(params)."
    pairs = zip(leaf_paths(wanted), *map(jax.tree.leaves, (wanted, params)), strict=True)
    for path, ours, theirs in pairs:
        if is_array(theirs) and ours.dtype != theirs.dtype:
            got = f"the state is of another policy; parameter {path!r} is {describe(theirs)}"
            got += f", and {policy} keeps {describe(ours)}."
            raise ValueError(message("train step", got, fix))
    ours, theirs = map(find_states, (fresh, opt_state))
    kinds = [[kind_of(scale_state) for _, scale_state in states] for states in (ours, theirs)]
    if theirs and kinds[0] != kinds[1]:
        got = f"the state has {kinds[1][0]} loss scale, and this step {kinds[0][0]} loss scale."
        raise ValueError(message("train step", got, fix))
    if jax.tree.structure(fresh) != jax.tree.structure(opt_state):
        pair = ("this step's optimizer state", fresh), ("the one that was given", opt_state)
        lines = ("It is of another optimizer or model.", "Start with step.init(params).")
        raise ValueError(first_difference("train step", *pair, lines))
    pairs = zip(leaf_paths(fresh), *map(jax.tree.leaves, (fresh, opt_state)), strict=True)
    for path, ours, theirs in pairs:
        if jnp.shape(ours) != jnp.shape(theirs):
            got = f"the parameters do not fit the optimizer's state: {path!r} is {describe(theirs)}"
            got += f", and that of these parameters {describe(ours)}."
            also = "Weights of this model: state.with_params(params), which refuses other shapes."
            raise ValueError(message("train step", got, "Start with step.init(params).", also))


def check_extra_state(new: PyTree, old: PyTree) -> None:
    """Refuses, while tracing, extra state that does not come back as it went in."""
    where = "make_train_step: the extra state"
    if jax.tree.structure(new) != jax.tree.structure(old):
        pair = ("what the loss function returned", new), ("what it was given", old)
        fix = "Return all of it, under the same keys; what is new goes into step.init(params, ...)."
        raise ValueError(first_difference(where, *pair, (fix,)))
    for path, a, b in zip(leaf_paths(old), *map(jax.tree.leaves, (new, old)), strict=True):
        if not is_array(b):
            continue
        got = f"{path!r} was {describe(b)}; the loss function returned {describe(a)}."
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(message(where, got, "Return it in the shape in which it came."))
        if not _holds(b.dtype, jnp.result_type(a)):
            allowed = f"Allowed: what {b.dtype.name} holds; of floats, those of another size too."
            fix = f"Start with {describe(a)} in step.init(params, extra_state), or return it"
            raise ValueError(message(where, got, allowed, f"{fix} .astype({b.dtype.name!r})."))


def _holds(dtype: Any, other: Any) -> bool:
    """Whether a leaf of a dtype may take values of another: floats of a float, whatever its size.

    An integer holds no fraction, a float no imaginary part, and a boolean no number.
    """
    if dtype == other or any(jnp.issubdtype(x, jax.dtypes.extended) for x in (dtype, other)):
        return bool(dtype == other)
    if jnp.issubdtype(dtype, jnp.inexact):
        is_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, other)]
        return is_complex[0] or not is_complex[1]
    return bool(jnp.can_cast(other, dtype))


def one_batch(batch: tuple[PyTree, ...], named: Mapping[str, PyTree]) -> PyTree:
    """Returns the one batch that a step was called with.

    Raises:
      TypeError: there is none, or there are several, or it has a name.
    """
    if len(batch) == 1 and not named:
        return batch[0]
    got = f"a step takes a state and one batch; got {len(batch)} arguments behind the state."
    if named:
        names = ", ".join(f"{name}=" for name in named)
        got = f"a step takes a state and one batch, without names; got {names}."
    if list(named) == ["batch"]:
        raise TypeError(message("train step", got, "Type step(state, batch)."))
    fix = "Type step(state, (x, y)), and def loss_fn(params, batch): with x, y = batch in it."
    raise TypeError(message("train step", got, "Allowed: any pytree as the batch.", fix))


def checked_call(call: Any, state: PyTree, batch: PyTree) -> Any:
    """Returns `call(state, batch)`; says what to do about a state that was donated before.

    An error of JAX about a value that is not known while tracing gets the user's line as a note.
    """
    try:
        return call(state, batch)
    except NEEDS_VALUES as error:
        lines = users_line(error)
        got = "the loss needs the value of an array while it is traced."
        fix = "Use jnp.where or jax.lax.cond there, or make it a Python value outside of the step."
        error.add_note(message("train step", got, *lines, fix))
        raise
    except TypeError:
        # JAX would name a method of the step in place of the batch.
        _refuse_other_leaves({"extra state": state.extra_state, "batch": batch})
        raise
    except (RuntimeError, ValueError) as error:
        if "deleted" not in str(error) or not is_donated(state):
            raise
        if jax.config.jax_debug_nans:
            got = "jax.debug_nans found a NaN, and cannot run a step again that donates its state."
            fix = "Without it, type step.diagnose(state, batch, metrics); or set donate=False."
            raise ValueError(message("train step", got, fix)) from None
        refuse_donated(state, "train step")


def _refuse_other_leaves(trees: Mapping[str, PyTree]) -> None:
    """Raises TypeError for the first leaf that no jitted function takes, such as a string."""
    for name, tree in trees.items():
        for path, x in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
            if not _is_numeric(x):
                leaf = f"{name} leaf {path!r}" if path else f"the {name}"
                got = f"{leaf} is {described(x)}, which is no array of numbers."
                fix = f"Drop it from the {name}; a loss that needs it may close over it."
                raise TypeError(message("train step", got, fix)) from None


def _is_numeric(x: Any) -> bool:
    if isinstance(x, (bool, int, float, complex)) or hasattr(x, "__jax_array__"):
        return True
    is_typed = hasattr(x, "dtype") and hasattr(x, "shape")
    return is_typed and getattr(x.dtype, "kind", "f") not in "OSUMm"  # a key's dtype has no kind


def fields_of(state: Any) -> dict[str, Any]:
    """Returns the fields of a state that is to be adopted, by name.

    Raises:
      TypeError: it has no `params`, `opt_state` and `step`.
      ValueError: it has been donated to a step.
    """
    names = ("step", "params", "opt_state", "extra_state", "amax_history")
    fields = {}
    for name in names:
        if isinstance(state, Mapping) and name in state:
            fields[name] = state[name]
        elif hasattr(state, name):
            fields[name] = getattr(state, name)
    missing = [name for name in names[:3] if name not in fields]
    if not missing:
        refuse_donated(fields, "step.adopt")
        return fields
    got = f"got {described(state)}, which has no {', '.join(missing)}."
    allowed = "Allowed: a TrainState of mpjax or Flax, or a restored mapping with these names."
    fix = "Type step.adopt({'step': 0, 'params': params, 'opt_state': opt_state})."
    raise TypeError(message("step.adopt", got, allowed, fix))


def pair(out: Any, wanted: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    got = f"the loss function must return {wanted}; got {describe(out)}."
    fix = "Return that tuple, or change has_aux= or what step.init was given."
    raise TypeError(message("make_train_step", got, fix))


def split_outputs(
    out: Any, extra_state: PyTree, *, has_aux: bool, weighted: bool
) -> tuple[Any, tuple[Any, PyTree, Any]]:
    """Returns the results of a loss function as `loss, (weight, extra_state, aux)`.

    Args:
      out: its results.
      extra_state: the state that it was given; None for none.
      has_aux, weighted: as in `make_train_step`.
    """
    loss = "(loss, weight)" if weighted else "loss"
    weight = aux = None
    if extra_state is not None and has_aux:
        out, rest = pair(out, f"({loss}, (new_extra_state, aux))")
        extra_state, aux = pair(rest, f"({loss}, (new_extra_state, aux))")
    elif extra_state is not None:
        out, extra_state = pair(out, f"({loss}, new_extra_state)")
    elif has_aux:
        out, aux = pair(out, f"({loss}, aux)")
    if weighted:
        out, weight = pair(out, "(loss, weight), as weighted=True says")
        _refuse_weight_first(out, weight)
        weight = _checked_weight(weight).astype(FLOAT32)
    return out, (weight, extra_state, aux)


def _refuse_weight_first(loss: Any, weight: Any) -> None:
    """Raises TypeError where a count stands in the place of the loss, and a loss in that of it."""
    if _is_number(loss) and not is_inexact(loss) and _is_number(weight) and is_inexact(weight):
        got = f"got {describe(loss)} as the loss, and {describe(weight)} as its weight."
        allowed = "Allowed: the mean loss first, then the weight, such as the number of examples."
        fix = "Swap them: return loss, weight."
        raise TypeError(message("make_train_step(weighted=True)", got, allowed, fix))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (is_array(x) and not x.shape)


def _checked_weight(weight: Any) -> Any:
    """Returns the weight of a batch as an array; raises TypeError unless it is one number."""
    if is_array(weight) or isinstance(weight, (int, float)):
        weight = jnp.asarray(weight)
        if not weight.shape and not jnp.issubdtype(weight.dtype, jnp.complexfloating):
            return weight
    got = f"the weight must be one number; got {describe(weight)}."
    fix = "Type return loss, mask.sum() where the loss is a mean over the examples of a mask."
    raise TypeError(message("make_train_step(weighted=True)", got, fix))
