"""What `diagnose` costs beside the step: `python benchmarks/numerics.py`.

For three networks (value and gradient under "16-mixed"): seconds to compile and to run, and XLA's
own count of temporaries, of the loss and its gradients, and of its instrumented twin. Medians of
five runs; compile times are processor time. A step that is not diagnosed holds none of it.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def measured(fun: Any, args: Any) -> tuple[float, float, int]:
    started = time.process_time()
    compiled = jax.jit(fun).lower(*args).compile()
    compiling = time.process_time() - started
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - started)
    memory = compiled.memory_analysis()
    return (
        compiling,
        float(np.median(times)),
        memory.temp_size_in_bytes + memory.output_size_in_bytes,
    )


def main() -> None:
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    print("| network | rows | compile, s | × | run, ms | × | temporaries, MB | × |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (loss, params, x) in cases().items():
        subject, scale = _subject.of_loss(
            loss, "16-mixed", 1024.0, has_aux=False, where="benchmark"
        )
        given = [jnp.float32(scale.loss_scale), params, x]
        program = Program(subject.make(mpjax.get_policy("16-mixed")), given, "spx", "benchmark")
        arrays = program.arrays(given)
        plain = measured(jax.extend.core.jaxpr_as_fun(program.jaxpr), arrays)
        twin = measured(program.twin(Overflow()), arrays)
        ratios = [b / a for a, b in zip(plain, twin, strict=True)]
        cells = (
            f"{twin[0]:.1f} | {ratios[0]:.1f}",
            f"{1e3 * twin[1]:.0f} | {ratios[1]:.1f}",
            f"{twin[2] / 1e6:.1f} | {ratios[2]:.2f}",
        )
        print(f"| {name} | {len(program.plan.sites)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
