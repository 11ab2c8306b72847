"""Checks parameters at the call; errors say what to type instead."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mpjax._autocast.arguments.stateful import modules
from mpjax._base.described import check_is_array, described, library_kind
from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.quantized_array import holds_quantized
from mpjax._base.tree import is_array, is_deleted, is_overwritten, leaf_paths, path_str
from mpjax._base.typing import PyTree

_INSTEAD = {
    "an nnx.Optimizer": "Type mpjax.nnx.make_train_step(model, tx, policy, loss_fn).",
    "an nnx.Module": "Type mpjax.nnx.make_train_step(model, tx, policy, loss_fn), "
    "which keeps statistics and RNGs too.",
    "a linen module that is not initialised": "Type step.init(model.init(key, x)['params']).",
    "a Flax TrainState": "Type step.init(state.params); to go on from it, step.adopt(state).",
    "a whole state": "Type step.init(state.params), or step.adopt(state) for a state of another.",
}


def check_params(params: PyTree, where: str) -> None:
    """Raises for parameters that cannot be trained: a module, a state, an empty tree, integers.

    Raises:
      TypeError: `params` is no pytree of floating arrays; the message names what it is.
      ValueError: there is none, or one has been deleted.
    """
    kind = library_kind(params)
    if kind in _INSTEAD:
        allowed = "Allowed: the parameters alone, a pytree of floating arrays."
        raise TypeError(message(where, f"got {kind}.", allowed, _INSTEAD[kind]))
    if isinstance(params, dict) and {"params", "batch_stats"} <= set(params):
        got = "got Flax's variables, whose batch statistics would be trained."
        fix = "Type step.init(variables['params'], {'batch_stats': variables['batch_stats']})."
        raise ValueError(message(where, got, "What is not trained is extra state.", fix))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        got = f"there are no parameters; got {params!r}."
        fix = "Type, e.g., step.init(model.init(key, x)['params'])."
        of_nnx = "A step of an NNX model takes them from it: mpjax.nnx.make_train_step(model, tx, "
        of_nnx += "policy, loss_fn), then step.init()."
        raise ValueError(message(where, got, fix, *[of_nnx] * (params is None)))
    if holds_quantized(params):
        fix = "Type step.init(mpjax.dequantize(params)), and mpjax.quantize what was trained."
        raise TypeError(message(where, "got weights in 8 bits, which cannot be trained.", fix))
    if _is_key(params):
        got = "it takes parameters, and got a PRNG key."
        fix = "Type step.init(model.init(key, x)['params']): the model makes them from the key."
        raise TypeError(message(where, got, "Allowed: floating arrays.", fix))
    instead = "Put it into the extra state, step.init(params, extra_state), or into the batch."
    for path, leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(_shape_text(path_str(path), leaf, where))
        if not is_overwritten(path):
            _check_leaf(f"parameter {path_str(path)!r}", leaf, where, instead)


def _shape_text(path: str, leaf: Any, where: str) -> str:
    given = "state" if where.endswith("adopt") else "params"
    got = f"parameter {path!r} is the shape {describe(leaf)}, and no array."
    fix = f"Type jax.eval_shape({where}, {given}), for a state of shapes alone; of an NNX model "
    fix += "jax.eval_shape(lambda: step.init(make_model()))."
    return message(where, got, "Allowed: floating arrays.", fix)


def refuse_undifferentiable(args: Iterable[PyTree], where: str, *, allow_int: bool) -> None:
    """Raises TypeError for arguments that JAX does not differentiate; the message says which leaf.

    Args:
      args: those that were to be differentiated.
      where: the function's name, for the message.
      allow_int: whether integers have a gradient, an empty one.
    """
    instead = "Give it as another argument, or type allow_int=True, for gradients without values."
    for arg in args:
        if holds_quantized(arg) and not allow_int:
            got = "got weights in 8 bits, which cannot be trained."
            fix = "Differentiate mpjax.dequantize(params), and mpjax.quantize what was trained."
            raise TypeError(message(where, got, fix)) from None
        if any(library_kind(x) == "an nnx.Module" for x in modules(arg)):
            instead = "Type mpjax.nnx.value_and_grad(fun, loss_scale=...), or mpjax.nnx.grad: they "
            instead += "differentiate a module's parameters alone, and keep what else it changes."
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            has_gradient = allow_int and (isinstance(leaf, int) or is_array(leaf))
            is_one = is_deleted(leaf) or hasattr(leaf, "__jax_array__")
            if not (is_one or has_gradient):
                name = f"leaf {path_str(path)!r}" if path else "an argument"
                _check_leaf(name, leaf, where, instead)


def _is_key(x: Any) -> bool:
    """Whether something is a key of `jax.random.key` or `jax.random.PRNGKey`."""
    if not isinstance(x, jax.Array):
        return False
    is_old = x.dtype == jnp.uint32 and x.shape in ((2,), (4,))
    return is_old or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _check_leaf(name: str, leaf: Any, where: str, instead: str) -> None:
    if isinstance(leaf, (float, complex)):
        return
    if is_deleted(leaf):
        got = f"{name} has been deleted: a step that donates its state was given it."
        raise ValueError(message(where, got, "Start from a copy, or set donate=False there."))
    fix = "With Equinox: params, static = eqx.partition(model, eqx.is_inexact_array), and "
    fix += "eqx.combine(params, static) in the loss."
    check_is_array(leaf, name, where, fix)
    if isinstance(leaf, int) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        got = f"{name} is {described(leaf)}, which has no gradient."
        raise TypeError(message(where, got, "Allowed: floating arrays.", instead)) from None


def refuse_not_finite(params: PyTree, where: str) -> None:
    """Raises ValueError for the first parameter that holds inf or NaN: no step would be taken.

    Arrays that are traced, or of shapes alone, are not looked at; of those on several hosts, the
    part that is here.
    """
    with jax.ensure_compile_time_eval():
        flags = [_finite(leaf) for leaf in jax.tree.leaves(params)]
    for path, leaf, finite in zip(leaf_paths(params), jax.tree.leaves(params), flags, strict=True):
        if not all(map(bool, finite)):
            values = np.concatenate([np.ravel(np.asarray(part)) for part in _parts(leaf)])
            counts = f"{np.isinf(values).sum()} inf, {np.isnan(values).sum()} nan"
            got = f"parameter {path!r} is not finite: {describe(leaf)}, {counts}."
            allowed = "Every step would be skipped, or its loss be NaN, whatever the loss scale."
            fix = (
                "Look at its initializer, or at the checkpoint that it is from; what is a constant "
            )
            fix += "goes into the extra state."
            raise ValueError(message(where, got, allowed, fix))


def _finite(leaf: Any) -> list[Any]:
    """Returns whether the parts of a leaf are finite; on accelerators without waiting for them."""
    if isinstance(leaf, jax.core.Tracer) or not is_array(leaf):
        return []
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return []
    return [_part_finite(part) for part in _parts(leaf)]


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return [shard.data for shard in leaf.addressable_shards]
    return [leaf]


def _part_finite(x: Any) -> Any:
    is_here = not isinstance(x, jax.Array) or all(d.platform == "cpu" for d in x.devices())
    return np.isfinite(np.asarray(x)).all() if is_here else jnp.all(jnp.isfinite(x))
