"""Random moves, layers and losses, traced and not run: autocast refuses none, nor its gradient.

A group may move a value before it is widened, compute a part of it, or store it twice. Where the
dtypes of two such values do not meet, JAX raises while it traces; so nothing need be compiled.
"""

import random

import jax
import jax.numpy as jnp
import optax
import pytest
from _samples import integers, normal
from jax import lax

import mpjax

WIDTH = 16
X, LABELS = normal(0, 4, 6, WIDTH), integers(1, WIDTH, 400)
WEIGHTS = [normal(i, WIDTH, WIDTH, scale=0.25) for i in (2, 3)]
BIASES = [normal(i, WIDTH) for i in (4, 5)]


def _halves(z):
    first, second = jnp.split(z, 2, -1)
    return jnp.concatenate([second, first], -1)


# Of arrays of three axes, the last one of WIDTH.
MOVES = {
    "all but the last": lambda z: z[:, :-1] if z.shape[1] > 2 else z,
    "all but the first": lambda z: z[1:] if z.shape[0] > 2 else z,
    "every second": lambda z: z[:, ::2],
    "transposed": lambda z: z.swapaxes(0, 1),
    "one sequence": lambda z: z.reshape(1, -1, WIDTH),
    "heads": lambda z: z.reshape(*z.shape[:2], 4, 4).swapaxes(2, 3).reshape(z.shape),
    "reversed": lambda z: z[:, ::-1],
    "halves swapped": _halves,
    "padded": lambda z: jnp.pad(z, [(0, 0), (1, 1), (0, 0)]),
    "rolled": lambda z: jnp.roll(z, 1, 1),
    "repeated": lambda z: jnp.repeat(z, 2, 1),
    "joined": lambda z: jnp.concatenate([z, z[:1]]),
    "gathered": lambda z: z[:, jnp.arange(3) % z.shape[1]],
    "sorted by a sum": lambda z: jnp.take_along_axis(z, jnp.argsort(z.sum(-1), 1)[..., None], 1),
    "updated": lambda z: lax.dynamic_update_slice(z, 2 * z[:1], (0, 0, 0)),
    "a row set": lambda z: z.at[0].set(z[-1]),
    "a column added": lambda z: z.at[:, 0].add(z[:, -1]),
}
LAYERS = {
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gated": lambda z: jnp.tile(jax.nn.silu(z[..., :8]) * z[..., 8:], 2),
    "a layer norm": jax.nn.standardize,
    "a batch norm": lambda z: (z - z.mean((0, 1))) * lax.rsqrt(z.var((0, 1)) + 1e-5),
    "a softmax": jax.nn.softmax,
    "a maximum": lambda z: jnp.where(z == z.max(1, keepdims=True), z, 0.0),
    "a residual": lambda z: z + jnp.tanh(z),
    "squeezed": lambda z: z * jax.nn.sigmoid(z.mean(1, keepdims=True)),
    "a running sum": lambda z: 0.1 * jnp.cumsum(z, 1),
    "a checkpoint": jax.checkpoint(jax.nn.gelu),
    "mapped": jax.vmap(jax.nn.standardize),
    "a scan": lambda z: lax.scan(lambda c, x: (0.5 * c + x, c), 0 * z[0], z)[1],
}
LOSSES = {
    "squares": lambda z, y: jnp.mean((z - 1) ** 2),
    "a cross-entropy": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean(),
    "log-probabilities": lambda z, y: jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)
    ),
    "mapped picks": lambda z, y: jax.vmap(lambda row, i: jax.nn.log_softmax(row)[i])(z, y).mean(),
    "picks by two indices": lambda z, y: jnp.mean(jnp.exp(z[jnp.arange(len(y)), y])),
    "rows by labels": lambda z, y: jnp.mean((z[y[:8] % len(z)] - 1) ** 2),
    "similarities": lambda z, y: -jnp.mean(jax.nn.log_softmax(z @ z.T)[0]),
}


def _program(chosen):
    """A loss of one or two layers, with up to three steps behind each; and what it is made of."""
    layers = [
        (chosen.random() < 0.5, [_step(chosen) for _ in range(chosen.randint(1, 3))])
        for _ in range(chosen.randint(1, 2))
    ]
    loss = chosen.choice(list(LOSSES))

    def fun(weights, biases, x, labels):
        for (has_bias, steps), w, b in zip(layers, weights, biases, strict=False):
            x = x @ w + b if has_bias else x @ w
            for step in steps:
                x = (MOVES | LAYERS)[step](x)
        rows = x.reshape(-1, WIDTH)
        return LOSSES[loss](rows, labels[: len(rows)])

    return fun, (layers, loss)


def _step(chosen):
    return chosen.choice(list(MOVES if chosen.random() < 0.75 else LAYERS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_no_move_between_layers_makes_dtypes_differ(seed):
    chosen = random.Random(seed)
    args = WEIGHTS, BIASES, X, LABELS
    for _ in range(15):
        fun, made_of = _program(chosen)
        policy = chosen.choice(["bf16-mixed", "16-mixed"])
        outside, inside = (
            jax.grad(mpjax.autocast(fun, policy)),
            mpjax.autocast(jax.grad(fun), policy),
        )
        for gradient in (outside, inside):
            try:
                got = jax.eval_shape(gradient, *args)
            except TypeError as error:
                pytest.fail(f"{made_of} under {policy}: {error}")
            assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}
