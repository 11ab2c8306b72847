"""Trains three networks with 8-bit products, stores one in 8 bits, and times products on this CPU.

    python benchmarks/eight_bits.py                         # all: a quarter of an hour on 2 cores
    python benchmarks/eight_bits.py --tasks mlp --forms float8 --seeds 2 --parts training

Networks, data and yardstick are those of `convergence.py`: a seed gives the same weights and the
same batches in every form, and what counts is whether a form ends where float32 ends. A later run
renews what it names in `results/eight_bits.md` and keeps the rest.
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from convergence import TASKS as NETWORKS
from convergence import Task, compared, lm, spread
from measure import machine
from measure.options import words
from measure.timings import Step, interleaved

import mpjax

HERE = pathlib.Path(__file__).parent
OUT = HERE / "results" / "eight_bits.md"
PARTS = ("training", "weights", "timings")
BASE = "float32"
FLOAT8, INT8 = "float8_from_mixed_bfloat16", "int8_from_mixed_bfloat16"

# The name of each form and its policy. "everywhere": first and last layer too.
FORMS: dict[str, Any] = {
    "float32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "int8": INT8,
    "float8": FLOAT8,
    "float8, wgrad in bf16": mpjax.QuantizedPolicy(
        "bf16-mixed", mpjax.Float8CurrentScaling(wgrad=None)
    ),
    "float8, delayed": mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling()),
    "int8 everywhere": mpjax.PolicyMap("bf16-mixed", {"*": INT8}),
    "float8 everywhere": mpjax.PolicyMap("bf16-mixed", {"*": FLOAT8}),
}
# How many steps, and which forms: the products of `digits` are convolutions, but for its head.
TASKS = {
    "mlp": (300, tuple(FORMS)),
    "digits": (200, ("float32", "bf16-mixed", "int8 everywhere", "float8 everywhere")),
    "lm": (200, tuple(FORMS)),
}
# How a network that was trained in float32 is multiplied: the layers that a recipe is kept from.
HEAD, ATTENTION, MLPS = "Dense_0/*", "blocks/MultiHead*", "blocks/Dense_*"
KEPT = {
    "everywhere": (),
    "but for the head": (HEAD,),
    "but for the head and attention": (HEAD, ATTENTION),
    "but for the head and the MLPs": (HEAD, MLPS),
    "in the head alone": (ATTENTION, MLPS),
}
LAST = 0.1  # of a run: its final training loss is the mean over these steps
WINDOWS, HELD_OUT_SHARE = 64, 8  # windows of one loss; every how many-th part of the text is read
SIZE, ROUNDS = 1024, 15  # of the products that are timed


@functools.cache
def task(name: str) -> Task:
    return NETWORKS[name][0]()


def train(name: str, form: str, steps: int, seeds: range) -> Iterator[tuple[Any, dict[str, float]]]:
    """Yields the state and the end of each run; all seeds share one compiled step."""
    policy = FORMS[form]
    step = mpjax.make_train_step(task(name).loss_fn, task(name).optimizer(steps), policy)
    for seed in seeds:
        batches = task(name).batches(seed)
        first = next(batches)
        state = step.init(*task(name).init(seed), batch=first)
        losses = []
        for batch in itertools.islice(itertools.chain([first], batches), steps):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        last = np.array(losses[-max(1, int(LAST * steps)) :])
        yield state, {"loss": float(last.mean()), "score": task(name).score(state)}


def training_table(name: str, entry: dict[str, Any]) -> str:
    scored = task(name).scored
    places = 2 if "%" in scored else 4
    lines = [
        f"## {name}, {entry['steps']} steps\n",
        f"{task(name).about}.\n",
        f"| products | seeds | training loss | off | {scored} | off | within |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    base = entry["runs"][BASE]
    for form in (form for form in FORMS if form in entry["runs"]):
        found = entry["runs"][form]
        ends = [
            spread([run[key] for run in found], n) for key, n in (("loss", 4), ("score", places))
        ]
        if form == BASE or len(base) < 2:
            lines.append(f"| {form} | {len(found)} | {ends[0]} |  | {ends[1]} |  |  |")
            continue
        (loss, loss_in), (score, score_in) = (compared(found, base, k) for k in ("loss", "score"))
        pairs = [a["loss"] - b["loss"] for a, b in zip(found, base, strict=False)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        off = f"{loss:+.2f} sd, {statistics.mean(pairs):+.4f} ± {error:.4f}"
        verdict = "yes" if loss_in and score_in else "NO"
        cells = (form, str(len(found)), ends[0], off, ends[1], f"{score:+.2f} sd", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# -- weights in 8 bits ---------------------------------------------------------------------------


def weights(steps: int) -> dict[str, Any]:
    """Returns what storing the weights of a trained language model in 8 bits costs and saves."""
    ((state, end),) = train("lm", BASE, steps, range(1))
    params = state.params
    found: dict[str, Any] = {"layers": {}, "score": {"float32": end["score"]}, "steps": steps}
    found["maps"] = maps(params)
    found["bytes"] = {"float32": sum(x.nbytes for x in jax.tree.leaves(params))}
    for form, policy in (("int8", INT8), ("float8", FLOAT8)):
        small = mpjax.quantize(params, policy)
        found["bytes"][form] = sum(x.nbytes for x in jax.tree.leaves(small))
        plain = mpjax.dequantize(small)
        found["score"][form] = task("lm").score(state._replace(params=plain))
        rows = jax.tree_util.tree_leaves_with_path(params)
        for (path, x), y in zip(rows, jax.tree.leaves(plain), strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if (x != y).any():
                layer = found["layers"].setdefault(name, {"shape": list(x.shape)})
                layer[form] = float(jnp.linalg.norm(x - y) / jnp.linalg.norm(x))
    return found


def maps(params: Any) -> dict[str, Any]:
    """Returns, by form, how much more the held-out loss of a trained language model is."""
    _, text = lm.load()
    count = len(text) // lm.TIME // HELD_OUT_SHARE * lm.TIME
    windows = np.stack([text[i : i + lm.TIME + 1] for i in range(0, count, lm.TIME)])
    policies: dict[str, Any] = {"bf16-mixed": "bf16-mixed"}
    for form, recipe in (("int8", INT8), ("float8", FLOAT8)):
        for name, kept in KEPT.items():
            rules = {**dict.fromkeys(kept, "bf16-mixed"), "*": recipe}
            policies[f"{form} {name}"] = mpjax.PolicyMap("bf16-mixed", rules)

    def losses(policy: Any) -> np.ndarray:
        run = jax.jit(mpjax.autocast(lm.loss_fn, policy))
        parts = np.array_split(windows, len(windows) // WINDOWS)
        return np.array([run(params, part) for part in parts if len(part) == len(parts[0])])

    exact = losses("32-true")
    forms = {}
    for form, policy in policies.items():
        off = losses(policy) - exact
        forms[form] = {"off": float(off.mean()), "error": float(off.std(ddof=1) / len(off) ** 0.5)}
    return {"windows": len(exact) * WINDOWS, "forms": forms}


def maps_table(found: dict[str, Any]) -> str:
    lines = [
        "## Which layers lose: the same network, its products in 8 bits\n",
        f"Held-out loss less that of float32, in 1/1000 of a nat a byte, ± its standard error over "
        f"{found['windows']} windows: the same weights in each row.\n",
        "| products in 8 bits | more than float32 |",
        "| --- | ---: |",
    ]
    for form, row in found["forms"].items():
        lines.append(f"| {form} | {1e3 * row['off']:+.2f} ± {1e3 * row['error']:.2f} |")
    return "\n".join(lines) + "\n"


def weights_table(found: dict[str, Any]) -> str:
    size, score = found["bytes"], found["score"]
    lines = [
        f"## Weights in 8 bits: lm after {found['steps']} steps in float32\n",
        "| | float32 | int8, a scale a channel | float8, a scale a channel |",
        "| --- | ---: | ---: | ---: |",
        "| bytes | " + " | ".join(f"{n:,} ({size['float32'] / n:.2f} ×)" for n in size.values()),
        "| held-out loss | " + " | ".join(f"{x:.5f}" for x in score.values()),
        "",
        "| relative error of | shape | int8 | float8 |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, row in found["layers"].items():
        lines.append(f"| {name} | {row['shape']} | {row['int8']:.2%} | {row['float8']:.2%} |")
    return "\n".join(lines) + "\n"


# -- time on this CPU ----------------------------------------------------------------------------


def timings() -> dict[str, float]:
    """Returns seconds of one layer's product, forward only, of rows that were given in float32."""
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    kernels = [jax.random.normal(jax.random.key(i), (SIZE, SIZE)) / SIZE**0.5 for i in range(3)]

    def layers(kernels: Any, x: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = jax.nn.relu(x @ kernel)
        return x

    def step(policy: Any, params: Any) -> Step:
        run = jax.jit(mpjax.autocast(layers, policy))

        def once() -> float:

            start = time.perf_counter()
            jax.block_until_ready(run(params, x))
            return time.perf_counter() - start

        return once

    everywhere = {
        name: mpjax.PolicyMap("bf16-mixed", {"*": p})
        for name, p in (("int8", INT8), ("float8", FLOAT8))
    }
    steps = {
        "float32": step("32-true", kernels),
        "bf16": step("bf16-mixed", kernels),
        "int8": step(everywhere["int8"], kernels),
        "int8, weights stored so": step(everywhere["int8"], mpjax.quantize(kernels, INT8)),
        "float8": step(everywhere["float8"], kernels),
    }
    return interleaved(steps, ROUNDS)


def timings_table(found: dict[str, float]) -> str:
    lines = [
        f"## Time on this CPU: three layers of {SIZE} × {SIZE}, {SIZE} rows, forward\n",
        f"Median of {ROUNDS} rounds in which the forms take turns.\n",
        "| products | ms | × float32 |",
        "| --- | ---: | ---: |",
    ]
    for form, seconds in found.items():
        lines.append(f"| {form} | {seconds * 1e3:.1f} | {seconds / found[BASE]:.2f} |")
    return "\n".join(lines) + "\n"


ABOUT = """\
Mean ± standard deviation over seeds; the training loss of a run is the mean over its last 10 % of
steps. off: how far the mean lies from float32's, in standard deviations (sd) of float32's own
seeds; and the mean difference of runs with the same seed, ± its standard error. within: loss and
score both at most one sd off, and between float32's best and worst seed. First and last layer stay
in bfloat16 but for "everywhere"; convolutions do in any case. On a CPU 8-bit values and scales are
exactly those of an accelerator; sums of float8 products are float32's.
"""


def write(data: dict[str, Any]) -> None:
    done = [name for name in TASKS if name in data.get("training", {})]
    blocks = [training_table(name, data["training"][name]) for name in done]
    if "weights" in data:
        blocks += [weights_table(data["weights"]), maps_table(data["weights"]["maps"])]
    if "timings" in data:
        blocks.append(timings_table(data["timings"]))
    made = "\n".join(f"- {part}: {about}" for part, about in data["made"].items())
    head = f"# Eight bits: where training ends, what weights lose, how fast it is\n\n{ABOUT}\n"
    OUT.write_text(head + "\n".join(blocks) + f"\n## Made by\n\n{made}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=words(TASKS), default=list(TASKS))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    store = OUT.with_suffix(".json")
    data = json.loads(store.read_text()) if store.exists() else {"made": {}, "training": {}}
    command = " ".join(["python", "benchmarks/eight_bits.py", *sys.argv[1:]])
    about = f"`{command}`, {machine.made()}; on {machine.cpu()}."
    if "timings" in options.parts:
        data["timings"] = timings()
        data["made"]["timings"] = about
    for name in options.tasks if "training" in options.parts else ():
        steps, forms = TASKS[name]
        entry = data["training"].setdefault(name, {"runs": {}, "steps": steps})
        data["made"][name] = about
        for form in (form for form in forms if form in options.forms):
            entry["runs"][form] = [end for _, end in train(name, form, steps, range(options.seeds))]
            print(name, form, [round(end["loss"], 4) for end in entry["runs"][form]], flush=True)
            store.write_text(json.dumps(data, indent=1) + "\n")
    if "weights" in options.parts:
        data["weights"] = weights(TASKS["lm"][0])
        data["made"]["weights"] = about
    store.write_text(json.dumps(data, indent=1) + "\n")
    write(data)


if __name__ == "__main__":
    main()
