"""Trains a CNN on 1797 real digits in four precisions: `python examples/digits.py`.

The model is float32 Flax code as a user has it; only the name of the policy changes between runs.

  32-true     everything float32: what the others are measured against.
  bf16-mixed  computes in bfloat16, keeps weights in float32; needs no loss scaling.
  16-mixed    computes in float16, keeps weights in float32, scales the loss dynamically.
  16-true     everything float16, weights and Adam's moments too; no loss scaling.

The two mixed precisions learn what float32 learns. The loss scale starts at 2^24, far too large on
purpose: it is halved at each overflow, and those steps are skipped as if they had never been. With
growth_interval=50 (default 2000) it tries to double often enough to be seen. The last line tells
what 16 bits gain on this machine, by a network of dense layers, or why nothing.

16-true suffers on an ordinary setting: Adam at 3e-3 with cosine decay, which suits float32. The
smallest float16 is 2^-24, so Adam's second moment, at first 0.001 g^2, is 0 for gradients g below
0.005; what is then divided by almost nothing throws weights thousands of times too far. Scaling
would not help, since Adam sees unscaled gradients; 16-mixed keeps all of that in float32. Not
every setting shows it: SGD at 0.1 learns these digits in 16-true too; see `underflow.py`.
"""

import argparse
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import mpjax
from mpjax import current_loss_scale

COLORS = {"32-true": "gray", "bf16-mixed": "#0072b2", "16-mixed": "#009e73", "16-true": "#d55e00"}
BATCH = 128
TEST_SIZE = 360
LEARNING_RATE = 3e-3
CHUNK = 10  # steps between two looks at the loss: looking makes the host wait for the device

Batch = dict[str, np.ndarray]


class CNN(nn.Module):
    """Two convolutions with BatchNorm, a mean over pixels and a linear layer; no dtype anywhere."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Returns logits f32[n, 10] of images f32[n, 8, 8, 1]."""
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            if features == 32:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def loss_fn(params: Any, batch_stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = CNN().apply(variables, batch["image"], train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), new["batch_stats"]


@jax.jit
def predict(variables: Any, images: jax.Array) -> jax.Array:
    return CNN().apply(variables, images, train=False).argmax(-1)


def load() -> tuple[Batch, Batch]:
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[..., None]
    labels = data.target.astype(np.int32)
    split = functools.partial(train_test_split, test_size=TEST_SIZE, stratify=labels)
    image, test_image, label, test_label = split(images, labels, random_state=0)
    return {"image": image, "label": label}, {"image": test_image, "label": test_label}


def batches(data: Batch, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(data["label"]))
        for chosen in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            yield {name: values[chosen] for name, values in data.items()}


@dataclass
class Report:
    """All runs in one precision, an entry a seed, and what the compiled step costs."""

    precision: str
    color: str
    metrics: list[dict[str, np.ndarray]] = field(default_factory=list)  # each by step
    final_loss_scales: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    parameter_bytes: int = 0
    temporary_bytes: int = 0
    compile_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)

    @property
    def loss_scale(self) -> mpjax.LossScale:
        """Dynamic where float16 is computed from float32 weights, none elsewhere."""
        policy = mpjax.get_policy(self.precision)
        if policy.compute_dtype == jnp.float16 and policy.param_dtype == jnp.float32:
            return mpjax.DynamicLossScale(2.0**24, growth_interval=50)
        return mpjax.NoOpLossScale()


def compile_step(step: Any, state: Any, batch: Batch, report: Report) -> Any:
    """Returns the compiled step, which is what runs; what it costs goes into the report."""
    started = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    report.compile_seconds = time.perf_counter() - started
    report.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    report.parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    return compiled


def train(report: Report, seeds: list[int], steps: int, advance: Callable[..., None]) -> None:
    """Trains one run a seed, all with one compiled step, and fills the report."""
    train_set, test_set = load()
    optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    # "nearest" is what 16-true suffers from, on purpose: "stochastic" or "kahan" would mend it.
    options = {"loss_scale": report.loss_scale, "rounding": "nearest"}
    step = mpjax.make_train_step(loss_fn, optimizer, report.precision, **options)
    compiled = None
    for seed in seeds:
        variables = CNN().init(jax.random.key(seed), train_set["image"][:1], train=False)
        state = step.init(variables["params"], variables["batch_stats"])
        stream = itertools.islice(batches(train_set, seed), steps)
        compiled = compiled or compile_step(step, state, next(batches(train_set, seed)), report)
        state = train_once(compiled, state, stream, report, advance)
        params, images = step.policy.cast_to_compute((state.params, test_set["image"]))
        labels = predict({"params": params, "batch_stats": state.extra_state}, images)
        report.accuracies.append(float((labels == test_set["label"]).mean()))
        report.final_loss_scales.append(float(current_loss_scale(state.opt_state).loss_scale))


def train_once(
    compiled: Any, state: Any, stream: Iterator[Batch], report: Report, advance: Callable[..., None]
) -> Any:
    """Returns the state after all batches; the metrics of each step go into the report."""
    history: list[dict[str, jax.Array]] = []
    started = time.perf_counter()
    while chunk := list(itertools.islice(stream, CHUNK)):
        for batch in chunk:
            state, metrics = compiled(state, batch)
            history.append(metrics)
        loss = float(history[-1]["loss"])  # waits for the device
        report.step_seconds.append((time.perf_counter() - started) / len(chunk))
        advance(advance=len(chunk), loss=loss)
        started = time.perf_counter()
    report.metrics.append(jax.tree.map(lambda *values: np.array(values), *history))
    return state


def table(reports: list[Report], steps: int) -> Table:
    caption = (
        f"{steps} steps of {BATCH} digits, Adam at {LEARNING_RATE:g}, cosine decay. Accuracy: on "
        f"{TEST_SIZE} other digits, mean ± standard deviation over seeds. "
        "Skipped: seed by seed. Activations: temporaries of the compiled step. Step: median."
    )
    if jax.default_backend() == "cpu":
        caption += " A CPU computes these convolutions in float32: they gain no speed."
    result = Table(title="1797 real digits", caption=caption, box=box.SIMPLE_HEAD, padding=0)
    result.add_column("precision")
    names = "accuracy\n%", "loss\nscale", "skipped\nsteps", "weights\nkB", "activations\nMB"
    for name in (*names, "compile\ns", "step\nms"):
        result.add_column(name, justify="right")
    for report in reports:
        percent = 100 * np.array(report.accuracies)
        result.add_row(
            report.precision,
            f"{percent.mean():.1f}" + f" ± {percent.std():.1f}" * (len(percent) > 1),
            " ".join(f"{scale:.0f}" for scale in sorted(set(report.final_loss_scales))),
            " ".join(str(metrics["skipped_steps"][-1]) for metrics in report.metrics),
            f"{report.parameter_bytes / 1e3:.1f}",
            f"{report.temporary_bytes / 1e6:.2f}",
            f"{report.compile_seconds:.1f}",
            f"{1e3 * np.median(report.step_seconds):.1f}",
        )
    return result


def dense_loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
    x = batch
    for weight in params:
        x = jax.nn.relu(x @ weight)
    return jnp.mean(x**2)


def dense_milliseconds(precision: str) -> float:
    """Returns the time of a step of four dense layers of 1024, the fastest of four."""
    step = mpjax.make_train_step(dense_loss, optax.sgd(1e-3), precision)
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys[:4]]
    state, batch = step.init(weights), jax.random.normal(keys[4], (512, 1024))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    return 1e3 * min(seconds[1:])  # the first one compiles


def gain() -> str:
    """Returns what 16 bits gain on this machine, by a network that its units are made for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpjax.SupportWarning)  # the line below says it
        names = ("bf16-mixed", "16-mixed")
        fast = [name for name in names if mpjax.check_support(name).status == "native"]
    if not fast:
        return (
            "No gain in time on this machine: it has no units for 16 bits, and computes them in "
            "float32. On one that has them, this line shows how much faster a step is."
        )
    before, after = dense_milliseconds("32-true"), dense_milliseconds(fast[0])
    return (
        f"Time on this machine: a step of four dense layers of 1024 takes {before:.0f} ms in "
        f"float32 and {after:.0f} ms in {fast[0]}, {before / after:.1f} times as fast."
    )


def draw_losses(axis: Any, report: Report) -> None:
    """Draws one line a seed; one that ends in NaN stops at the first, with a cross."""
    wide = {"linewidth": 5, "alpha": 0.35} if report.precision == "32-true" else {}
    style = {"color": report.color, "linewidth": 1.2} | wide
    label = report.precision
    for losses in (metrics["loss"] for metrics in report.metrics):
        window = min(CHUNK, len(losses))
        if np.isnan(losses[-1]):
            losses, window = losses[: max(1, np.isnan(losses).argmax())], 1
            axis.plot(len(losses), losses[-1], "X", color=style["color"], markersize=9)
            label = f"{report.precision} (X: NaN)"
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axis.plot(window + np.arange(len(smooth)), smooth, **style)
    axis.plot([], [], label=label, **style)


def draw_loss_scale(axis: Any, report: Report) -> None:
    for metrics in report.metrics:
        scale, skipped = metrics["loss_scale"], ~metrics["grads_finite"]
        at = 1 + np.arange(len(scale))
        axis.step(at, scale, where="mid", color=report.color, linewidth=1.4)
        axis.plot(at[skipped], scale[skipped], "x", color="#d55e00")
    axis.plot([], [], color=report.color, label=report.precision)


def plot(reports: list[Report], path: Path) -> None:
    scaling = [r for r in reports if r.loss_scale != mpjax.NoOpLossScale()]
    figure = Figure(figsize=(11, 4.2) if scaling else (6, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2 if scaling else 1, squeeze=False)[0]
    axes[0].set(title="Training loss, one line a seed", ylabel="loss, mean of 10 steps")
    axes[0].set_yscale("log")
    for report in reports:
        draw_losses(axes[0], report)
    for report in scaling:
        draw_loss_scale(axes[1], report)
        axes[1].set(title="Dynamic loss scale, × where a step was skipped", ylabel="loss scale")
        axes[1].set_yscale("log", base=2)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(framealpha=0.9, edgecolor="none")
    figure.savefig(path)


def precision_name(text: str) -> str:
    try:
        mpjax.check_support(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def whole_number(text: str, least: int) -> int:
    if text.isdecimal() and least <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from {least} to 2^31 - 1.")


def folder(text: str) -> Path:
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file; type the name of a folder.")
    return Path(text)


def parse_arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    positive, natural = (functools.partial(whole_number, least=n) for n in (1, 0))
    text = "any name that mpjax.get_policy takes; repeatable (default: the four above)"
    parser.add_argument("--precision", action="append", type=precision_name, help=text)
    parser.add_argument("--steps", type=positive, default=400, help="of a run (default: 400)")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", action="append", type=natural, help="repeatable (default: 0 1 2)")
    seeds.add_argument("--seeds", type=positive, default=3, help="how many, counted from 0")
    parser.add_argument("--out", type=folder, default=Path("outputs"), help="of digits.png")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    others = itertools.cycle(("#cc79a7", "#e69f00", "#56b4e9"))
    names = dict.fromkeys(arguments.precision or COLORS)
    reports = [Report(name, COLORS.get(name) or next(others)) for name in names]
    seeds = list(dict.fromkeys(arguments.seed or range(arguments.seeds)))
    total = arguments.steps * len(seeds)
    ends = TextColumn("{task.description:<10}"), TextColumn("loss {task.fields[loss]:.3f}")
    columns = ends[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), ends[1]
    with Progress(*columns) as progress:
        for report in reports:
            task = progress.add_task(report.precision, total=total, loss=np.nan)
            train(report, seeds, arguments.steps, functools.partial(progress.update, task))
    progress.console.print(table(reports, arguments.steps))
    progress.console.print(gain())
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(reports, arguments.out / "digits.png")
    seconds = time.perf_counter() - started
    progress.console.print(f"{seconds:.0f} s. See {arguments.out / 'digits.png'}.")


if __name__ == "__main__":
    main()
