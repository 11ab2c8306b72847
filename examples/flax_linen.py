"""Flax linen with a TrainState and BatchNorm, in float16: `python examples/flax_linen.py`.

The model and the train state are written as in Flax's own guides. What is added:

  model = mpjax.linen.with_policy(model, policies)            dtypes by module path, model unedited
  tx = mpjax.with_loss_scale(tx, mpjax.DynamicLossScale())    unscales, skips what overflowed
  mpjax.value_and_grad(..., loss_scale=)       scales the loss
  mpjax.linen.apply_gradients(state, grads=, batch_stats=)    a skipped step changes nothing

The last line matters with BatchNorm. An overflow shows in its statistics in the forward pass, long
before the optimizer sees a gradient; a step that is skipped by the optimizer alone would leave NaN
there for ever. One batch of this run holds an inf on purpose: the second table shows both ways.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax
import mpjax.linen

BATCH = 128
POLICIES = mpjax.PolicyMap("16-mixed", {"head": "float32"})


class CNN(nn.Module):
    """Two convolutions with BatchNorm and a linear layer; no dtype anywhere."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Returns logits of images f32[n, 8, 8, 1]."""
        for index, features in enumerate((16, 32)):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False, name=f"conv_{index}")(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm_{index}")
            x = nn.relu(norm(x))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


class TrainState(train_state.TrainState):
    """Flax's own, with a field for the statistics."""

    batch_stats: Any


def load() -> tuple[np.ndarray, ...]:
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[..., None]
    labels = data.target.astype(np.int32)
    return tuple(train_test_split(images, labels, test_size=360, stratify=labels, random_state=0))


def create(model: nn.Module, images: np.ndarray) -> TrainState:
    variables = jax.jit(lambda key, x: model.init(key, x, train=True))(jax.random.key(0), images)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    loss_scale = mpjax.DynamicLossScale(2.0**20, growth_interval=100)  # too large on purpose
    tx = mpjax.with_loss_scale(tx, loss_scale, max_consecutive_skips=20)
    return TrainState.create(apply_fn=model.apply, tx=tx, **variables)


def make_step(*, guarded: bool) -> Any:
    @jax.jit
    def step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new["batch_stats"]

        scale = mpjax.current_loss_scale(state.opt_state)
        differentiate = mpjax.value_and_grad(loss_fn, has_aux=True, loss_scale=scale)
        (loss, stats), grads = differentiate(state.params)
        if guarded:
            return mpjax.linen.apply_gradients(state, grads=grads, batch_stats=stats), loss
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    return step


def train(state: TrainState, step: Any, steps: int, data: tuple[np.ndarray, ...]) -> list[str]:
    """Returns the row of one run, in the middle of which a batch holds an inf."""
    images, test_images, labels, test_labels = data
    rng, loss = np.random.default_rng(0), jnp.nan
    for index in range(steps):
        chosen = rng.integers(len(labels), size=BATCH)
        batch = images[chosen]
        if index == steps // 2:
            batch[0, 0, 0] = np.inf
        state, loss = step(state, batch, labels[chosen])
    mpjax.raise_if_diverged(state.opt_state, state.params)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    predictions = jax.jit(lambda v, x: state.apply_fn(v, x, train=False))(variables, test_images)
    accuracy = np.mean(predictions.argmax(-1) == test_labels)
    scaling = state.opt_state
    finite = bool(mpjax.all_finite(state.batch_stats))
    return [
        f"{float(loss):.4f}",
        f"{accuracy:.1%}",
        f"{int(state.step)} + {int(scaling.skipped_steps)}",
        f"2^{np.log2(scaling.loss_scale):.0f}",
        "finite" if finite else "[red]NaN",
    ]


def positive(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 1 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=200, help="of a run (default: 200)")
    steps = parser.parse_args().steps
    data = load()
    model = mpjax.linen.with_policy(CNN(), POLICIES)
    print(mpjax.linen.tabulate(model, data[0][:BATCH], train=True))
    state = create(model, data[0][:BATCH])
    table = Table(
        title="One batch of the run holds an inf", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    heads = ("apply_gradients", "loss", "accuracy", "steps + skipped", "loss scale", "statistics")
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    runs = {"mpjax.linen's": True, "the state's": False}
    for name, guarded in runs.items():
        table.add_row(name, *train(state, make_step(guarded=guarded), steps, data))
    print(table)


if __name__ == "__main__":
    main()
