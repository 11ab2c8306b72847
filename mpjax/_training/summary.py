"""Sums a train step up: the norm of its gradients, its metrics, its state in a few lines."""

import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._base.by_leaf import Reduction, reduced
from mpjax._base.dtypes import FLOAT32, short_name
from mpjax._base.shown import size
from mpjax._base.tree import is_array, is_deleted, is_overwritten, map_with_path, to_full
from mpjax._base.typing import Array, PyTree
from mpjax._scaling.loss_scale import LossScale, unscale_once_read
from mpjax._scaling.optim_state import find_states
from mpjax._training.adopt import kind_of


def grad_norm(loss_scale: LossScale, grads: PyTree, applied: list[bool]) -> Array:
    """Returns the norm of true gradients, given scaled: f32[], before anything clips them.

    Leaves that are not `applied`, of frozen parameters, do not count.

    Written as `optax.clip_by_global_norm` inside `with_loss_scale` writes its own, so that XLA
    computes both once: on CPUs and TPUs a step that clips pays nothing for the metric.
    """
    plain = map_with_path(lambda _, g: to_full(g) if is_array(g) else g, grads)
    plain = unscale_once_read(loss_scale, plain)
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    flags = zip(leaves, applied, strict=True)
    counted = [(path, g) for (path, g), is_used in flags if is_used and not is_overwritten(path)]
    with jax.numpy_dtype_promotion("standard"):  # float32 and float64 gradients in one tree
        return jnp.asarray(jnp.sqrt(sum(reduced(_SQUARES, counted))), FLOAT32)


def _sum_of_squares(x: Array) -> Array:
    return optax.tree.norm(x, squared=True)


_SQUARES = Reduction(_sum_of_squares, jnp.square, jnp.add, start=0.0)


def describe_state(state: Any) -> str:
    """Returns a train state in lines: steps, and how large its parts are in which dtypes."""
    if is_deleted(state.step):
        return "TrainState, donated: the step that took it returned the one to go on with"
    lines = [f"TrainState after {_value(state.step)} steps"]
    for name in ("params", "opt_state", "extra_state", "amax_history"):
        text = _sizes(getattr(state, name), counted=name == "params")
        lines += [f"  {name.removesuffix('_history'):12}{text}"] if text else []
    for path, scaling in find_states(state.opt_state):
        kind = kind_of(scaling).removeprefix("a ")
        text = "none" if kind == "no" else f"{_value(scaling.loss_scale)} ({kind})"
        skips = f"{_value(scaling.skipped_steps)} steps skipped"
        row = f"{_value(scaling.consecutive_skips)} in a row"
        place = f" at {path!r}" if path else ""
        lines.append(f"  {'loss scale':12}{text}; {skips}, {row}{place}")
        if _value(scaling.diverged) == "True":
            lines.append("  diverged: mpjax.raise_if_diverged(state)")
    return "\n".join(lines)


def describe_step(loss_fn: Any, policy: Any, options: dict[str, Any]) -> str:
    """Returns a train step in one line: of which loss, under which policy.

    Args:
      loss_fn: the loss function.
      policy: its policy.
      options: by name, those that differ from their defaults.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    chosen = [f"{key}={value!r}" for key, value in options.items()]
    shown = str(policy)
    if getattr(policy, "name", shown) != shown:
        shown = f"{policy.name!r} ({shown})"
    return f"<train step of {', '.join([f'{name} under {shown}', *chosen])}>"


def _sizes(tree: PyTree, *, counted: bool) -> str:
    """Returns the bytes of a tree's arrays by dtype, and how many numbers they are."""
    leaves = [x for x in jax.tree.leaves(tree) if is_array(x) or isinstance(x, _SPECS)]
    by_dtype: dict[str, int] = {}
    for leaf in leaves:
        name = short_name(leaf.dtype)
        by_dtype[name] = by_dtype.get(name, 0) + math.prod(leaf.shape) * leaf.dtype.itemsize
    if not by_dtype:
        return ""
    number = sum(math.prod(leaf.shape) for leaf in leaves)
    text = f"{number:,} numbers in {len(leaves)} arrays, " if counted else ""
    return text + ", ".join(f"{size(count)} {name}" for name, count in sorted(by_dtype.items()))


_SPECS = (jax.ShapeDtypeStruct,)


def _value(x: Any) -> str:
    """Returns a scalar as text; for one without a value the reason."""
    if isinstance(x, jax.core.Tracer):
        return "(traced)"
    if not is_array(x):
        return "?"
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return "(elsewhere)"
    value = np.asarray(x)
    return f"{value.item():g}" if value.ndim == 0 and value.dtype.kind == "f" else str(value)


def counted(scaling: Any) -> dict[str, Any]:
    """Returns the metrics that the state of `with_loss_scale` holds: this step, and skips."""
    names = ("grads_finite", "skipped_steps", "consecutive_skips", "diverged")
    return {name: getattr(scaling, name) for name in names}
