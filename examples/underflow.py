"""Shows what float16 loses on real digits, and the three remedies: `python examples/underflow.py`.

The techniques are those of the Mixed Precision Training paper (Micikevicius et al., 2018,
https://arxiv.org/abs/1710.03740), each measured alone on a CNN trained on 1797 real digits:

  1. Loss scaling. Gradients of activations, once the loss is small, and their exponents: what lies
     left of 2^-25, half the smallest float16, becomes 0, and left of 2^-14 it loses bits.
     Multiplying the loss by 2^15 moves everything 15 to the right.
  2. float32 master weights. A weight plus a much smaller update is the same weight: the share of
     updates that leave no trace grows as the learning rate decays, and training stalls.
  3. float32 accumulation. A long sum stops growing once its terms are below half its last bit:
     the mean square of activations, as BatchNorm computes it, from ever more pixels.

bfloat16 has the range of float32, so it needs no scaling (1); with 8 bits against float16's 11 it
needs float32 weights and sums (2, 3) even more. Settings were chosen to show each: for 1 and 3 SGD
at 0.3, and gradients of the mean loss over all digits, which are smaller than those of a batch; for
2 SGD at 0.01, since at 0.1 fewer updates are small enough to be lost. Momentum and cosine decay.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import mpjax
from mpjax.numerics import ExponentReport, Histogram, exponents

POLICIES = {"float32": "f32", "float16": "p=f16,c=f32,o=f32", "bfloat16": "p=bf16,c=f32,o=f32"}
COLORS = {"float32": "#777777", "float16": "#d55e00", "bfloat16": "#0072b2"}
BATCH = 128
WELL_TRAINED, CAREFUL = 0.3, 0.01  # learning rates
LOSS_SCALE = 2.0**15  # where mpjax.DynamicLossScale() starts
LENGTHS = 2 ** np.arange(4, 17)

Batch = dict[str, np.ndarray]


class CNN(nn.Module):
    """A float32 CNN; `perturb` adds a zero to an activation, whose gradient is then asked for."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Returns logits f32[n, 10] of images f32[n, 8, 8, 1]."""
        for index, features in enumerate((32, 64)):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = self.perturb(f"convolution {index + 1}", x)
            self.sow("intermediates", f"convolution {index + 1}", x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            if index == 0:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return self.perturb("logits", nn.Dense(10)(x.mean(axis=(1, 2))))


def loss_fn(params: Any, state: Any, batch: Batch) -> tuple[jax.Array, Any]:
    variables = {"params": params, **state}
    logits, new = CNN().apply(variables, batch["image"], train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), new


def batches(data: Batch, steps: int, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(len(data["label"]), BATCH, replace=False)
        yield {name: values[chosen] for name, values in data.items()}


class Trained(NamedTuple):
    """A run with weights stored in one dtype: its end, and each step's loss and lost updates."""

    params: Any
    batch_stats: Any
    losses: np.ndarray
    lost: np.ndarray  # the share of updates u != 0 with p + u == p


def train(
    name: str, learning_rate: float, data: Batch, steps: int, seed: int, progress: Progress
) -> Trained:
    """Trains with weights stored as `name` says and all else, momentum too, in float32."""
    policy = mpjax.get_policy(POLICIES[name])
    schedule = optax.cosine_decay_schedule(learning_rate, steps)
    tx = optax.sgd(schedule, momentum=0.9, accumulator_dtype=jnp.float32)

    @jax.jit
    def step(params: Any, batch_stats: Any, opt_state: Any, batch: Batch) -> Any:
        full = policy.cast_to_compute(params)
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = value_and_grad(full, {"batch_stats": batch_stats}, batch)
        updates, opt_state = tx.update(grads, opt_state, full)
        moved = policy.cast_to_param(optax.apply_updates(full, updates))
        lost = jax.tree.map(lambda u, a, b: ((u != 0) & (a == b)).sum(), updates, params, moved)
        asked = jax.tree.map(lambda u: (u != 0).sum(), updates)
        share = sum(jax.tree.leaves(lost)) / sum(jax.tree.leaves(asked))
        return moved, new["batch_stats"], opt_state, (loss, share)

    variables = CNN().init(jax.random.key(seed), data["image"][:1], train=False)
    params, batch_stats = policy.cast_to_param(variables["params"]), variables["batch_stats"]
    opt_state, history = tx.init(variables["params"]), []
    task = progress.add_task(f"{name} weights, SGD at {learning_rate:g}", total=steps)
    for batch in batches(data, steps, seed):
        params, batch_stats, opt_state, seen = step(params, batch_stats, opt_state, batch)
        history.append(jax.device_get(seen))
        progress.advance(task)
    return Trained(params, batch_stats, *np.array(history).T)


def activation_gradients(trained: Trained, batch: Batch) -> ExponentReport:
    """Returns the exponents of the loss's float32 gradients by each activation, as "wgrad"."""
    shapes = jax.eval_shape(
        functools.partial(CNN().init, train=False), jax.random.key(0), batch["image"]
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["perturbations"])

    def loss(perturbations: Any, params: Any, batch_stats: Any, batch: Batch) -> jax.Array:
        state = {"batch_stats": batch_stats, "perturbations": perturbations}
        return loss_fn(params, state, batch)[0]

    # Differentiated by the perturbations, in the place of parameters: theirs are "wgrad".
    return exponents(loss, "float32")(zeros, trained.params, trained.batch_stats, batch)


def swallowed(gradients: Histogram, dtype: str, loss_scale: float = 1.0) -> float:
    """Returns the share of the gradients that are not 0 that is in `dtype`, once scaled."""
    return gradients.lost(dtype, loss_scale).underflows / 100


def subnormal(gradients: Histogram, dtype: str, loss_scale: float = 1.0) -> float:
    """Returns the share of these gradients below the smallest normal number of `dtype`."""
    lost = gradients.lost(dtype, loss_scale)
    return (lost.underflows + lost.subnormals) / 100


def mean_square_errors(trained: Trained, data: Batch) -> dict[str, np.ndarray]:
    """Returns by dtype and length the median error over channels of E[x^2] summed in that dtype."""
    variables = {"params": trained.params, "batch_stats": trained.batch_stats}
    _, sown = CNN().apply(variables, data["image"], train=False, mutable=["intermediates"])
    x = np.asarray(sown["intermediates"]["convolution 1"][0]).reshape(-1, 32)
    terms = x[: LENGTHS[-1]].astype(np.float16) ** 2  # the same terms for every sum
    exact = terms.astype(np.float64).cumsum(axis=0)[LENGTHS - 1]
    errors = {}
    for name in POLICIES:
        dtype = jnp.dtype(name)
        # One rounding a term, as a running sum in that dtype has it.
        sums = np.add.accumulate(terms.astype(dtype), axis=0)[LENGTHS - 1].astype(np.float64)
        errors[name] = np.median(np.abs(sums - exact) / exact, axis=1)
    return errors


def table(
    gradients: ExponentReport, careful: dict[str, Trained], errors: dict[str, np.ndarray]
) -> Table:
    result = Table(title="What is lost, and what the remedy leaves", box=box.SIMPLE_HEAD, padding=0)
    result.add_column("")
    for name in ("float16", "bfloat16", "remedy"):
        result.add_column(name, justify="right")
    result.add_row("1. gradients that become 0", "", "", "f16, loss × 2^15", style="bold")
    for spread in gradients.spreads:
        if spread.kind != "wgrad":
            continue
        g, layer = spread.histogram, spread.module.removeprefix("perturbations/")
        shares = (
            swallowed(g, "float16"),
            swallowed(g, "bfloat16"),
            swallowed(g, "float16", LOSS_SCALE),
        )
        result.add_row(f"   by {layer}", *(f"{share:.2%}" for share in shares))
    every = gradients.of("wgrad")
    shares = (
        subnormal(every, "float16"),
        subnormal(every, "bfloat16"),
        subnormal(every, "float16", LOSS_SCALE),
    )
    result.add_row("   all: 0 or subnormal", *(f"{share:.2%}" for share in shares))
    result.add_row("2. updates with p + u == p", "", "", "float32 weights", style="bold")
    runs = [careful[name] for name in ("float16", "bfloat16", "float32")]
    half = len(runs[0].lost) // 2
    result.add_row("   of all steps", *(f"{run.lost.mean():.1%}" for run in runs))
    result.add_row("   of the second half", *(f"{run.lost[half:].mean():.1%}" for run in runs))
    result.add_row(
        "   training loss at the end", *(f"{run.losses[-20:].mean():.3f}" for run in runs)
    )
    result.add_row("3. error of a mean square", "", "", "float32 sum", style="bold")
    for at in (6, len(LENGTHS) - 1):
        values = (f"{errors[name][at]:.2g}" for name in ("float16", "bfloat16", "float32"))
        result.add_row(f"   of {LENGTHS[at]} pixels", *values)
    return result


def draw_exponents(axis: Any, gradients: ExponentReport) -> None:
    kinds = ("wgrad",)  # of the perturbations, which `exponents` was given as parameters
    gradients.plot(axis, kinds=kinds, loss_scale=LOSS_SCALE, formats=("float16",))
    plain, scaled, end = axis.lines
    styles = ((plain, "as they are", COLORS["float16"]), (scaled, "loss × $2^{15}$", "#009e73"))
    for line, name, color in styles:
        share = line.get_label().partition(": ")[2]
        line.set(label=f"{name}: {share}", color=color, linewidth=1.6)
    axis.axvspan(-60, end.get_xdata()[0], color="#999999", alpha=0.25, linewidth=0)
    axis.set(title="1. Gradients of activations", xlim=(-45, 16))
    axis.set_ylim(0, 1.6 * axis.get_ylim()[1])
    for text in axis.texts:
        text.set(text="0 in float16 ", y=0.82, rotation=0, fontsize=9)  # below the legend


def draw_lost_updates(axis: Any, careful: dict[str, Trained]) -> None:
    for name, run in careful.items():
        label = f"{name} weights: loss {run.losses[-20:].mean():.2f}"
        axis.plot(100 * run.lost, color=COLORS[name], linewidth=1.2, label=label)
    axis.set(title="2. Updates that change no weight", xlabel="step", ylabel="% of updates")
    axis.set_ylim(-3, 125)  # room for the legend


def draw_errors(axis: Any, errors: dict[str, np.ndarray]) -> None:
    for name, error in errors.items():
        kept = error > 0
        label = f"summed in {name}"
        axis.plot(LENGTHS[kept], error[kept], "o-", color=COLORS[name], markersize=4, label=label)
    axis.set(title="3. Mean square of activations", xlabel="pixels", ylabel="relative error")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")


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
    parser.add_argument("--steps", type=positive, default=400, help="of a run (default: 400)")
    parser.add_argument("--seed", type=natural, default=0, help="default: 0")
    parser.add_argument("--out", type=folder, default=Path("outputs"), help="of underflow.png")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    started, console, digits = time.perf_counter(), Console(), load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    data = {"image": images, "label": digits.target.astype(np.int32)}
    run = {"data": data, "steps": arguments.steps, "seed": arguments.seed}
    with Progress(console=console) as progress:
        trained = train("float32", WELL_TRAINED, **run, progress=progress)
        careful = {name: train(name, CAREFUL, **run, progress=progress) for name in POLICIES}
    gradients = activation_gradients(trained, data)
    errors = mean_square_errors(trained, data)
    console.print(table(gradients, careful, errors))
    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 3)
    draw_exponents(axes[0], gradients)
    draw_lost_updates(axes[1], careful)
    draw_errors(axes[2], errors)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(framealpha=0.9, edgecolor="none", fontsize=9)
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out / "underflow.png")
    seconds = time.perf_counter() - started
    console.print(f"{seconds:.0f} s. See {arguments.out / 'underflow.png'}.")


if __name__ == "__main__":
    main()
