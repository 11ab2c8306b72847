"""An NNX model of one's own in float16: `python own_nnx.py FOLDER`."""

from typing import Any

import jax
import optax
from flax import nnx
from loop import train

import mpjax.nnx


class Net(nnx.Module):
    """A convolution, BatchNorm, Dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits f32[n, 10] of images f32[n, 8, 8, 1]."""
        x = nnx.relu(self.norm(self.conv(x))).reshape(len(x), -1)
        return self.head(self.dropout(x))


def loss_fn(model: Net, batch: Any) -> jax.Array:
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


model = Net(nnx.Rngs(0))
step = mpjax.nnx.make_train_step(model, optax.adamw(3e-3), "16-mixed", loss_fn)
step.update(model, train(step, step.init()))
