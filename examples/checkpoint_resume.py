"""Killed in the middle, resumed to the same bits: `python examples/checkpoint_resume.py`.

A float16 run saves its whole state with orbax every few steps: parameters, Adam's moments, the loss
scale with its counters, BatchNorm-like statistics, the step. The script

  1. trains without interruption, and remembers every bit of the last state;
  2. starts the same run as another process and kills it (SIGKILL) once it has saved a step in the
     middle: no handler runs, nothing is flushed;
  3. restores the last checkpoint that was completed, and goes on to the end.

Both last states are the same, bit for bit, though between the checkpoint and the end the loss scale
grew, and a batch with an inf was skipped: a run that forgot the scale, or its growth counter, would
have come out elsewhere. The table compares, and shows what such a run gives.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits

import mpjax

SAVE_EVERY = 5


def loss_fn(params: Any, mean: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    images, labels = batch
    mean = 0.9 * mean + 0.1 * images.mean(axis=0)  # statistics, as BatchNorm keeps them
    hidden = jnp.tanh((images - mean) @ params["in"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], labels)
    return losses.mean(), mean


@functools.cache
def make_step() -> mpjax.train.TrainStep:
    loss_scale = mpjax.DynamicLossScale(2.0**10, growth_interval=4)
    return mpjax.make_train_step(loss_fn, optax.adamw(3e-3), "16-mixed", loss_scale=loss_scale)


def start(step: mpjax.train.TrainStep) -> mpjax.TrainState:
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(first, (64, 128)) / 8,
        "out": jax.random.normal(second, (128, 10)) / 11,
    }
    return step.init(params, jnp.zeros(64))


@functools.cache
def load() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return (data.data / 16).astype(np.float32), data.target.astype(np.int32)


def batch(index: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch of a step, which depends on nothing but its number."""
    images, labels = load()
    chosen = np.random.default_rng(index).integers(len(labels), size=128)
    images = images[chosen]
    if index == steps * 4 // 5:
        images[0, 0] = np.inf
    return images, labels[chosen]


def run(
    state: mpjax.TrainState, first: int, steps: int, saved: Callable[[int, Any], None]
) -> mpjax.TrainState:
    step = make_step()
    for index in range(first, steps):
        state, _ = step(state, batch(index, steps))
        if (index + 1) % SAVE_EVERY == 0:
            saved(index + 1, state)
    return state


def work(folder: Path, steps: int) -> None:
    """Trains and saves: what runs in the process that is killed."""
    with ocp.CheckpointManager(folder) as manager:

        def save(index: int, state: mpjax.TrainState) -> None:
            manager.save(index, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            time.sleep(0.1)  # a real step takes a while: time to be killed in

        run(start(make_step()), 0, steps, save)


def killed_run(folder: Path, steps: int) -> int:
    """Starts the run in another process and kills it in the middle; returns its exit status."""
    command = [sys.executable, __file__, "--steps", str(steps), "--work", str(folder)]
    process = subprocess.Popen(command)
    middle = steps // 2 // SAVE_EVERY * SAVE_EVERY
    while process.poll() is None and not (folder / str(middle)).is_dir():
        time.sleep(0.005)
    process.kill()
    return process.wait()


def resumed(folder: Path, steps: int) -> tuple[int, mpjax.TrainState, mpjax.TrainState]:
    """Returns which step was restored, its state, and the state at the end."""
    template = jax.eval_shape(lambda: start(make_step()))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(lambda x: x.update(sharding=sharding), template)
    with ocp.CheckpointManager(folder) as manager:
        last = manager.latest_step()
        state = manager.restore(last, args=ocp.args.StandardRestore(template))
    end = run(jax.tree.map(jnp.copy, state), last, steps, lambda *_: None)
    return last, state, end


def forgetful(state: mpjax.TrainState, first: int, steps: int) -> mpjax.TrainState:
    """Returns the end of a run that restored all but the loss scale."""
    fresh = start(make_step()).opt_state
    forgot = fresh._replace(inner_state=state.opt_state.inner_state)
    return run(state._replace(opt_state=forgot), first, steps, lambda *_: None)


def row(name: str, end: mpjax.TrainState, reference: mpjax.TrainState) -> list[str]:
    pairs = list(zip(jax.tree.leaves(end), jax.tree.leaves(reference), strict=True))
    same = sum(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    color = "green" if same == len(pairs) else "red"
    scale = mpjax.current_loss_scale(end.opt_state)
    return [
        name,
        f"{int(end.step)} + {int(end.opt_state.skipped_steps)}",
        f"2^{np.log2(scale.loss_scale):.0f}",
        f"{int(scale.counter)}",
        f"[{color}]{same} of {len(pairs)}",
    ]


def enough(text: str) -> int:
    if text.isdecimal() and 20 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 20 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=enough, default=60, help="of the run (default: 60)")
    parser.add_argument("--work", type=Path, help="train into this folder, as the killed one does")
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.steps)
        return
    steps = arguments.steps
    reference = run(start(make_step()), 0, steps, lambda *_: None)
    with tempfile.TemporaryDirectory() as name:
        status = killed_run(Path(name), steps)
        last, state, end = resumed(Path(name), steps)
    table = Table(title=f"{steps} steps; exit status {status} of the process killed")
    table.box = box.SIMPLE_HEAD
    for head in ("run", "steps + skipped", "loss scale", "its counter", "equal leaves"):
        table.add_column(head, justify="left" if head == "run" else "right")
    table.add_row(*row("uninterrupted", reference, reference))
    table.add_row(*row(f"resumed at {last}", end, reference))
    table.add_row(*row("scale forgotten", forgetful(state, last, steps), reference))
    print(table)


if __name__ == "__main__":
    main()
