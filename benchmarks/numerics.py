"""What `mpjax.numerics` costs, and what `suggest` finds: `python benchmarks/numerics.py`.

For three networks: a train step (AdamW, "16-mixed"), and the instrumented twin that its diagnosis
runs: seconds to trace and compile (processor time), milliseconds to run (median of nine), and the
peak of memory by XLA's own count, with the state that is held either way. Then what `watch=100`
costs by the clock, and what `suggest` finds for two networks. Name parts to run only them.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure.suggested import exact_gradients, language_model, worst_error
from networks import NETWORKS

import mpjax
from mpjax import numerics
from mpjax.numerics import _subject
from mpjax.numerics._overflow import Overflow
from mpjax.numerics._program import LossProgram


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    with jax.named_scope("attention"):
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(h @ p["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 16) @ v
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def transformer(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params)
    return jnp.mean(x**2)


def convolutional(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"conv_{i}"):
            x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=_IMAGES)
            mean = jnp.mean(x, (0, 1, 2))
            x = jax.nn.relu((x - mean) / jnp.sqrt(jnp.var(x, (0, 1, 2)) + 1e-5))
    return jnp.mean(x**2)


_IMAGES = ("NHWC", "HWIO", "NHWC")


def cases(network: str) -> dict[str, tuple[Any, Any, Any]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32) * 0.05)

    layers = {"qkv": normal(4, 256, 768), "up": normal(4, 256, 1024), "down": normal(4, 1024, 256)}
    found = {
        "MLP, 6 layers of 512": (mlp, [normal(512, 512) for _ in range(6)], normal(512, 512)),
        "transformer, scan over 4 blocks of 256": (transformer, layers, normal(8, 128, 256)),
        "CNN, 4 layers of 32": (
            convolutional,
            [normal(3, 3, 3 if i == 0 else 32, 32) for i in range(4)],
            normal(8, 32, 32, 3),
        ),
    }
    return {name: case for name, case in found.items() if name.startswith(network)}


def measured(fun: Any, args: Any) -> tuple[float, float, Any]:
    started = time.process_time()
    compiled = fun.lower(*args).compile()
    compiling = time.process_time() - started
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(9):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - started)
    return compiling, float(np.median(times)), compiled.memory_analysis()


def diagnosis(network: str) -> None:
    print("| network | rows | compile, s | × | run, ms | × | peak, MB | × |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (loss, params, x) in cases(network).items():
        step = mpjax.make_train_step(loss, optax.adamw(1e-3), "16-mixed", donate=False)
        state = step.init(params)
        subject, scale = _subject.of_loss(
            loss, "16-mixed", 1024.0, has_aux=False, where="benchmark"
        )
        given = [jnp.float32(scale.loss_scale), params, x]
        program = LossProgram(subject.make(mpjax.get_policy("16-mixed")), given, "spx", "benchmark")
        plain = measured(step, (state, x))
        twin = measured(jax.jit(program.twin(Overflow())), program.arrays(given))
        # The state and the batch are there all the time, the moments too.
        held = plain[2].argument_size_in_bytes
        peaks = [held + m.temp_size_in_bytes + m.output_size_in_bytes for *_, m in (plain, twin)]
        cells = (
            f"{plain[0]:.1f} → {twin[0]:.1f} | {twin[0] / plain[0]:.1f}",
            f"{1e3 * plain[1]:.0f} → {1e3 * twin[1]:.0f} | {twin[1] / plain[1]:.1f}",
            f"{peaks[0] / 1e6:.1f} → {peaks[1] / 1e6:.1f} | {peaks[1] / peaks[0]:.2f}",
        )
        print(f"| {name} | {len(program.plan.sites)} | {' | '.join(cells)} |", flush=True)


def healthy(network: str) -> None:
    """What a step pays that is not diagnosed, by XLA's counts."""
    print("| network | step | MB accessed | temporaries, MB |")
    print("| --- | --- | --- | --- |")
    for name, (loss, params, x) in cases(network).items():
        for kind in ("plain", "diagnosed"):
            step = mpjax.make_train_step(loss, optax.adamw(1e-3), "16-mixed", donate=False)
            state = step.init(params)
            if kind == "diagnosed":
                step.diagnose(state, x)
            compiled = step.lower(state, x).compile()
            accessed = compiled.cost_analysis()["bytes accessed"]
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            print(f"| {name} | {kind} | {accessed / 1e6:.3f} | {temporaries / 1e6:.3f} |")


SECONDS, STEPS = 360, 4


def in_turn(steps: list[Any], start: Any, x: Any) -> np.ndarray:
    """Returns seconds a step, (rounds, steps): some of each in a row, in an order drawn each round.

    Rounds are short, so that what else the machine does meets all alike. Each step trains a state
    of its own, donated; the first that a round takes warms the caches, and is not timed.
    """
    states = [jax.tree.map(jnp.copy, start) for _ in steps]
    rounds, rng, begun = [], np.random.default_rng(0), time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        rounds.append(np.zeros(len(steps)))
        for which in rng.permutation(len(steps)):
            step, (state, _) = steps[which], jax.block_until_ready(steps[which](states[which], x))
            since = time.perf_counter()
            for _ in range(STEPS):
                state, _ = jax.block_until_ready(step(state, x))
            rounds[-1][which] = (time.perf_counter() - since) / STEPS
            states[which] = state
    return np.array(rounds[1:])  # the very first step looks


def looking(step: Any, start: Any, x: Any) -> tuple[float, int]:
    """Returns the median seconds of a step that looks, and of how many modules it tells."""
    times = []
    for _ in range(9):
        state = jax.block_until_ready(jax.tree.map(jnp.copy, start))
        begun = time.perf_counter()
        _, metrics = jax.block_until_ready(step(state, x))
        times.append(time.perf_counter() - begun)
    return float(np.median(times)), sum(len(modules) for _, modules in metrics["watched"].rows)


def interval(more: np.ndarray) -> str:
    """Returns the median of what rounds took more, and 95 % of such medians drawn again, in %."""
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(more, len(more))) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{100 * np.median(more):.2f} ({100 * low:.2f} to {100 * high:.2f})"


def watched(network: str) -> None:
    """What `watch=100` costs, by the clock, in steps that donate their state."""
    heads = "values", "plain, ms", "plain again, %", "not looking, %", "looking, ms", "of 100, %"
    print(f"| network | {' | '.join(heads)} |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (loss, params, x) in cases(network).items():
        # One that looks once in a million steps is the program of `watch=100` at its 99 others.
        steps = [
            mpjax.make_train_step(loss, optax.adamw(1e-3), "16-mixed", watch=watch)
            for watch in (None, None, 1_000_000)
        ]
        start = steps[0].init(params)
        compiled = [step.lower(start, x).compile() for step in steps]
        times = in_turn(compiled, start, x)
        both = times[:, :2].mean(1)
        plain = float(np.median(both))
        seconds, values = looking(compiled[2], start, x)
        again, not_looking = times[:, 1] / times[:, 0] - 1, times[:, 2] / both - 1
        of_hundred = 99 / 100 * np.median(not_looking) + (seconds / plain - 1) / 100
        cells = (
            f"{values} | {1e3 * plain:.1f} | {interval(again)} | {interval(not_looking)}",
            f"{1e3 * seconds:.1f} | {100 * of_hundred:.2f}",
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def suggested(network: str) -> None:
    """What `suggest` finds, and the gradients' errors under it, as XLA compiles for users."""
    unet = NETWORKS["unet"]("tiny")
    drawn = unet.init(jax.random.key(0)), unet.sample(jax.random.key(1))
    networks = {
        "lm.py, 2 layers of 32": language_model(),
        "U-Net, tiny": (unet.written(jnp.float32), *drawn),
    }
    print(
        "| network | asked | answer | in float32 | low | bytes kept | all low | found | policies |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, (loss, params, x)), asked in zip(networks.items(), (0.01, 0.0095), strict=True):
        if not name.startswith(network):
            continue
        exact = exact_gradients(loss, params, x)
        for reverse in (False, True):
            search = numerics.suggest(loss, "bf16-mixed", tolerance=asked, reverse=reverse)
            found = search(params, x)
            low, error = (
                worst_error(loss, policy, params, x, exact, found.noise)
                for policy in ("bf16-mixed", found.policy)
            )
            kept = " / ".join(
                f"{found.kept[key] / 1e3:.0f}" for key in ("low", "suggested", "float32")
            )
            cells = (
                f"{asked:g} | {'what may go low' if reverse else 'what stays'} | {len(found.full)}",
                f"{len(found.low)} | {kept} | {low:.4f} | {error:.4f} | {len(found.tried)}",
            )
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


PARTS = {f.__name__: f for f in (diagnosis, healthy, watched, suggested)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--network", default="", help="only those whose names begin so: CNN")
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    given = parser.parse_args()
    for part in given.parts:
        PARTS[part](given.network)


if __name__ == "__main__":
    main()
