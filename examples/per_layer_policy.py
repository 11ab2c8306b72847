"""A policy for each layer, as Keras' DTypePolicyMap has it: `python examples/per_layer_policy.py`.

In Keras:                                       Here:

  policies = DTypePolicyMap("mixed_bfloat16")     policies = PolicyMap("mixed_bfloat16", {
  policies["norm.*"] = DTypePolicy("float32")         "re:norm.*": "float32",
  policies["head"] = DTypePolicy("float32")           "head": "float32"})
  model = Model(dtype=policies)                   model = with_policy(Model(), policies)

The model need not hand a dtype down, and a rule that matches nothing says so. The same map serves

  mpjax.linen.with_policy, mpjax.nnx.set_policy    modules by path
  mpjax.make_train_step, mpjax.autocast            operations by the path of their module
  policies.cast_to_compute, policies.cast_to_param leaves of a pytree by their path

What one sees: one layer of this model sums the squares of an image, which passes float16's 65504,
so that all in float16 gives inf from the first step on, and no loss scale can help. One rule for
that one layer is enough. bfloat16 has float32's range and 8 bits: it is right to 1 %.
"""

import argparse
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box, print
from rich.table import Table
from sklearn.datasets import load_digits

import mpjax
import mpjax.linen

MAPS = {
    "float32": mpjax.PolicyMap("float32"),
    "all float16": mpjax.PolicyMap("mixed_float16"),
    "float16, energy in float32": mpjax.PolicyMap("mixed_float16", {"energy": "float32"}),
    "bfloat16": mpjax.PolicyMap("mixed_bfloat16"),
    "bfloat16, norms and head in float32": mpjax.PolicyMap(
        "mixed_bfloat16", {"re:norm_.*": "float32", "head": "float32"}
    ),
}


class Energy(nn.Module):
    """The sum of squares of each row: fine in float32, soon too large for float16."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns one number a row."""
        x = x.astype(self.dtype or x.dtype)
        return jnp.sum(x * x, axis=-1, keepdims=True, dtype=x.dtype)


class Model(nn.Module):
    """Two layers and a head, which also sees how much light there is in the image."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of images f32[n, 64] with values from 0 to 255."""
        energy = Energy(name="energy")(x)
        x = x / 255
        for index in range(2):
            x = nn.Dense(64, name=f"dense_{index}")(x)
            x = nn.gelu(nn.LayerNorm(name=f"norm_{index}")(x))
        light = jnp.log(energy.astype(jnp.float32) + 1) / 10
        return nn.Dense(10, name="head")(jnp.concatenate([x, light.astype(x.dtype)], axis=-1))


# Parameters are the same for all of these policies, which store them in float32.
init = jax.jit(Model().init)
exact = jax.jit(Model().apply)


def train(policies: mpjax.PolicyMap, steps: int, data: Any) -> tuple[Any, Any, int]:
    """Returns the model, its trained variables and how many steps were skipped."""
    images, labels = data
    model = mpjax.linen.with_policy(Model(), policies)
    params = init(jax.random.key(0), images[:1])["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    # The modules cast for themselves: the step only scales the loss where they need it.
    loss_scale = mpjax.get_loss_scale(policies)
    tx = optax.sgd(0.1, momentum=0.9)
    step = mpjax.make_train_step(loss_fn, tx, "float32", loss_scale=loss_scale)
    state, rng, metrics = step.init(params), np.random.default_rng(0), {}
    for _ in range(steps):
        chosen = rng.integers(len(labels), size=128)
        state, metrics = step(state, (images[chosen], labels[chosen]))
    return model, state.params, int(metrics["skipped_steps"])


def compare(steps: int, data: Any) -> Table:
    images, labels = data
    table = Table(title=f"{steps} steps under five policies", box=box.SIMPLE_HEAD)
    for head in ("policy", "accuracy", "skipped", "largest error of a logit"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for name, policies in MAPS.items():
        model, params, skipped = train(policies, steps, data)
        logits = jax.jit(model.apply)({"params": params}, images)
        wanted = exact({"params": params}, images)
        error = float(jnp.abs(logits - wanted).max() / jnp.abs(wanted).max())
        accuracy = float((logits.argmax(-1) == labels).mean())
        shown = f"{error:.2%}" if np.isfinite(error) else "[red]not finite"
        table.add_row(name, f"{accuracy:.1%}", f"{skipped}", shown)
    return table


def mistyped(images: np.ndarray) -> str:
    """Returns what is said of a rule that matches nothing."""
    policies = mpjax.PolicyMap("mixed_bfloat16", {"Norm_0": "float32"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mpjax.PolicyWarning)
        jax.eval_shape(mpjax.linen.with_policy(Model(), policies).init, jax.random.key(0), images)
    return "\n".join(str(warning.message) for warning in caught)


def positive(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; type a whole number from 1 to 2^31 - 1.")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--steps", type=positive, default=150, help="of a run (default: 150)")
    steps = parser.parse_args().steps
    digits = load_digits()
    data = (digits.data * 255 / 16).astype(np.float32), digits.target.astype(np.int32)
    chosen = MAPS["bfloat16, norms and head in float32"]
    print(mpjax.linen.tabulate(mpjax.linen.with_policy(Model(), chosen), data[0][:1]))
    print(compare(steps, data))
    print(mistyped(data[0][:1]))


if __name__ == "__main__":
    main()
