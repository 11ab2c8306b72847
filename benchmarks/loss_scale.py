"""What loss scaling, the finite check and skipping add to a train step, beside the peers.

    python benchmarks/loss_scale.py            # 10 million parameters, half a minute to minutes
    python benchmarks/loss_scale.py --width 256 --repeats 3 --out /tmp/loss_scale.md

Every row is the same step: an MLP with float32 master parameters, computed in one precision,
`adamw` behind `clip_by_global_norm`, its state donated. "plain" scales, checks and skips nothing;
neither does "plain, autocast", which `make_train_step` is compared with.
Bytes, flops and temporaries are those of XLA's analysis of the compiled step; "reads" is what it
adds to the plain step, as readings of all gradients (4 bytes a parameter). Times are medians of
interleaved runs. The results go to `benchmarks/results/loss_scale.md`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mpjax

RESULTS = Path(__file__).parent / "results" / "loss_scale.md"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SCALE = 2.0**15

Step = Callable[[Any, Any], Any]


class Row(NamedTuple):
    """What was measured of one step."""

    precision: str
    name: str
    bytes_accessed: float
    reads: float
    flops: float
    temporaries: int
    milliseconds: float


def init_params(width: int, depth: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), depth)
    scale = width**-0.5
    return [
        {"w": jax.random.normal(key, (width, width)) * scale, "b": jnp.zeros(width)} for key in keys
    ]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)


def mixed(precision: str) -> Callable[..., jax.Array]:
    policy = mpjax.get_policy(precision)

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_fn(policy.cast_to_compute(params), policy.cast_to_compute(batch))

    return loss


# -- the steps: each takes (state, batch) and returns (state, loss) -------------------------------


def optax_step(loss: Callable[..., Any], params: Any, tx: Any) -> tuple[Step, Any]:

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, (params, tx.init(params))


def plain(precision: str, params: Any) -> tuple[Step, Any]:
    return optax_step(mixed(precision), params, OPTIMIZER)


def plain_autocast(precision: str, params: Any) -> tuple[Step, Any]:
    return optax_step(mpjax.autocast(loss_fn, precision), params, OPTIMIZER)


def apply_if_finite(precision: str, params: Any) -> tuple[Step, Any]:
    return optax_step(mixed(precision), params, optax.apply_if_finite(OPTIMIZER, 100))


def mpjax_step(precision: str, params: Any) -> tuple[Step, Any]:
    step = mpjax.make_train_step(loss_fn, OPTIMIZER, precision, donate=False)
    return step, step.init(params)


def mpjax_wrapper(precision: str, params: Any) -> tuple[Step, Any]:
    tx = mpjax.with_loss_scale(OPTIMIZER, mpjax.get_loss_scale(precision))
    loss = mixed(precision)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        scale = mpjax.current_loss_scale(opt_state)
        value_and_grad = mpjax.value_and_grad(loss, loss_scale=scale)
        value, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, (params, tx.init(params))


def flax_step(precision: str, params: Any) -> tuple[Step, Any]:
    """Flax's own recipe: select parameters and optimizer state after the update."""
    loss = mixed(precision)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scale = state
        scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
        updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        return (*kept, scale), value

    start = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
    return step, (params, OPTIMIZER.init(params), start)


def jmp_step(precision: str, params: Any) -> tuple[Step, Any]:
    """As in jmp's README: unscale, all_finite, adjust, select_tree."""
    loss = mixed(precision)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scale = state
        grads, value = jax.grad(
            lambda p: (scale.scale(loss(p, batch)), loss(p, batch)), has_aux=True
        )(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        kept = jmp.select_tree(finite, new, (params, opt_state))
        return (*kept, scale.adjust(finite)), value

    return step, (params, OPTIMIZER.init(params), jmp.DynamicLossScale(jnp.float32(SCALE)))


STEPS = {
    "plain": plain,
    "plain, autocast": plain_autocast,
    "mpjax.make_train_step": mpjax_step,
    "mpjax.with_loss_scale": mpjax_wrapper,
    "optax.apply_if_finite": apply_if_finite,
    "flax DynamicScale": flax_step,
    "jmp": jmp_step,
}
BASES = dict.fromkeys(STEPS, "plain") | {"mpjax.make_train_step": "plain, autocast"}

# -- measuring ------------------------------------------------------------------------------------


def compiled_steps(precision: str, width: int, depth: int, batch: Any) -> dict[str, Any]:
    """Returns, by name, the compiled step and the state that it starts from."""
    steps = {}
    for name, make in STEPS.items():
        step, state = make(precision, init_params(width, depth))
        leaves, tree = jax.tree.flatten(state)
        # Parameters and moments may share a buffer, which could not be donated twice.
        leaves = [jnp.array(x, copy=True) for x in leaves]
        steps[name] = jax.jit(flat(step, tree), donate_argnums=0).lower(leaves, batch), leaves
    return {name: (lowered.compile(), leaves) for name, (lowered, leaves) in steps.items()}


def flat(step: Step, tree: Any) -> Step:
    """Returns `step` on the leaves of its state: jmp's loss scale cannot be lowered as a tree."""

    def on_leaves(leaves: list[Any], batch: Any) -> Any:
        state, loss = step(jax.tree.unflatten(tree, leaves), batch)
        return jax.tree.leaves(state), loss

    return on_leaves


def timed(steps: dict[str, Any], batch: Any, repeats: int, precision: str) -> dict[str, float]:
    """Returns the median time of each step in milliseconds, the runs interleaved."""
    states = {name: state for name, (_, state) in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in track(range(repeats + 1), f"{precision}: timing", console=Console(stderr=True)):
        for name, (compiled, _) in steps.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(compiled(states[name], batch)[0])
            if index:  # the first run warms up
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def measure(precision: str, options: argparse.Namespace) -> list[Row]:
    key = jax.random.key(1)
    shape = (options.batch, options.width)
    batch = {"x": jax.random.normal(key, shape), "y": jnp.zeros(shape)}
    steps = compiled_steps(precision, options.width, options.depth, batch)
    milliseconds = timed(steps, batch, options.repeats, precision)
    gradients = 4 * parameter_count(options)
    costs = {name: compiled.cost_analysis() for name, (compiled, _) in steps.items()}
    rows = []
    for name, (compiled, _) in steps.items():
        accessed, base = (costs[x]["bytes accessed"] for x in (name, BASES[name]))
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        counts = (accessed, (accessed - base) / gradients, costs[name]["flops"], temporaries)
        rows.append(Row(precision, name, *counts, milliseconds[name]))
    return rows


def parameter_count(options: argparse.Namespace) -> int:
    return options.depth * options.width * (options.width + 1)


# -- reporting ------------------------------------------------------------------------------------

COLUMNS = ("precision", "step", "MB accessed", "× plain", "reads", "GFLOP", "temp. MB", "ms")


def cells(rows: list[Row]) -> list[tuple[str, ...]]:
    accessed = {(row.precision, row.name): row.bytes_accessed for row in rows}
    return [
        (
            row.precision,
            row.name,
            f"{row.bytes_accessed / 1e6:.1f}",
            f"{row.bytes_accessed / accessed[row.precision, BASES[row.name]]:.3f}",
            f"{row.reads:+.2f}",
            f"{row.flops / 1e9:.2f}",
            f"{row.temporaries / 1e6:.1f}",
            f"{row.milliseconds:.1f}",
        )
        for row in rows
    ]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    facts = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = {key.strip(): value.strip("\t: ") for key, value in facts.items()}
    flags = set(names.get("flags", "").split())
    found = [f for f in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if f in flags]
    cpu, has = names.get("model name", "unknown CPU"), " ".join(found) or "none of interest"
    return f"{jax.devices()[0].platform}: {cpu}; features: {has}; JAX {jax.__version__}"


def report(rows: list[Row], options: argparse.Namespace) -> None:
    table = Table(*COLUMNS, title="One train step, and what scaling and skipping add to it")
    for row in cells(rows):
        table.add_row(*row)
    Console(width=120).print(table)
    size = f"{parameter_count(options) / 1e6:.1f} million parameters, batch {options.batch}"
    command = " ".join(["python", "benchmarks/loss_scale.py", *sys.argv[1:]])
    lines = [
        "# What loss scaling and skipping add to a train step",
        f"{size}. Times depend on what else the machine did; bytes do not.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * 2}{' ---: |' * (len(COLUMNS) - 2)}",
        *(f"| {' | '.join(row)} |" for row in cells(rows)),
        "",
        "reads: added bytes as readings of all gradients in float32. jmp computes the loss twice",
        "in its text; XLA merges the two. plain and optax.apply_if_finite do not scale.",
        'mpjax.make_train_step runs the loss under autocast, so "plain, autocast" is its base;',
        'the others run it on cast arguments, and "plain" is theirs.',
        "",
        f"Made by `{command}`: {options.repeats} interleaved runs; {machine()}.",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=10, help="layers of width × width")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report([row for p in PRECISIONS for row in measure(p, options)], options)


if __name__ == "__main__":
    main()
