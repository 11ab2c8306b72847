"""Trains a byte-level transformer on Python's own standard library: `python examples/lm.py`.

The model is float32 Flax code as a user has it: no dtype, no cast. Only the name of the policy
changes between runs.

  32-true     everything float32: what the others are measured against.
  bf16-mixed  computes in bfloat16, keeps weights in float32; needs no loss scaling.
  16-mixed    computes in float16, keeps weights in float32, scales the loss dynamically.
  compact     not among the three that run by default: everything bfloat16, weights rounded up or
              down by chance, AdamW's moments in 8 bits. 6.5 bytes a parameter in place of 16.

The blocks are one `scan` over stacked weights, each rematerialised: what the forward pass keeps
is one residual stream a block. What one sees: three curves that one cannot tell apart, and less
memory. At the end every model writes some Python of its own: it indents, opens blocks and calls
methods of self; with more --steps it writes more of it right.
"""

import argparse
import functools
import itertools
import sysconfig
import time
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
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import mpjax

COLORS = {"32-true": "gray", "bf16-mixed": "#0072b2", "16-mixed": "#009e73"}
COMPACT = "compact"
BATCH, TIME = 8, 64  # windows a step, bytes a window
WIDTH, HEADS, LAYERS = 96, 4, 4
LEARNING_RATE = 3e-3
CORPUS_BYTES = 4_000_000
HELD_OUT = 1 / 20  # of the corpus, at its end
CHUNK = 10  # steps between two looks at the loss: looking makes the host wait for the device
PROMPT = b"def "
SAMPLE_BYTES = 240


class Block(nn.Module):
    """Attention to what came before, then a gelu layer; both behind a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns the residual stream, and nothing for `scan` to stack."""
        mask = nn.make_causal_mask(x[:, :, 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y), None


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits f32[batch, time, 256]."""
        places = self.param("positions", nn.initializers.normal(0.02), (TIME, WIDTH))
        x = nn.Embed(256, WIDTH)(tokens) + places[: tokens.shape[1]]
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(256)(nn.LayerNorm()(x))


def logits_fn(params: Any, tokens: jax.Array) -> jax.Array:
    return Transformer().apply({"params": params}, tokens)


def loss_fn(params: Any, windows: jax.Array) -> jax.Array:
    logits = logits_fn(params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def optimizer(steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATE, steps // 10 + 1, steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make_step(precision: str, steps: int) -> tuple[Any, optax.GradientTransformation]:
    """Returns the train step, and its optimizer to count the bytes of."""
    tx = optimizer(steps)
    if precision != COMPACT:
        return mpjax.make_train_step(loss_fn, tx, precision, rounding="nearest"), tx
    tx = mpjax.optim.with_stochastic_rounding(mpjax.optim.with_quantized_state(tx))
    return mpjax.make_train_step(loss_fn, tx, "bf16-true"), tx


def bytes_per_parameter(tx: optax.GradientTransformation, params: Any) -> float:
    """Returns what stays between two steps, and gradients in the dtype of the parameters."""
    dtype = params["positions"].dtype
    return mpjax.optim.bytes_per_parameter(tx, params, grad_dtype=dtype).total


def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns the standard library's sources as bytes: to train on, and held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:CORPUS_BYTES]
    corpus = np.frombuffer(text, np.uint8).astype(np.int32)
    split = int(len(corpus) * (1 - HELD_OUT))
    return corpus[:split], corpus[split:]


def batches(corpus: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(corpus) - TIME, BATCH)
        yield corpus[starts[:, None] + np.arange(TIME + 1)]


@dataclass
class Report:
    """A run in one precision, and what its compiled step costs."""

    precision: str
    color: str
    metrics: dict[str, np.ndarray] = field(default_factory=dict)  # each by step
    held_out_loss: float = np.nan
    parameter_bytes: float = np.nan  # for each
    temporary_bytes: int = 0
    compile_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    sample: str = ""


def train(report: Report, seed: int, steps: int, advance: Callable[..., None]) -> None:
    """Trains one model and fills the report."""
    corpus, held_out = load()
    step, tx = make_step(report.precision, steps)
    params = Transformer().init(jax.random.key(seed), jnp.zeros((1, TIME), jnp.int32))["params"]
    state = step.init(params)
    report.parameter_bytes = bytes_per_parameter(tx, state.params)
    stream = itertools.islice(batches(corpus, seed), steps)
    started = time.perf_counter()
    compiled = step.lower(state, next(batches(corpus, seed))).compile()
    report.compile_seconds = time.perf_counter() - started
    report.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
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
    report.metrics = jax.tree.map(lambda *values: np.array(values), *history)
    full = mpjax.optim.full_params(state.params, state.opt_state)
    report.held_out_loss = evaluate(full, held_out)
    report.sample = write(full, seed)


def evaluate(params: Any, corpus: np.ndarray) -> float:
    """Returns the loss on held-out text, in float32 whatever the model was trained in."""
    windows = corpus[: len(corpus) // (TIME + 1) * (TIME + 1)].reshape(-1, TIME + 1)
    loss = jax.jit(loss_fn)
    return float(np.mean([loss(params, part) for part in np.split(windows[:256], 8)]))


def write(params: Any, seed: int) -> str:
    """Returns text that the model writes, a byte at a time; in float32 too."""

    @jax.jit
    def sample(params: Any, key: jax.Array) -> jax.Array:
        prompt = jnp.array(list(PROMPT), jnp.int32)
        text = jnp.zeros(len(PROMPT) + SAMPLE_BYTES, jnp.int32).at[: len(PROMPT)].set(prompt)

        def next_byte(end: jax.Array, text: jax.Array) -> jax.Array:
            start = jnp.maximum(0, end - TIME)
            window = jax.lax.dynamic_slice_in_dim(text, start, TIME)
            scores = logits_fn(params, window[None])[0, end - start - 1]
            drawn = jax.random.categorical(jax.random.fold_in(key, end), scores / 0.7)
            return text.at[end].set(drawn.astype(jnp.int32))

        return jax.lax.fori_loop(len(PROMPT), len(text), next_byte, text)

    return bytes(sample(params, jax.random.key(seed)).tolist()).decode("ascii", "replace")


def table(reports: list[Report], steps: int) -> Table:
    caption = (
        f"{steps} steps of {BATCH} windows of {TIME} bytes, AdamW at {LEARNING_RATE:g}. Loss: nats "
        "a byte. Bytes: of weights, gradients and moments. Temporaries: of the compiled step. "
        "Step: median."
    )
    result = Table(title="Python's standard library", caption=caption, box=box.SIMPLE_HEAD)
    result.add_column("precision")
    names = "held-out\nloss", "training\nloss", "skipped\nsteps", "bytes a\nparameter"
    for name in (*names, "temporaries\nMB", "compile\ns", "step\nms"):
        result.add_column(name, justify="right")
    for report in reports:
        result.add_row(
            report.precision,
            f"{report.held_out_loss:.3f}",
            f"{report.metrics['loss'][-CHUNK:].mean():.3f}",
            str(report.metrics["skipped_steps"][-1]),
            f"{report.parameter_bytes:.2f}",
            f"{report.temporary_bytes / 1e6:.1f}",
            f"{report.compile_seconds:.1f}",
            f"{1e3 * np.median(report.step_seconds):.0f}",
        )
    return result


def smooth(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and the mean over a few steps around each."""
    window = smoothing(len(losses))
    means = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    return window + np.arange(len(means)), means


def smoothing(steps: int) -> int:
    return min(steps, max(CHUNK, steps // 30))


def plot(reports: list[Report], path: Path) -> None:
    """Draws the losses, and beside them how far each is from the first report's."""
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2)
    first = reports[0]
    window = smoothing(len(first.metrics["loss"]))
    axes[0].set(title="Training loss", ylabel=f"nats a byte, mean of {window} steps")
    axes[1].set(title=f"Difference from {first.precision}, same batches", ylabel="nats a byte")
    widths = itertools.chain((6.0, 2.6), itertools.repeat(1.2))  # so that curves on curves are seen
    for report, width in zip(reports, widths, strict=False):
        style = {"color": report.color, "label": report.precision, "linewidth": width}
        style |= {"alpha": 0.35} if report is first else {}
        losses = report.metrics["loss"]
        axes[0].plot(*smooth(losses), **style)
        axes[1].plot(*smooth(losses - first.metrics["loss"]), **style)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(framealpha=0.9, edgecolor="none")
    figure.savefig(path)


def precision_name(text: str) -> str:
    if text == COMPACT:
        return text
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
    text = "compact, or any name that mpjax.get_policy takes; repeatable (default: the other three)"
    parser.add_argument("--precision", action="append", type=precision_name, help=text)
    parser.add_argument("--steps", type=positive, default=1200, help="of a run (default: 1200)")
    parser.add_argument("--seed", type=natural, default=0, help="of weights and batches")
    parser.add_argument("--out", type=folder, default=Path("outputs"), help="of lm.png")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    others = itertools.cycle(("#cc79a7", "#e69f00", "#56b4e9"))
    names = dict.fromkeys(arguments.precision or COLORS)
    reports = [Report(name, COLORS.get(name) or next(others)) for name in names]
    ends = TextColumn("{task.description:<10}"), TextColumn("loss {task.fields[loss]:.3f}")
    columns = ends[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), ends[1]
    with Progress(*columns) as progress:
        for report in reports:
            task = progress.add_task(report.precision, total=arguments.steps, loss=np.nan)
            advance = functools.partial(progress.update, task)
            train(report, arguments.seed, arguments.steps, advance)
    for report in reports:
        progress.console.print(Panel(Text(report.sample), title=report.precision))
    progress.console.print(table(reports, arguments.steps))
    arguments.out.mkdir(parents=True, exist_ok=True)
    plot(reports, arguments.out / "lm.png")
    progress.console.print(f"See {arguments.out / 'lm.png'}.")


if __name__ == "__main__":
    main()
