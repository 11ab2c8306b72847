"""Gradient accumulation in float16, three ways: `python examples/gradient_accumulation.py`.

A batch of 256 that does not fit in memory is taken as 8 micro-batches of 32:

  accumulate=8                     make_train_step splits the batch and scans over the parts; one
                                   update, one decision whether to skip, memory of one part
  optax.MultiSteps inside          with_loss_scale(optax.MultiSteps(tx, 8)): a step for each
                                   micro-batch; each is judged by itself, so that an overflow
                                   in one leaves only that one out
  one batch                        what the others are measured against

MultiSteps goes *inside* with_loss_scale. Around it, its running mean would turn the inf of one
micro-batch into NaN (0 times inf), and keep it.

What one sees: where nothing overflows the three agree to the rounding of float32 ("difference": to
the weights of one batch). In the last rows a micro-batch holds an inf: accumulate= leaves out the
whole batch, MultiSteps that part.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits

import mpjax

PARTS = 8
BATCH = 256


def loss_fn(params: Any, batch: Any) -> jax.Array:
    images, labels = batch
    hidden = jax.nn.relu(images @ params["in"])
    logits = hidden @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def init() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(first, (64, 512)) / 8,
        "out": jax.random.normal(second, (512, 10)) / 22,
    }


def batches(steps: int, bad: int | None) -> list[Any]:
    """Returns batches of digits; in one of them a single image holds an inf."""
    data, rng = load_digits(), np.random.default_rng(0)
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    chosen = [rng.integers(len(labels), size=BATCH) for _ in range(steps)]
    found = [(images[c], labels[c]) for c in chosen]
    if bad is not None:
        found[bad][0][40, 0] = np.inf  # in the second micro-batch
    return found


@functools.cache
def compiled(accumulate: int, every: int) -> tuple[Any, Any]:
    """Returns a train step, and the same compiled for its part of a batch."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    if every > 1:
        tx = optax.MultiSteps(tx, every_k_schedule=every).gradient_transformation()
    step = mpjax.make_train_step(loss_fn, tx, "16-mixed", accumulate=accumulate)
    part = jax.tree.map(lambda x: x[: BATCH // every], batches(1, None)[0])
    return step, step.lower(step.init(init()), part).compile()


def train(data: list[Any], accumulate: int, every: int) -> tuple[Any, int, float]:
    """Returns parameters, skipped steps and megabytes of temporaries of the compiled step."""
    step, run = compiled(accumulate, every)
    state, metrics = step.init(init()), {}
    for images, labels in data:
        for part in zip(np.split(images, every), np.split(labels, every), strict=True):
            state, metrics = run(state, part)
    size = run.memory_analysis().temp_size_in_bytes / 1e6
    return state.params, int(metrics["skipped_steps"]), size


# How often each splits a batch inside the step, and outside.
WAYS = {
    "one batch": (1, 1),
    f"accumulate={PARTS}": (PARTS, 1),
    "MultiSteps inside": (1, PARTS),
}


def compare(steps: int) -> Table:
    table = Table(title=f"{steps} batches of {BATCH}, in parts of {BATCH // PARTS}")
    table.box = box.SIMPLE_HEAD
    heads = ("", "loss after", "difference", "skipped", "temp. MB", "seconds")
    for head in heads:
        table.add_column(head, justify="left" if not head else "right")
    for title, bad in (("", None), (", one inf", steps // 2)):
        data, reference = batches(steps, bad), None
        for name, way in WAYS.items():
            started = time.perf_counter()
            params, skipped, size = train(data, *way)
            seconds = time.perf_counter() - started
            reference = reference or params
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(reference), strict=True)
            difference = max(float(jnp.abs(a - b).max()) for a, b in pairs)
            loss = float(loss_fn(params, batches(1, None)[0]))
            cells = f"{loss:.4f}", f"{difference:.1e}", f"{skipped}", f"{size:.2f}"
            table.add_row(name + title, *cells, f"{seconds:.1f}")
        table.add_section()
    return table


def positive(text: str) -> int:
    if text.isdecimal() and 2 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 2 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=30, help="of a run (default: 30)")
    print(compare(parser.parse_args().steps))


if __name__ == "__main__":
    main()
