"""An Equinox model as it is, in five precisions: `python examples/equinox_mlp.py`.

To mpjax an Equinox module is what it is to JAX: a pytree. Nothing of it is known or patched:

  params, static = eqx.partition(model, eqx.is_inexact_array)   as every Equinox user does
  step = mpjax.make_train_step(loss_fn, tx, "16-mixed")         loss_fn combines the two again
  model = policies.cast_to_compute(model)                       or cast it yourself, by attribute

The last of these is the row "cast by hand": a layer computes in the dtype of its weights, so that
a PolicyMap whose rule names the attribute 'layers/3' keeps that layer in float32. What flows
between the others is bfloat16 then, activation functions included, where autocast lowers the
operands of products alone: that is the difference in loss. "bf16-true" holds weights in bfloat16
too, which have 8 bits: an update of less than 1/512 of a weight is lost, unless rounding= says
"stochastic" or "kahan".
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich import box, print
from rich.table import Table

import mpjax

BY_HAND = mpjax.PolicyMap("bf16-mixed", {"layers/3": "float32"})
PRECISIONS = {
    "32-true": ("32-true", None),
    "bf16-mixed": ("bf16-mixed", None),
    "16-mixed": ("16-mixed", None),
    "cast by hand": ("32-true", BY_HAND),
    "bf16-true": ("bf16-true", None),
}


def target(x: jax.Array) -> jax.Array:
    return jnp.sin(6 * x) * jnp.exp(-(x**2))


def make_loss(static: Any, policies: mpjax.PolicyMap | None) -> Any:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        inputs = x[:, None]
        if policies is not None:
            model = policies.cast_to_compute(model)
            inputs = policies.default.cast_to_compute(inputs)
        return jnp.mean((jax.vmap(model)(inputs)[:, 0].astype(jnp.float32) - target(x)) ** 2)

    return loss_fn


def train(policy: str, by_hand: mpjax.PolicyMap | None, steps: int) -> tuple[Any, np.ndarray, Any]:
    """Returns the fitted model, its losses, and the optimizer's state."""
    model = eqx.nn.MLP(1, 1, width_size=64, depth=3, activation=jax.nn.gelu, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    step = mpjax.make_train_step(make_loss(static, by_hand), tx, policy, rounding="nearest")
    state = step.init(params)
    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        state, metrics = step(state, jax.random.uniform(key, (256,), minval=-2, maxval=2))
        losses.append(metrics["loss"])
    return eqx.combine(state.params, static), np.array(losses), state.opt_state


def draw(fits: dict[str, tuple[Any, np.ndarray]], path: Path) -> None:
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    x = jnp.linspace(-2, 2, 400)
    left.plot(x, target(x), color="black", linewidth=1, label="target")
    for name, (model, losses) in fits.items():
        left.plot(x, jax.vmap(model)(x[:, None])[:, 0], linewidth=1.2, label=name)
        smooth = np.convolve(losses, np.full(10, 0.1), mode="valid") if len(losses) > 10 else losses
        right.plot(smooth, linewidth=1.2, label=name)
    left.set(title="The fit", xlabel="x")
    right.set(title="Training loss, mean of 10 steps", xlabel="step", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(framealpha=0.9, edgecolor="none", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def positive(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 1 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=500, help="of a run (default: 500)")
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="of equinox_mlp.png")
    arguments = parser.parse_args()
    table = Table(title="A function of one variable", box=box.SIMPLE_HEAD)
    for head in ("precision", "loss", "largest error", "weights kB", "loss scale", "skipped"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    fits = {}
    x = jnp.linspace(-2, 2, 400)
    for name, (policy, by_hand) in PRECISIONS.items():
        model, losses, opt_state = train(policy, by_hand, arguments.steps)
        fits[name] = model, losses
        error = float(jnp.abs(jax.vmap(model)(x[:, None])[:, 0] - target(x)).max())
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        scale = f"2^{np.log2(mpjax.current_loss_scale(opt_state).loss_scale):.0f}"
        cells = f"{losses[-50:].mean():.1e}", f"{error:.3f}", f"{size / 1e3:.1f}"
        table.add_row(name, *cells, scale, f"{int(opt_state.skipped_steps)}")
    print(table)
    draw(fits, arguments.out / "equinox_mlp.png")
    print(f"See {arguments.out / 'equinox_mlp.png'}.")


if __name__ == "__main__":
    main()
