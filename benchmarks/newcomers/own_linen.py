"""A linen model of one's own in float16: `python own_linen.py FOLDER`."""

from typing import Any

import flax.linen as nn
import jax
import optax
from loop import batch, train

import mpjax


class Net(nn.Module):
    """A convolution, BatchNorm, Dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits f32[n, 10] of images f32[n, 8, 8, 1]."""
        x = nn.Conv(16, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x)).reshape(len(x), -1)
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


def loss_fn(params: Any, extra: Any, batch: Any) -> Any:
    dropout, key = jax.random.split(extra["key"])
    variables = {"params": params, "batch_stats": extra["batch_stats"]}
    logits, new = Net().apply(
        variables, batch["x"], train=True, rngs={"dropout": dropout}, mutable=["batch_stats"]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"batch_stats": new["batch_stats"], "key": key}


variables = Net().init(jax.random.key(0), batch(0)["x"], train=False)
extra = {"batch_stats": variables["batch_stats"], "key": jax.random.key(1)}
step = mpjax.make_train_step(loss_fn, optax.adamw(3e-3), "16-mixed")
train(step, step.init(variables["params"], extra))
