"""What `diagnose` costs beside the step: `python benchmarks/numerics.py`.

For three networks: a train step (AdamW, "16-mixed"), and the instrumented twin that its diagnosis
runs: seconds to trace and compile (processor time), milliseconds to run (median of nine), and the
peak of memory by XLA's own count, with the state that is held either way.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from mpjax.numerics import _subject
from mpjax.numerics._overflow import Overflow
from mpjax.numerics._program import Program


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


def cases() -> dict[str, tuple[Any, Any, Any]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32) * 0.05)

    layers = {"qkv": normal(4, 256, 768), "up": normal(4, 256, 1024), "down": normal(4, 1024, 256)}
    return {
        "MLP, 6 layers of 512": (mlp, [normal(512, 512) for _ in range(6)], normal(512, 512)),
        "transformer, scan over 4 blocks of 256": (transformer, layers, normal(8, 128, 256)),
        "CNN, 4 layers of 32": (
            convolutional,
            [normal(3, 3, 3 if i == 0 else 32, 32) for i in range(4)],
            normal(8, 32, 32, 3),
        ),
    }


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


def diagnosis() -> None:
    print("| network | rows | compile, s | × | run, ms | × | peak, MB | × |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (loss, params, x) in cases().items():
        step = mpjax.make_train_step(loss, optax.adamw(1e-3), "16-mixed", donate=False)
        state = step.init(params)
        subject, scale = _subject.of_loss(
            loss, "16-mixed", 1024.0, has_aux=False, where="benchmark"
        )
        given = [jnp.float32(scale.loss_scale), params, x]
        program = Program(subject.make(mpjax.get_policy("16-mixed")), given, "spx", "benchmark")
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


KINDS = (("plain", None), ("diagnosed", None), ("watch=1", 1), ("watch=100", 100))


def healthy() -> None:
    """What a step pays that is not diagnosed: by XLA's counts, and `watch=` by the clock."""
    print("| network | step | MB accessed | temporaries, MB | watched step, ms more | in 100, % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (loss, params, x) in cases().items():
        times: list[float] = []
        for kind, watch in KINDS:
            step = mpjax.make_train_step(
                loss, optax.adamw(1e-3), "16-mixed", donate=False, watch=watch
            )
            state = step.init(params)
            if kind == "diagnosed":
                step.diagnose(state, x)
            _, seconds, memory = measured(step, (state, x))
            times.append(seconds)
            accessed = step.lower(state, x).compile().cost_analysis()["bytes accessed"]
            more = 1e3 * (times[2] - min(times[:2])) if watch == 1 else None
            share = None if more is None else more / 1e3 / min(times[:2])
            cells = f"{accessed / 1e6:.3f} | {memory.temp_size_in_bytes / 1e6:.3f}"
            told = " | " if share is None else f"{more:.1f} | {share:.2f}"
            print(f"| {name} | {kind} | {cells} | {told} |", flush=True)


def main() -> None:
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    diagnosis()
    healthy()


if __name__ == "__main__":
    main()
