"""`make_train_step(watch=)`: statistics of values against their dtype, every so many steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._base import compat
from mpjax._base.errors import message
from mpjax._base.own_primitives import WATCHED
from mpjax._base.tree import is_array, is_overwritten, path_str
from mpjax._base.typing import Array, AxisName, PyTree
from mpjax.numerics._activations import ACTIVATION, GRADIENT, Activations
from mpjax.numerics._statistics import STATISTICS, named, read
from mpjax.numerics._watched import Watched


def check_watch(watch: Any, where: str) -> None:
    """Checks every how many steps to look, None for never.

    Raises:
      ValueError: `watch` is no whole number of at least 1.
    """
    if watch is None or (isinstance(watch, int) and not isinstance(watch, bool) and watch >= 1):
        return
    got = f"must be a whole number of steps, at least 1; got {watch!r}."
    raise ValueError(message(where, got, "Type watch=100, or leave it out."))


class Seen(NamedTuple):
    """The values of a step that its statistics are computed from."""

    state: Any  # a `TrainState`
    loss_scale: Any  # a `LossScale`, what gradients are scaled with
    twin: Callable[..., Any]  # of `arguments`: the loss and its gradients, as the step has them
    arguments: tuple[Any, ...]


def watched(every: int | None, seen: Seen, policy: Any, axis_name: AxisName) -> tuple[Any, Any]:
    """Returns the state for the update to read, and {"watched": statistics by kind and module}.

    Args:
      every: the steps from one computation to the next; between, they are NaN. None for never.
      seen: the step's values.
      policy: values are held against its `compute_dtype`: weights and activations as they are,
        gradients scaled.
      axis_name: the step's.

    Returns:
      `Watched`: `is_new`, and a dict from module to `STATISTICS` for `weight`, `wgrad` (its
      gradient, both by the path of a leaf without its own name), `activation` and `gradient` (of
      activations, both of what leaves a module and of products): `amax` the largest finite
      magnitude, `l2_norm` and `dynamic_range` (in bits), of unscaled values; `underflows%` and
      `overflows%` are the shares of what is not zero that the dtype would round to 0, or to inf.
    """
    if every is None:
        return seen.state, {}
    params = seen.state.params
    dtypes = jax.eval_shape(_to_compute(policy), params)
    scale = jnp.asarray(seen.loss_scale.loss_scale, jnp.float32)
    weights = _by_module(params, params, dtypes)
    inside = Activations(seen.twin, seen.arguments, policy, axis_name)

    def measure() -> Any:
        # The step's own gradients are the same, and XLA would bring them into another layout for
        # this branch in every step.
        read_inside, grads = inside.measure()
        gradients = _by_module(params, grads, dtypes)
        statistics: dict[str, dict[str, Any]] = {
            "weight": {m: named([read(*x) for x in group]) for m, group in weights.items()},
            "wgrad": {m: named([read(*x) for x in group], scale) for m, group in gradients.items()},
            ACTIVATION: {},
            GRADIENT: {},
        }
        for (kind, module), one in read_inside.items():
            statistics[kind][module] = named([one], scale if kind == GRADIENT else None)
        return statistics

    shapes = jax.eval_shape(measure)
    rows = tuple((kind, tuple(by_module)) for kind, by_module in shapes.items())

    def together() -> Array:
        with jax.named_scope(WATCHED):
            statistics = measure()
        modules = [statistics[kind][module] for kind, names in rows for module in names]
        numbers = [each[name] for each in modules for name in STATISTICS]
        return jnp.reshape(jnp.stack(numbers), (-1, len(STATISTICS)))

    unknown = functools.partial(_unknown, jax.tree.leaves(shapes))
    is_new = seen.state.step % every == 0
    seen_in_step = Watched(is_new, lax.cond(is_new, together, unknown), rows)
    return _behind(seen.state, {"watched": seen_in_step})


def _behind(state: Any, outputs: PyTree) -> tuple[Any, PyTree]:
    """Returns both, so that an update of that state comes after the branch that reads it.

    XLA copies, in every step, an array that an update could overwrite before the branch has read
    it. (With JAX 0.10 it does so for a CPU all the same.)
    """
    kept = {name: getattr(state, name) for name in ("params", "extra_state", "amax_history")}
    kept, outputs = lax.optimization_barrier((kept, outputs))
    return state._replace(**kept), outputs


def _to_compute(policy: Any) -> Any:
    is_map = hasattr(policy, "rules")
    return lambda tree: policy.cast_to_compute(tree, **({"warn": False} if is_map else {}))


def _by_module(params: PyTree, values: PyTree, dtypes: PyTree) -> Mapping[str, list[Any]]:
    """Returns module → (value, dtype) of its floating leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = zip(leaves, jax.tree.leaves(values), jax.tree.leaves(dtypes), strict=True)
    by_module: dict[str, list[Any]] = {}
    for (path, leaf), value, typed in rows:
        if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if leaf.size and not is_overwritten(path):
            name = path_str(path).removesuffix("/value")
            module = name.rpartition("/")[0] or name or "params"
            by_module.setdefault(module, []).append((value, jnp.dtype(typed.dtype)))
    return by_module


def _unknown(numbers: list[Any]) -> Array:
    """Returns NaN for all numbers, typed as varying over shards as they are together."""
    nan = jnp.full((len(numbers) // len(STATISTICS), len(STATISTICS)), jnp.nan, jnp.float32)
    axes = tuple(frozenset[object]().union(*map(compat.axes_of_type, numbers)))
    return compat.to_varying(nan, axes) if axes else nan
