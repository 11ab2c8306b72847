"""Flax NNX with BatchNorm and dropout, in float16: `python examples/flax_nnx.py`.

The model is written as in NNX's own guides, and trained with `nnx.jit` and `nnx.Optimizer`. What
is added:

  mpjax.nnx.set_policy(model, policies)                     dtypes by module path, in place
  tx = mpjax.with_loss_scale(tx, mpjax.DynamicLossScale())  unscales, skips what overflowed
  mpjax.nnx.value_and_grad(..., loss_scale=) scales the loss
  with mpjax.nnx.undo_skipped(optimizer, model):            a skipped step changes nothing

The last line is for what the forward pass has changed by the time the optimizer sees a gradient:
BatchNorm statistics, in which an inf would stay as NaN for ever, and the counts of RNG streams.
One batch of this run holds an inf on purpose. A row of the table is a look at the model's state
before that step and after it: not a bit has changed but the loss scale.
"""

import argparse
import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax
import mpjax.nnx

BATCH = 128
POLICIES = mpjax.PolicyMap("16-mixed", {"norm": "float32", "layers/2": "float32"})


class MLP(nnx.Module):
    """BatchNorm, three linear layers and dropout; no dtype anywhere."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        """Makes the layers."""
        widths = (64, 128, 128, 10)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.layers = nnx.List(nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(widths))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of images f32[n, 64]."""
        x = self.norm(x)
        for layer in self.layers[:-1]:
            x = self.dropout(nnx.relu(layer(x)))
        return self.layers[-1](x)


def loss_fn(model: MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model: MLP, optimizer: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    scale = mpjax.current_loss_scale(optimizer)
    differentiate = mpjax.nnx.value_and_grad(loss_fn, loss_scale=scale)
    with mpjax.nnx.undo_skipped(optimizer, model):
        loss, grads = differentiate(model, images, labels)
        optimizer.update(model, grads)
    return loss


def load() -> tuple[np.ndarray, ...]:
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    return tuple(train_test_split(images, labels, test_size=360, stratify=labels, random_state=0))


def digest(node: Any, *kinds: Any) -> str:
    """Returns a short name for the bits of a node's variables of these kinds."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(node, kinds)):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return found.hexdigest()[:8]


def look(name: str, model: MLP, optimizer: Any, loss: Any) -> list[str]:
    """Returns the row of one step."""
    scale = mpjax.current_loss_scale(optimizer).loss_scale
    return [
        name,
        f"{float(loss):.4f}",
        f"2^{np.log2(scale):.0f}",
        f"{int(optimizer.step.get_value())}",
        digest(model, nnx.Param),
        digest(model, nnx.BatchStat),
        digest(model, nnx.RngState),
    ]


def train(steps: int, data: tuple[np.ndarray, ...]) -> tuple[MLP, Table]:
    """Returns the trained model, and what its state was around the bad batch."""
    images, _, labels, _ = data
    model = MLP(rngs=nnx.Rngs(0, dropout=1))
    mpjax.nnx.set_policy(model, POLICIES)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    tx = mpjax.with_loss_scale(tx, mpjax.DynamicLossScale(2.0**14, growth_interval=100))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    table = Table(title="Bits of the state around a batch with an inf", box=box.SIMPLE_HEAD)
    for head in ("", "loss", "loss scale", "step", "parameters", "BatchNorm", "RNG"):
        table.add_column(head, justify="left" if not head else "right")
    rng, bad = np.random.default_rng(0), steps // 2
    for index in range(steps):
        chosen = rng.integers(len(labels), size=BATCH)
        batch = images[chosen]
        if index == bad:
            batch[0, 0] = np.inf
        loss = train_step(model, optimizer, batch, labels[chosen])
        names = {bad - 1: "before", bad: "skipped", bad + 1: "next", steps - 1: "last"}
        if index in names:
            table.add_row(*look(names[index], model, optimizer, loss))
    mpjax.raise_if_diverged(optimizer.opt_state)
    return model, table


def positive(text: str) -> int:
    if text.isdecimal() and 4 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 4 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=300, help="of the run (default: 300)")
    steps = parser.parse_args().steps
    data = load()
    model, table = train(steps, data)
    print(mpjax.nnx.tabulate(model))
    print(table)
    model.eval()
    predictions = nnx.jit(lambda model, x: model(x).argmax(-1))(model, data[1])
    print(f"{np.mean(predictions == data[3]):.1%} of 360 other digits are told right.")


if __name__ == "__main__":
    main()
