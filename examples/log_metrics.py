"""Writes a run's metrics to CSV, TensorBoard or Weights & Biases: `python examples/log_metrics.py`.

`mpjax.numerics.to_scalars(metrics)` turns what a step returns into a flat dict of numbers, nested
statistics included, and any logger takes that. Reading metrics waits for the device, so the loop
reads them every tenth step; `watch=10` adds the statistics of weights and gradients there.

CSV needs nothing. `--tensorboard` needs tensorboardX (or PyTorch's copy of it), `--wandb` needs
wandb, which runs offline here and asks for no account.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box, print
from rich.table import Table

import mpjax

EVERY = 10
Log = Callable[[int, dict[str, float]], None]


def to_csv(path: Path) -> Log:
    """Returns a log that writes a row each time; a name that a row lacks is an empty cell."""
    rows: list[dict[str, float]] = []

    def log(step: int, scalars: dict[str, float]) -> None:
        rows.append({"step": step, **scalars})
        names = dict.fromkeys(name for row in rows for name in row)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(names))
            writer.writeheader()
            writer.writerows(rows)

    return log


def to_tensorboard(folder: Path) -> Log:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(folder))

    def log(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def to_wandb(folder: Path) -> Log:
    import wandb

    run = wandb.init(project="mpjax", mode="offline", dir=str(folder))
    return lambda step, scalars: run.log(scalars, step=step)


def loss_fn(params: dict[str, jax.Array], batch: dict[str, np.ndarray]) -> jax.Array:
    with jax.named_scope("hidden"):
        hidden = jax.nn.gelu(batch["x"] @ params["hidden"])
    with jax.named_scope("head"):
        return jnp.mean((hidden @ params["head"] - batch["y"]) ** 2)


def train(steps: int, logs: list[Log]) -> dict[str, float]:
    """Returns the last numbers that were logged."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 16)).astype(np.float32)
    batch = {"x": x, "y": np.sin(x[:, :1])}
    params = {
        "hidden": jnp.asarray(rng.normal(size=(16, 64)), jnp.float32) / 4,
        "head": jnp.zeros((64, 1)),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    step = mpjax.make_train_step(loss_fn, tx, "16-mixed", watch=EVERY)
    state, scalars = step.init(params), {}
    for i in range(steps):
        state, metrics = step(state, batch)
        if i % EVERY == 0:
            scalars = mpjax.numerics.to_scalars(metrics, "train/")
            for log in logs:
                log(i, scalars)
    return scalars


def parse_arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--tensorboard", action="store_true", help="write event files too")
    parser.add_argument("--wandb", action="store_true", help="write an offline run too")
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder of the logs")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs = [to_csv(arguments.out / "metrics.csv")]
    logs += [to_tensorboard(arguments.out / "tensorboard")] if arguments.tensorboard else []
    logs += [to_wandb(arguments.out)] if arguments.wandb else []
    last: dict[str, Any] = train(arguments.steps, logs)
    table = Table("name", "last value", box=box.SIMPLE_HEAD)
    for name, value in last.items():
        if "watched" not in name:
            table.add_row(name, f"{value:.4g}")
    print(table)
    watched = sum("watched" in name for name in last)
    print(f"and {watched} statistics by module. All of it: {arguments.out / 'metrics.csv'}")


if __name__ == "__main__":
    main()
