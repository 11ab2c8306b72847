"""Writes `old_pickles.xz`: what users of a version may have pickled. Run it with that version.

    python tests/base/make_old_pickles.py

It was run on the last commit whose private modules stood at the package's root.
"""

import lzma
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("bf16-mixed", "16-mixed", "O2", "int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16")
FILE = Path(__file__).with_name("old_pickles.xz")
PARAMS = {name: {"w": jnp.eye(64) / 8, "b": jnp.zeros(64)} for name in ("dense", "head")}
BATCH = jnp.linspace(-1, 1, 4 * 64).reshape(4, 64)


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["dense"]["w"] + params["dense"]["b"])
    return jnp.mean((hidden @ params["head"]["w"] + params["head"]["b"]) ** 2)


def optimizers() -> dict[str, optax.GradientTransformation]:
    """Returns one optimizer for each kind of state."""
    adam = optax.adam(1e-3)
    return {
        "adam": adam,
        "kahan": mpjax.optim.with_kahan(adam),
        "master": mpjax.optim.with_master_weights(adam),
        "stochastic": mpjax.optim.with_stochastic_rounding(adam, seed=0),
        "quantized": mpjax.optim.with_quantized_state(adam, block_size=64),
        "dtypes": mpjax.optim.with_state_dtypes(adam, mu_dtype="bfloat16"),
    }


def values() -> dict[str, Any]:
    """Returns objects without arrays, which a pickle restores equal."""
    rules = {"head": "float32", "re:.*norm": "float32"}
    return {
        **{f"policy {name}": mpjax.get_policy(name) for name in NAMES},
        "map": mpjax.PolicyMap("bf16-mixed", rules),
        "int8": mpjax.Int8CurrentScaling(),
        "float8": mpjax.Float8CurrentScaling(),
        "delayed": mpjax.DelayedScaling(),
        "mxfp8": mpjax.MXFP8BlockScaling(),
        "blocks": mpjax.Float8BlockScaling(),
    }


def states() -> dict[str, Any]:
    """Returns what a step or an optimizer would go on from, its arrays NumPy's."""
    stepped = ("16-mixed", "float8_from_mixed_bfloat16")
    steps = {name: mpjax.make_train_step(loss, optax.adam(1e-3), name) for name in stepped}
    made = {
        "dynamic": mpjax.DynamicLossScale(2.0**9, growth_interval=3),
        "static": mpjax.StaticLossScale(128.0),
        "none": mpjax.NoOpLossScale(),
        "8 bits": mpjax.quantize(PARAMS, "int8_from_mixed_bfloat16"),
        **{f"step {name}": step(step.init(PARAMS), BATCH)[0] for name, step in steps.items()},
        **{f"optimizer {name}": tx.init(PARAMS) for name, tx in optimizers().items()},
        "wrapped": mpjax.with_loss_scale(optax.adam(1e-3)).init(PARAMS),
    }
    return jax.tree.map(np.asarray, made)


if __name__ == "__main__":
    FILE.write_bytes(lzma.compress(pickle.dumps({**values(), **states()}, protocol=4)))
