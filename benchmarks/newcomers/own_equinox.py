"""An Equinox model of one's own in float16: `python own_equinox.py FOLDER`."""

from typing import Any

import equinox as eqx
import jax
import optax
from loop import train

import mpjax

mlp = eqx.nn.MLP(64, 10, 128, depth=2, key=jax.random.key(0))
params, static = eqx.partition(mlp, eqx.is_inexact_array)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    images = batch["x"].reshape(len(batch["x"]), -1)
    logits = jax.vmap(eqx.combine(params, static))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


step = mpjax.make_train_step(loss_fn, optax.adamw(3e-3), "16-mixed")
state = train(step, step.init(params))
mlp = eqx.combine(state.params, static)
