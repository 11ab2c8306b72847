"""`to_scalars`: a step's metrics as numbers with names, for TensorBoard, W&B or a CSV file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import leaf_paths
from mpjax.numerics._watched import IS_NEW, Watched


@names_keywords()
def to_scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns metrics as a flat dict from path to number, on the host.

    It waits for the device, once for all metrics. Text and None are left out. An array of more than
    one element gives its mean, under `path/mean`, and its largest element, under `path/max`.
    Statistics that `make_train_step(watch=)` adds are there in the steps that computed them.

    Args:
      metrics: the metrics of a step; a tree of arrays and numbers.
      prefix: put before each path, as 'train/'.

    Returns:
      Path → float.

    Raises:
      TypeError: `metrics` is no mapping, or traced.

    Dtypes:
      Python floats, of any dtype; booleans are 0.0 and 1.0.

    Transforms:
      None: it reads values.

    Example:
      >>> mpjax.numerics.to_scalars({"loss": jnp.float32(2), "by": {"a": jnp.arange(3)}}, "train/")
      {'train/by/a/max': 2.0, 'train/by/a/mean': 1.0, 'train/loss': 2.0}
    """
    if not isinstance(metrics, Mapping):
        got = f"metrics must be a mapping; got {type(metrics).__name__}."
        raise TypeError(message("numerics.to_scalars", got, "Type to_scalars({'loss': loss})."))
    metrics = _without_old(metrics)
    leaves = jax.tree.leaves(dict(metrics))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        got = "the metrics are traced; numbers are read outside of jax.jit."
        raise TypeError(message("numerics.to_scalars", got, "Call it on what the step returned."))
    scalars: dict[str, float] = {}
    for path, leaf in zip(leaf_paths(dict(metrics)), jax.device_get(leaves), strict=True):
        scalars |= {prefix + name: value for name, value in _numbers(path, leaf)}
    return scalars


def _without_old(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns metrics without the statistics of a step that was not watched: all of it NaN."""
    seen = metrics.get("watched")
    if not isinstance(seen, Watched) or isinstance(seen[IS_NEW], jax.core.Tracer):
        return metrics
    kept = {name: value for name, value in metrics.items() if name != "watched"}
    seen = jax.device_get(seen)
    by_module = {name: value for name, value in seen.items() if name != IS_NEW}
    return kept | ({"watched": by_module} if np.any(seen[IS_NEW]) else {})


def _numbers(path: str, leaf: Any) -> list[tuple[str, float]]:
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUV" and "float" not in array.dtype.name:
        return []
    array = array.astype(np.float64)
    if array.size == 1:
        return [(path, float(array.reshape(())))]
    if not array.size:
        return []
    return [(f"{path}/max", float(array.max())), (f"{path}/mean", float(array.mean()))]
