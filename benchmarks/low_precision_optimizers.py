"""Trains four networks with 16-bit weights and 8-bit moments, and compares their ends.

    python benchmarks/low_precision_optimizers.py                # all: an hour on 2 cores
    python benchmarks/low_precision_optimizers.py --tasks mlp --forms nearest,kahan --seeds 2

A seed gives the same weights and the same batches in every form. What counts is whether a form
ends where float32 ends, by the yardstick of how far float32's own seeds lie apart. A later run
renews the forms of the tasks that it names and keeps the rest; `python docs/figures.py` draws them.
"""

import functools
import importlib
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import TASKS as NETWORKS
from convergence import Task, arguments, compared, lm, lm_task
from measure import machine

import mpjax
from mpjax import optim

Tx = optax.GradientTransformation
Wrapper = Callable[[Tx], Tx]


def linear_second_moments(tx: Tx) -> Tx:
    """Returns an optimizer whose second moments are linear in 8 bits, in blocks of 256 or a row.

    What nobody should do: of gradients below 1/22 of their block's largest the squares become 0.
    """

    def coded(path: Any, x: Any) -> Any:
        if not any(getattr(key, "name", "") == "nu" for key in path) or x.ndim < 2:
            return x
        largest = jnp.max(x, -1, keepdims=True)
        share = jnp.where(largest > 0, x / largest, 0)
        return jnp.round(share * 255).astype(jnp.uint8).astype(jnp.float32) / 255 * largest

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(grads, state, params)
        return updates, jax.tree_util.tree_map_with_path(coded, state)

    return optax.GradientTransformation(tx.init, update)


def int8(tx: Tx) -> Tx:
    # These networks are small: without rules their moments would be left in float32.
    return optim.with_quantized_state(tx, rules={"*bias": "float32", "*": "int8"})


def int8_rows(tx: Tx) -> Tx:
    rules = {"*bias": "float32", "*": "int8"}
    return optim.with_quantized_state(tx, block_size=None, rules=rules)


def float8(tx: Tx) -> Tx:
    return optim.with_quantized_state(tx, "float8", rules={"*bias": "float32", "*": "float8"})


def split(tx: Tx) -> Tx:
    return optim.with_master_weights(tx, bits=24)


def bfloat16(tx: Tx) -> Tx:
    return optim.with_state_dtypes(tx, mu_dtype="bf16", nu_dtype="bf16")


# The name of each form, its policy, and what wraps the optimizer.
FORMS: dict[str, tuple[str, Wrapper]] = {
    "float32": ("32-true", lambda tx: tx),
    "bf16-mixed": ("bf16-mixed", lambda tx: tx),
    "nearest": ("bf16-true", lambda tx: tx),
    "stochastic": ("bf16-true", optim.with_stochastic_rounding),
    "kahan": ("bf16-true", optim.with_kahan),
    "24 bits": ("bf16-true", split),
    "24 bits + bf16 moments": ("bf16-true", lambda tx: split(bfloat16(tx))),
    "24 bits + int8 moments": ("bf16-true", lambda tx: split(int8(tx))),
    "24 bits + float8 moments": ("bf16-true", lambda tx: split(float8(tx))),
    "stochastic + bf16 moments": (
        *("bf16-true", lambda tx: optim.with_stochastic_rounding(bfloat16(tx))),
    ),
    "stochastic + int8 moments": ("bf16-true", lambda tx: optim.with_stochastic_rounding(int8(tx))),
    "stochastic + int8 moments by row": (
        *("bf16-true", lambda tx: optim.with_stochastic_rounding(int8_rows(tx))),
    ),
    "linear int8 second moments": ("32-true", linear_second_moments),
}
BASE = "float32"


@functools.cache
def task(name: str) -> Task:
    name = name.removesuffix(LONG)
    return lm_task(small_lm()) if name == "small lm" else NETWORKS[name][0]()


def small_lm() -> Any:
    """Returns `examples/lm.py` a sixteenth as large, of which five seeds take a minute."""
    del sys.modules["lm"]
    small = importlib.import_module("lm")
    sys.modules["lm"] = lm
    small.WIDTH, small.LAYERS, small.TIME = 48, 2, 32
    return small


def optimizer(name: str, steps: int) -> Tx:
    if name.startswith("mlp"):  # in `convergence.py` it has SGD
        return optax.adamw(optax.cosine_decay_schedule(1e-3, steps))
    return task(name).optimizer(steps)


LONG = " x 10"  # ten times the steps: stalls come late
TASKS = {  # and steps
    "mlp": 2400,
    f"mlp{LONG}": 24000,
    "digits": 300,
    f"digits{LONG}": 3000,
    "lm": 600,
    "small lm": 600,
    f"small lm{LONG}": 6000,
}
CHUNK = 30  # steps between two looks at the loss
SEEN = 8  # batches of a chunk on which it is measured


def train(name: str, form: str, steps: int, seeds: range) -> Iterator[dict[str, Any]]:
    """Yields what each run ended with, and its training loss by chunks of steps."""
    policy, wrap = FORMS[form]
    tx = wrap(optimizer(name, steps))
    step = mpjax.make_train_step(task(name).loss_fn, tx, policy, rounding="nearest")

    def loss_of(state: Any, full: Any, batch: Any) -> jax.Array:
        if state.extra_state is None:
            return task(name).loss_fn(full, batch)
        return task(name).loss_fn(full, state.extra_state, batch)[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, batches: Any) -> Any:
        state, _ = jax.lax.scan(step, state, batches)
        full = optim.full_params(state.params, state.opt_state)
        seen = jax.tree.map(lambda x: x[-SEEN:], batches)
        loss = jax.lax.map(functools.partial(loss_of, state, full), seen)
        return state._replace(params=full), state, jnp.mean(loss)

    for seed in seeds:
        state = step.init(*task(name).init(seed))
        report = optim.bytes_per_parameter(tx, state.params)
        stream, full = task(name).batches(seed), state
        losses: list[float | None] = []
        for _ in range(steps // CHUNK):
            chunk = jax.tree.map(lambda *x: np.stack(x), *itertools.islice(stream, CHUNK))
            full, state, loss = run(state, chunk)
            losses.append(float(f"{float(loss):.5g}") if np.isfinite(loss) else None)
        last = max(1, len(losses) // 10)
        score = task(name).score(full)
        yield {
            "loss": None if None in losses else statistics.mean(losses[-last:]),
            "score": score if np.isfinite(score) else None,
            "bytes": report.total,
            "curve": losses,
        }


def spread(values: list[float], places: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{places}f} ± {deviation:.{places}f}"


def table(name: str, runs: dict[str, list[dict[str, Any]]], steps: int) -> str:
    scored = task(name).scored
    lines = [
        f"## {name}, {steps} steps\n",
        f"| form | bytes | seeds | training loss | off | {scored} | off |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for form in (form for form in FORMS if form in runs):
        found, base = runs[form], runs[BASE]
        cells = [form, f"{found[0]['bytes']:.2f}", str(len(found))]
        if any(run["loss"] is None for run in found):
            lines.append(f"| {' | '.join(cells)} | diverged |  | diverged |  |")
            continue
        losses = [run["loss"] for run in found]
        mean, full = (statistics.mean(run["loss"] for run in rows) for rows in (found, base))
        cells.append(f"{mean:.3g}" if LONG in name else spread(losses, 4))
        off = f"{mean / full - 1:+.1%}" if mean < 100 * full else f"{mean / full:.0f} x"
        cells.append("" if form == BASE else off)
        cells.append(spread([run["score"] for run in found], 2 if "%" in scored else 4))
        is_alike = len({run["score"] for run in base}) < 2
        cells.append(
            "" if form == BASE or is_alike else f"{compared(found, base, 'score')[0]:+.2f} sd"
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


ABOUT = """\
Mean ± standard deviation over seeds. Training loss: of batches just trained on, the mean over the
last 10% of steps, in float32 and with all that the state knows of the weights, as is the score;
what a bfloat16 model says of its own loss is rounded. off: how far the mean lies from float32's,
of the score in standard deviations (sd) of float32's own seeds. bytes: a parameter, of weights,
float32 gradients and the optimizer's state. diverged: the loss of some seed became NaN.
All but float32 and bf16-mixed hold and compute with bfloat16 weights (`bf16-true`): what
bf16-mixed is off is the computation's share, and not the optimizer's.
"""


def main() -> None:
    out = "low_precision_optimizers.md"
    options = arguments(__doc__.splitlines()[0], TASKS, "form", FORMS, out)
    store = options.out.with_suffix(".json")
    data = json.loads(store.read_text()) if store.exists() else {"tasks": {}}
    if options.steps is not None and options.steps < CHUNK:
        raise SystemExit(
            f"--steps {options.steps}: type at least {CHUNK}, the least that is scored."
        )
    command = " ".join(["python", "benchmarks/low_precision_optimizers.py", *sys.argv[1:]])
    for name in options.tasks:
        steps = options.steps or TASKS[name]
        about = f"`{command}`, {machine.made()}; on {machine.cpu()}."
        entry = data["tasks"].setdefault(name, {"runs": {}, "made": []})
        entry |= {"steps": steps, "chunk": CHUNK}
        renewed = set(entry["runs"]) <= set(options.forms)  # no earlier run is left then
        entry["made"] = [about] if renewed else [*entry["made"], about]
        for form in options.forms:
            entry["runs"][form] = list(train(name, form, steps, range(options.seeds)))
            ends = [str(found["loss"])[:8] for found in entry["runs"][form]]
            print(f"{name:<8}{form:<38}{' '.join(ends)}", flush=True)
            store.write_text(json.dumps(data) + "\n")
    write(options.out, data)


def write(path: pathlib.Path, data: dict[str, Any]) -> None:
    done = [name for name in TASKS if name in data["tasks"]]
    head = ["# Where training ends with weights and moments in fewer bits\n", ABOUT]
    tables = [table(n, data["tasks"][n]["runs"], data["tasks"][n]["steps"]) for n in done]
    made = [f"{n}: {about}\n" for n in done for about in data["tasks"][n]["made"]]
    path.write_text("\n".join([*head, *(f"{t}\n" for t in tables), "## Made by\n", *made]))


if __name__ == "__main__":
    main()
