"""Trains three networks in float32, bfloat16 and float16, five seeds each, and compares the ends.

    python benchmarks/convergence.py                    # all: a quarter of an hour on 2 cores
    python benchmarks/convergence.py --tasks lm --precisions bf16-mixed --seeds 2

A seed gives the same weights and the same batches in every precision, so that runs can be compared
in pairs too. What counts is whether a precision ends where float32 ends, by the yardstick of how
far float32's own seeds lie apart. A later run renews its rows of `results/convergence.md` and
keeps the rest.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import machine
from measure.options import words
from measure.store import Row, Store
from measure.tables import Grid
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import mpjax

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import digits  # noqa: E402, the example's network and data are the ones to measure
import lm  # noqa: E402

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
LAST = 0.1  # of a run: its final training loss is the mean over these steps


class MLP(nn.Module):
    """Two hidden layers over the pixels of a digit; no dtype anywhere."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits f32[n, 10] of images f32[n, 8, 8, 1]."""
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    logits = MLP().apply({"params": params}, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@dataclasses.dataclass(frozen=True)
class Task:
    """A network with its data and optimizer, all in float32.

    `init(seed)` gives the arguments of `step.init`, `batches(seed)` an endless stream, and
    `score(state)` what is measured at the end, in float32 whatever was trained in.
    """

    about: str
    scored: str  # the name of what `score` measures
    loss_fn: Callable[..., Any]
    optimizer: Callable[[int], optax.GradientTransformation]  # steps -> optimizer
    init: Callable[[int], tuple[Any, ...]]
    batches: Callable[[int], Iterator[Any]]
    score: Callable[[Any], float]


def mlp_task() -> Task:
    train_set, test_set = digits.load()

    def accuracy(state: Any) -> float:
        labels = MLP().apply({"params": state.params}, test_set["image"]).argmax(-1)
        return 100 * float((labels == test_set["label"]).mean())

    return Task(
        "Dense 64-128-128-10 with relu on 1797 digits, momentum SGD, batches of 128",
        "test accuracy, %",
        mlp_loss,
        lambda steps: optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9),
        lambda seed: (MLP().init(jax.random.key(seed), train_set["image"][:1])["params"],),
        functools.partial(digits.batches, train_set),
        accuracy,
    )


def cnn_task() -> Task:
    train_set, test_set = digits.load()

    def init(seed: int) -> tuple[Any, ...]:
        key, image = jax.random.key(seed), train_set["image"][:1]
        variables = digits.CNN().init(key, image, train=False)
        return variables["params"], variables["batch_stats"]

    def accuracy(state: Any) -> float:
        variables = {"params": state.params, "batch_stats": state.extra_state}
        labels = digits.predict(variables, test_set["image"])
        return 100 * float((labels == test_set["label"]).mean())

    return Task(
        "examples/digits.py: two convolutions with BatchNorm, Adam, batches of 128",
        "test accuracy, %",
        digits.loss_fn,
        lambda steps: optax.adam(optax.cosine_decay_schedule(digits.LEARNING_RATE, steps)),
        init,
        functools.partial(digits.batches, train_set),
        accuracy,
    )


def lm_task(lm: Any = lm) -> Task:
    corpus, held_out = lm.load()

    def init(seed: int) -> tuple[Any, ...]:
        tokens = jnp.zeros((1, lm.TIME), jnp.int32)
        return (lm.Transformer().init(jax.random.key(seed), tokens)["params"],)

    return Task(
        f"examples/lm.py: {lm.LAYERS} scanned, rematerialised blocks, AdamW behind clipping, "
        f"batches of {lm.BATCH} windows of {lm.TIME} bytes",
        "held-out loss, nats a byte",
        lm.loss_fn,
        lm.optimizer,
        init,
        functools.partial(lm.batches, corpus),
        lambda state: lm.evaluate(state.params, held_out),
    )


TASKS = {"mlp": (mlp_task, 300), "digits": (cnn_task, 300), "lm": (lm_task, 600)}


def run(task: Task, precision: str, steps: int, seeds: int, advance: Callable[..., None]) -> Any:
    """Yields for each seed what the run ended with; all seeds share one compiled step."""
    step = mpjax.make_train_step(task.loss_fn, task.optimizer(steps), precision)
    for seed in range(seeds):
        state = step.init(*task.init(seed))
        losses: list[jax.Array] = []
        for i, batch in enumerate(itertools.islice(task.batches(seed), steps)):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
            if i % 10 == 9:  # looking at a loss waits for the device
                advance(advance=10, loss=float(losses[-1]))
        last = np.array(losses[-max(1, int(LAST * steps)) :])
        yield {
            "loss": float(last.mean()),
            "score": task.score(state),
            "skipped": int(metrics["skipped_steps"]),
        }


# -- tables --------------------------------------------------------------------------------------


def spread(values: list[float], digits_shown: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits_shown}f} ± {deviation:.{digits_shown}f}"


def compared(found: list[Row], base: list[Row], name: str) -> tuple[float, bool]:
    """Returns how far the mean lies from float32's, in standard deviations of its seeds.

    And whether that is at most one, and the mean between float32's best and worst seed.
    """
    mine, theirs = ([row[name] for row in rows] for rows in (found, base))
    mean = statistics.mean(mine)
    distance = (mean - statistics.mean(theirs)) / statistics.stdev(theirs)
    return distance, min(theirs) <= mean <= max(theirs) and abs(distance) <= 1


def line(precision: str, found: list[Row], base: list[Row], places: int) -> tuple[str, ...]:
    """Returns one precision's cells."""
    ends = [
        spread([row["loss"] for row in found], 4),
        spread([row["score"] for row in found], places),
    ]
    skipped = str(sum(row["skipped"] for row in found))
    if found is base or len(base) < 2:
        return precision, str(len(found)), ends[0], "", ends[1], "", "", skipped
    (loss, loss_within), (score, score_within) = (
        compared(found, base, name) for name in ("loss", "score")
    )
    verdict = "yes" if loss_within and score_within else "NO"
    return (
        precision,
        str(len(found)),
        ends[0],
        f"{loss:+.2f} sd",
        ends[1],
        f"{score:+.2f} sd",
        verdict,
        skipped,
    )


def grid(store: Store, name: str) -> Grid:
    """Returns one task's table."""
    make, _ = TASKS[name]
    task = make()
    runs = [row for row in store.part("run") if row["network"] == name]
    by = {p: [r for r in runs if r["dtype"] == p] for p in PRECISIONS}
    places = 2 if "%" in task.scored else 4
    base = by[PRECISIONS[0]]
    lines = [line(p, found, base, places) for p, found in by.items() if found]
    steps = ", ".join(sorted({row["size"] for row in runs}, key=int))
    columns = (
        "precision",
        "seeds",
        "training loss",
        "off",
        task.scored,
        "off",
        "within",
        "skipped",
    )
    return Grid(f"{name}, {steps} steps", f"{task.about}.", columns, lines)


ABOUT = f"""\
Mean ± standard deviation over seeds; the training loss of a run is the mean over its last
{LAST:.0%} of steps. off: how far the mean lies from float32's, in standard deviations (sd)
of float32's own seeds. within: both at most one sd off, and between float32's best and worst seed.
skipped: steps that dynamic loss scaling skipped, over all seeds. What is measured at the end is
computed in float32, whatever was trained in.
"""


def write(path: pathlib.Path, store: Store, console: Console) -> None:
    """Writes the Markdown, and prints its tables."""
    done = [name for name in TASKS if any(r["network"] == name for r in store.part("run"))]
    grids = [grid(store, name) for name in done]
    runs = [f"{i}. `{r['command']}`\n   {r['about']}" for i, r in store.used_runs()]
    head = "# Where training ends in each precision\n\nMade by:\n\n" + "\n".join(runs)
    body = "\n".join(g.markdown() for g in grids)
    path.write_text(f"{head}\n\n{ABOUT}\n{body}")
    for each in grids:
        each.show(console)


def arguments(description: str, tasks: Any, kind: str, kinds: Any, out: str) -> argparse.Namespace:
    """Returns what to train: tasks, how many seeds and steps, and in which of some `kinds`."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--tasks", type=words(tasks), default=list(tasks), help=", ".join(tasks))
    add(f"--{kind}s", type=words(kinds), default=list(kinds))
    add("--seeds", type=int, default=5, help=f"of each {kind}, counted from 0")
    add("--steps", type=int, help="of a run (default: the task's own)")
    add("--out", type=pathlib.Path, default=HERE / "results" / out)
    return parser.parse_args()


def main() -> None:
    options = arguments(__doc__.splitlines()[0], TASKS, "precision", PRECISIONS, "convergence.md")
    console = Console()
    store = Store.read(options.out.with_suffix(".json"))
    command = " ".join(["python", "benchmarks/convergence.py", *sys.argv[1:]])
    store.begin(command=command, about=f"{machine.made()}; on {machine.cpu()}.")
    backend = jax.default_backend()
    ends = TextColumn("{task.description:<18}"), TextColumn("loss {task.fields[loss]:.3f}")
    columns = ends[0], *Progress.get_default_columns()[1:2], MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), ends[1], console=console) as progress:
        for name, precision in itertools.product(options.tasks, options.precisions):
            make, steps = TASKS[name]
            steps = options.steps or steps
            total = steps * options.seeds
            bar = progress.add_task(f"{name}, {precision}", total=total, loss=np.nan)
            advance = functools.partial(progress.update, bar)
            for seed, found in enumerate(run(make(), precision, steps, options.seeds, advance)):
                store.put("run", backend, precision, str(steps), name, str(seed), **found)
    write(options.out, store, console)


if __name__ == "__main__":
    main()
