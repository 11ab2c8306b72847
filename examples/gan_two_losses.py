"""Two networks, two optimizers, two loss scales, in float16: `python examples/gan_two_losses.py`.

A generator and a discriminator are trained in one jitted step. Each has an optimizer of its own,
and with it a loss scale of its own: where Apex has `loss_id`, and PyTorch a GradScaler for each,
here the scale is part of the optimizer state that it belongs to.

  d_tx = mpjax.with_loss_scale(optax.adam(...), mpjax.DynamicLossScale(2.0**12))
  g_tx = mpjax.with_loss_scale(optax.adam(...), mpjax.DynamicLossScale(2.0**24))
  mpjax.current_loss_scale(state.d_opt), mpjax.current_loss_scale(state.g_opt)

The generator's starts far too large, on purpose. Its first steps overflow and are skipped, its
scale is halved until they fit; the discriminator, whose scale is right, misses none of its own.

The data are points on a ring; the picture shows them, what the generator makes of noise, and the
two loss scales.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import box, print
from rich.table import Table

import mpjax

BATCH = 256
NOISE = 8


class State(NamedTuple):
    """Parameters and optimizer states of the discriminator and the generator."""

    d_params: Any
    d_opt: Any
    g_params: Any
    g_opt: Any


def init_mlp(key: jax.Array, widths: tuple[int, ...]) -> Any:
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths[:-1], widths[1:], strict=True)
    return [
        {"w": jax.random.normal(k, (n, m)) * jnp.sqrt(2 / n), "b": jnp.zeros(m)}
        for k, n, m in pairs
    ]


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ params[-1]["w"] + params[-1]["b"]


def ring(key: jax.Array) -> jax.Array:
    """Returns points near a circle of radius 2."""
    angle_key, noise_key = jax.random.split(key)
    angle = jax.random.uniform(angle_key, (BATCH,), maxval=2 * jnp.pi)
    circle = 2 * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return circle + 0.1 * jax.random.normal(noise_key, circle.shape)


def d_loss(d_params: Any, g_params: Any, real: jax.Array, noise: jax.Array) -> jax.Array:
    fake = jax.lax.stop_gradient(mlp(g_params, noise))
    on_real, on_fake = mlp(d_params, real), mlp(d_params, fake)
    return jnp.mean(jax.nn.softplus(-on_real)) + jnp.mean(jax.nn.softplus(on_fake))


def g_loss(g_params: Any, d_params: Any, noise: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.softplus(-mlp(d_params, mlp(g_params, noise))))


def make_training(policy: str) -> tuple[Any, Any]:
    """Returns a function that makes the state, and the step."""
    adam = optax.adam(1e-3, b1=0.5)
    d_tx = mpjax.with_loss_scale(adam, mpjax.DynamicLossScale(2.0**12, growth_interval=200))
    g_tx = mpjax.with_loss_scale(adam, mpjax.DynamicLossScale(2.0**24, growth_interval=200))

    def init(key: jax.Array) -> State:
        d_key, g_key = jax.random.split(key)
        d_params, g_params = init_mlp(d_key, (2, 64, 64, 1)), init_mlp(g_key, (NOISE, 64, 64, 2))
        return State(d_params, d_tx.init(d_params), g_params, g_tx.init(g_params))

    def descend(loss: Any, tx: Any, params: Any, opt_state: Any, *rest: Any) -> Any:
        scale = mpjax.current_loss_scale(opt_state)
        differentiate = mpjax.value_and_grad(mpjax.autocast(loss, policy), loss_scale=scale)
        value, grads = differentiate(params, *rest)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    @jax.jit
    def step(state: State, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        real_key, d_key, g_key = jax.random.split(key, 3)
        real = ring(real_key)
        noise = jax.random.normal(d_key, (BATCH, NOISE))
        d_params, d_opt, d_value = descend(
            d_loss, d_tx, state.d_params, state.d_opt, state.g_params, real, noise
        )
        noise = jax.random.normal(g_key, (BATCH, NOISE))
        g_params, g_opt, g_value = descend(
            g_loss, g_tx, state.g_params, state.g_opt, d_params, noise
        )
        metrics = {"discriminator": d_value, "generator": g_value}
        scales = {"d_scale": d_opt.loss_scale, "g_scale": g_opt.loss_scale}
        return State(d_params, d_opt, g_params, g_opt), metrics | scales

    return init, step


def draw(points: np.ndarray, history: dict[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    real = np.asarray(ring(jax.random.key(7)))
    left.plot(*real.T, ".", color="gray", markersize=3, label="data")
    left.plot(*points.T, ".", color="#0072b2", markersize=3, label="generator")
    left.set(title="What the generator makes of noise", aspect="equal")
    right.step(range(len(history["d_scale"])), history["d_scale"], label="discriminator")
    right.step(range(len(history["g_scale"])), history["g_scale"], label="generator")
    right.set(title="Two loss scales", xlabel="step")
    right.set_yscale("log", base=2)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(framealpha=0.9, edgecolor="none")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def positive(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 1 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=2000, help="of the run (default: 2000)")
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="of gan_two_losses.png")
    arguments = parser.parse_args()
    init, step = make_training("16-mixed")
    state, seen = init(jax.random.key(0)), []
    for key in jax.random.split(jax.random.key(1), arguments.steps):
        state, metrics = step(state, key)
        seen.append(metrics)
    history = jax.tree.map(lambda *values: np.array(values), *seen)
    noise = jax.random.normal(jax.random.key(2), (BATCH, NOISE))
    points = np.asarray(mlp(state.g_params, noise))
    table = Table(title=f"{arguments.steps} steps of a GAN in float16", box=box.SIMPLE_HEAD)
    for head in ("network", "loss", "loss scale", "at first", "skipped"):
        table.add_column(head, justify="left" if head == "network" else "right")
    for name, opt, first in (("discriminator", state.d_opt, 12), ("generator", state.g_opt, 24)):
        loss, now = history[name][-100:].mean(), np.log2(opt.loss_scale)
        table.add_row(name, f"{loss:.3f}", f"2^{now:.0f}", f"2^{first}", f"{opt.skipped_steps}")
    print(table)
    radius = np.linalg.norm(points, axis=1)
    print(f"The points made have radius {radius.mean():.2f} ± {radius.std():.2f}; the ring's is 2.")
    draw(points, history, arguments.out / "gan_two_losses.png")
    print(f"See {arguments.out / 'gan_two_losses.png'}.")


if __name__ == "__main__":
    main()
