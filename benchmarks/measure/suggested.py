"""The example's language model, small, and gradients' errors against float64, for `suggest`."""

import importlib
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def language_model() -> tuple[Any, Any, Any]:
    """Returns the loss of `examples/lm.py` at two layers of 32, its parameters, and a batch."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    lm: Any = importlib.import_module("lm")
    lm.WIDTH, lm.HEADS, lm.LAYERS = 32, 2, 2
    params = lm.Transformer().init(jax.random.key(0), jnp.zeros((1, lm.TIME), jnp.int32))["params"]
    return lm.loss_fn, params, np.random.default_rng(0).integers(0, 256, (2, lm.TIME + 1), np.int32)


def exact_gradients(loss_fn: Any, params: Any, batch: Any) -> list[Any]:
    """Returns the gradients' leaves, everything computed in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        return [np.asarray(g) for g in jax.tree.leaves(jax.jit(jax.grad(loss_fn))(wide, batch))]


def worst_error(
    loss_fn: Any, policy: Any, params: Any, batch: Any, exact: Any, without: Any
) -> float:
    """Returns the largest relative error of a gradient leaf, in the L1 norm, as XLA compiles it."""
    low = jax.jit(jax.grad(mpjax.autocast(loss_fn, policy)))(params, batch)
    pairs = zip(jax.tree_util.tree_leaves_with_path(low), exact, strict=True)
    return max(
        float(np.abs(np.asarray(a, np.float64) - b).sum() / np.abs(b).sum())
        for (path, a), b in pairs
        if jax.tree_util.keystr(path, simple=True, separator="/") not in without
    )
