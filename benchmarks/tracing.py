"""What tracing and lowering cost, by depth: `python benchmarks/tracing.py --out FILE`.

Transformer blocks, unrolled, and the gradient of their loss: in float32, cast by hand, and under
autocast, lowered for an accelerator that need not be there. Processor seconds, the least of a few
runs with JAX's caches cleared before each, and the size of the StableHLO text.
"""

import argparse
import gc
import pathlib
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp

import mpjax

WIDTH, HEADS, TOKENS = 64, 4, 32
POLICY = "bf16-mixed"


def normalised(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + shift


def block(p: Any, x: jax.Array) -> jax.Array:
    h = normalised(x, p["scale"], p["shift"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w) for w in p["qkv"])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["out"])
    h = normalised(x, p["scale"], p["shift"])
    return x + jax.nn.gelu(h @ p["up"] + p["bias"]) @ p["down"]


def loss(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = block(layer, x)
    return jnp.mean(x**2)


def cast_by_hand(layers: Any, x: jax.Array) -> jax.Array:
    layers, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (layers, x))
    return loss(layers, x).astype(jnp.float32)


def arguments(depth: int) -> tuple[Any, jax.Array]:
    def layer() -> Any:
        head = jnp.ones((WIDTH, HEADS, WIDTH // HEADS))
        up = jnp.ones((WIDTH, 4 * WIDTH))
        row = jnp.ones(WIDTH)
        parts = {"scale": row, "shift": row, "bias": jnp.ones(4 * WIDTH)}
        out = jnp.ones((HEADS, WIDTH // HEADS, WIDTH))
        return {"qkv": (head,) * 3, "out": out, "up": up, "down": up.T, **parts}

    return [layer() for _ in range(depth)], jnp.ones((2, TOKENS, WIDTH))


def measured(fun: Any, args: Any, target: str) -> tuple[float, float, int]:
    """Returns seconds to trace and to lower, and the size of the text in bytes."""
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    traced = jax.jit(jax.value_and_grad(fun)).trace(*args)
    middle = time.process_time()
    lowered = traced.lower(lowering_platforms=(target,))
    end = time.process_time()
    return middle - start, end - middle, len(lowered.as_text())


FUNCTIONS = {
    "float32": loss,
    "cast by hand": cast_by_hand,
    "autocast": mpjax.autocast(loss, POLICY),
}


def rows(depth: int, target: str, runs: int) -> list[str]:
    """Returns a row a program: the programs take turns, for a machine that others use too."""
    args = arguments(depth)
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in FUNCTIONS}
    for _ in range(runs):
        for name, fun in FUNCTIONS.items():
            found[name].append(measured(fun, args, target))
    best = {name: tuple(map(min, zip(*all_runs, strict=True))) for name, all_runs in found.items()}
    of_trace, of_lower, of_size = best["float32"]
    return [
        f"| {depth} | {name} | {trace:.2f} | {lower:.2f} "
        f"| {(trace + lower) / (of_trace + of_lower):.2f} | {size // 1000} | {size / of_size:.2f} |"
        for name, (trace, lower, size) in best.items()
    ]


def table(depths: list[int], target: str, runs: int) -> str:
    """Returns the table, with ratios to plain float32."""
    lines = [
        "| blocks | program | trace s | lower s | trace + lower | text kB | text |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for depth in depths:
        lines += rows(depth, target, runs)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", default="1,10,30,100")
    parser.add_argument("--target", default="cuda", choices=["cpu", "cuda", "tpu"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    depths = [int(depth) for depth in options.depths.split(",")]
    made = table(depths, options.target, options.runs)
    words = (
        f"Unrolled transformer blocks, the loss's gradient, lowered for `{options.target}`; JAX "
        f"{jax.__version__}, Python {platform.python_version()}; processor seconds, the least of "
        f"{options.runs}. Ratios are to plain float32.\n\n"
    )
    print(words + made)
    if options.out:
        options.out.write_text(words + made + "\n")


if __name__ == "__main__":
    main()
