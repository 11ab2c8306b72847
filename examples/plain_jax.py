"""A hand-written train step in three precisions: `python examples/plain_jax.py`.

No model library and no optimizer library: parameters are a dict, the step is a jitted function, the
update is SGD with momentum. What mixed precision adds to it is five lines, each marked below:

  1. parameters and batch are cast where they are used      policy.cast_to_compute
  2. the loss is scaled before it is differentiated         mpjax.value_and_grad(loss_scale=)
  3. a step whose gradients overflowed is left out          mpjax.all_finite, mpjax.select_tree
  4. the loss scale reacts to that, and is handed on        loss_scale.adjust
  5. the state starts with one                              mpjax.get_loss_scale

The shape of the step is the same for all three: float32 and bfloat16 get a loss scale that does
nothing. float16 starts from 2^20 here, too large on purpose, so that skipping can be seen.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax

WIDTHS = (64, 128, 128, 10)
BATCH = 128
LEARNING_RATE = 0.1
MOMENTUM = 0.9

Batch = tuple[jax.Array, jax.Array]


class State(NamedTuple):
    """All that a step changes; any pytree will do."""

    params: Any  # float32
    velocity: Any  # float32
    loss_scale: mpjax.LossScale


def init(key: jax.Array, policy: mpjax.Policy) -> State:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    params = [
        {"w": jax.random.normal(k, (n, m)) * jnp.sqrt(2 / n), "b": jnp.zeros(m)}
        for k, n, m in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]
    loss_scale = mpjax.get_loss_scale(policy)  # 5
    if isinstance(loss_scale, mpjax.DynamicLossScale):
        loss_scale = mpjax.DynamicLossScale(2.0**20, growth_interval=100)
    return State(params, jax.tree.map(jnp.zeros_like, params), loss_scale)


def predict(params: Any, images: jax.Array) -> jax.Array:
    x = images
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def make_step(policy: mpjax.Policy) -> Any:
    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        params, (images, labels) = policy.cast_to_compute((params, batch))  # 1
        logits = policy.cast_to_output(predict(params, images))
        scores = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    @jax.jit
    def step(state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
        differentiate = mpjax.value_and_grad(loss_fn, loss_scale=state.loss_scale)  # 2
        loss, grads = differentiate(state.params, batch)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state.velocity, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state.params, velocity)
        finite = mpjax.all_finite(grads)  # 3
        params, velocity = mpjax.select_tree(
            finite, (params, velocity), (state.params, state.velocity)
        )
        new = State(params, velocity, state.loss_scale.adjust(finite))  # 4
        return new, loss, finite

    return step


def load() -> tuple[np.ndarray, ...]:
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    return tuple(train_test_split(images, labels, test_size=360, stratify=labels, random_state=0))


def train(name: str, steps: int, data: tuple[np.ndarray, ...]) -> list[str]:
    """Returns a row of the table."""
    train_images, test_images, train_labels, test_labels = data
    policy = mpjax.get_policy(name)
    state, step = init(jax.random.key(0), policy), make_step(policy)
    rng = np.random.default_rng(0)
    skipped, losses, started = 0, [], time.perf_counter()
    for _ in range(steps):
        chosen = rng.integers(len(train_labels), size=BATCH)
        state, loss, finite = step(state, (train_images[chosen], train_labels[chosen]))
        skipped += not finite
        losses.append(float(loss))
    seconds = time.perf_counter() - started
    accuracy = np.mean(predict(state.params, test_images).argmax(-1) == test_labels)
    scale = f"2^{np.log2(state.loss_scale.loss_scale):.0f}"
    last = np.mean(losses[-10:])
    return [name, f"{last:.4f}", f"{accuracy:.1%}", scale, f"{skipped}", f"{seconds:.1f}"]


def positive(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 1 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=300, help="of a run (default: 300)")
    steps = parser.parse_args().steps
    table = Table(title=f"{steps} steps by hand on 1437 digits", box=box.SIMPLE_HEAD)
    for head in ("precision", "loss", "accuracy", "loss scale", "skipped", "seconds"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    data = load()
    for name in ("32-true", "bf16-mixed", "16-mixed"):
        table.add_row(*train(name, steps, data))
    print(table)


if __name__ == "__main__":
    main()
