"""For each hint a program that it is for, and one that is nearly that and that it leaves alone.

A row of `HINTED` also says on which platforms the lowered program of the gradients is another: all,
if the hint acts where a program is traced. `test_autocast_hints.py` holds every row to the same
laws, and `test_autocast_modes.py` leaves rows out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpjax import autocast
from mpjax._autocast.speed import centred, curves, hints, moves
from mpjax._autocast.speed import pooled as pooling

# The one door of tests to hints, and to those that have something to ask of themselves.
__all__ = ["ALL", "HINTED", "Hinted", "centred", "curves", "hints", "moves", "pooling"]

CPU, GPU, TPU = ("cpu",), ("cuda",), ("tpu",)
ALL = (*CPU, *GPU, *TPU)
_RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * _RNG.normal(size=shape)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Hinted:
    """A loss that a hint is for, one that it is not for, and where the first is changed by it."""

    loss: Callable[..., jax.Array]
    other: Callable[..., jax.Array]
    args: tuple[Any, ...]
    platforms: tuple[str, ...]
    policy: str = "bf16-mixed"

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.args)

    def gradients(self, loss: Callable[..., jax.Array] | None = None) -> Callable[..., Any]:
        """Returns the loss and its gradients under autocast, of which nothing is remembered."""
        loss = loss or self.loss
        low = autocast(lambda *args: loss(*args), self.policy)
        return jax.value_and_grad(low, tuple(range(len(self.args))))

    def texts(
        self, platforms: Sequence[str], loss: Callable[..., jax.Array] | None = None
    ) -> list[str]:
        """Returns the program of the gradients, lowered for platforms that need not be here."""
        jax.clear_caches()
        traced = jax.jit(self.gradients(loss)).trace(*self.args)
        return [traced.lower(lowering_platforms=(p,)).as_text() for p in platforms]


# -- operands and layers ---------------------------------------------------------------------------

X, W, BIAS = normal(32, 64), normal(64, 64, scale=0.125), normal(64, scale=0.1)
LABELS = np.arange(32, dtype=np.int32) * 3 % 64
PHOTOS, KERNEL, SHIFT = normal(4, 8, 8, 16), normal(3, 3, 16, 16, scale=0.1), normal(16, scale=0.1)
DENSE, IMAGES, ROWS = (W, BIAS, X), (KERNEL, SHIFT, PHOTOS), (normal(3, 2, 32, 3, 16),)


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))


def square(y: Any) -> Any:
    return jnp.mean(y**2)


def norm(y: Any, shift: Any, axes: Any = None) -> Any:
    """A norm over examples and places, or over rows (`axes=-1`)."""
    axes = tuple(range(y.ndim - 1)) if axes is None else axes
    mean = jnp.mean(y, axes, keepdims=True)
    var = jnp.mean(y * y, axes, keepdims=True) - mean**2
    return (y - mean) * (lax.rsqrt(var + 1e-5) * (1 + shift)) + shift


def dense(act: Any) -> Any:
    return lambda w, b, x: square(act(x @ w + b) @ w)


def normed(act: Any, axes: Any = None) -> Any:
    return lambda w, b, x: square(act(norm(x @ w, b, axes)) @ w)


def of_images(act: Any) -> Any:
    return lambda w, b, x: square(convolved(act(convolved(x, w), b, x), w))


def classified(pick: Any) -> Any:
    return lambda w, b, x: jnp.mean(pick(x @ w + b))


def cut(parts: Any) -> Any:
    """A gated layer: `parts` cuts the gate and what it lets through out of one product."""

    def loss(w, b, x):
        gate, through = parts(x @ w, b)
        return square((jax.nn.sigmoid(gate) * through) @ w[:32])

    return loss


def cell(w: Any, b: Any, x: Any) -> Any:
    """A recurrent cell: its gates are of the sum of two products."""

    def step(carry, given):
        h, c = carry
        i, f = jnp.split(given + h @ w[:32], 2, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i)
        h = jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((8, 32)), jnp.zeros((8, 32))
    return square(lax.scan(step, start, (x @ w + b).reshape(4, 8, 64))[1] @ w[:32])


def gate_of_one(w: Any, b: Any, x: Any) -> Any:
    return square(lax.scan(lambda h, _: (jnp.tanh(h @ w + b), None), x, None, 4)[0])


def stream(w: Any, b: Any, x: Any) -> Any:
    x = x @ w
    for _ in range(2):
        x = x + (jax.nn.gelu(norm(x, b, -1) @ w) @ w + b)
    return square(norm(x, b, -1) @ w)


def one_layer(w: Any, b: Any, x: Any) -> Any:
    return square(jnp.tanh(x @ w) @ w)


def attend(weigh: Any) -> Any:
    def loss(qkv):
        q, k, v = (x * jnp.float32(0.5) for x in qkv)
        return square(jnp.einsum("bhqk,bkhd->bqhd", weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v))

    return loss


def bounded(logits: Any) -> Any:
    return jnp.tanh(logits)


def dropped(logits: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, logits.shape)
    return jnp.where(kept, jax.nn.softmax(logits) / 0.9, 0)


def by_groups(w: Any, b: Any, x: Any) -> Any:
    y = x @ w
    parts = y.reshape(32, 4, 16)
    mean = parts.mean((0, -1), keepdims=True)
    scale = lax.rsqrt(((parts - mean) ** 2).mean((0, -1), keepdims=True) + 1e-5)
    mean, scale = (jnp.broadcast_to(v, (1, 4, 16)).reshape(1, 64) for v in (mean, scale))
    return square(jnp.tanh((y - mean) * scale) @ w)


def pooled(choose: Any, start: float) -> Any:
    def pool(y, b, x):
        window = (1, 2, 2, 1)
        return lax.reduce_window(y, np.asarray(start, y.dtype), choose, window, window, "VALID")

    return of_images(pool)


def timed(w: Any, b: Any, x: Any) -> Any:
    """A bias, and what a time adds to all places of an image, as in a diffusion network."""
    time = (jnp.tanh(x[:, 0, 0]) @ w[0, 0])[:, None, None]
    y = convolved(x, w) + time + b
    groups = y.reshape(*y.shape[:-1], 2, -1)
    made = norm(groups, b.reshape(2, -1), (1, 2, 4)).reshape(y.shape)
    return square(convolved(jnp.tanh(made), w))


def upsampled(worked: float = 1.0) -> Any:
    def loss(w, b, x):
        y = jnp.repeat(x @ w + b, 2, axis=0)
        return square(jnp.tanh((y if worked == 1.0 else y * worked) @ w))

    return loss


def between(middle: Any) -> Any:
    """A network of which `middle` is neither the first layer nor the last: its weights are many."""
    return lambda ws, x: square(middle(jnp.tanh(x @ ws[0]), *ws[1:4]) @ ws[4])


def one_after_another(x: Any, *ws: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def three_of_one(x: Any, a: Any, b: Any, c: Any) -> Any:
    return jnp.tanh((x @ a) * (x @ b) + x @ c)


def of_rows(x: Any, *ws: Any) -> Any:
    return one_after_another(x.reshape(4, 8, 64), *ws).reshape(32, 64)


def halves(y: Any, b: Any) -> Any:
    return jnp.split(y, 2, -1)


def first_and_last(ws: Any, x: Any) -> Any:
    return square(jnp.tanh(x @ ws[0]) @ ws[4])


DEEP = [normal(64, 64, scale=0.125) for _ in range(5)], X
INT8, FLOAT8 = "int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16"
HINTED = {
    "read_twice": Hinted(
        of_images(lambda y, b, x: jnp.tanh(norm(y + y[::-1], b))),
        of_images(lambda y, b, x: jnp.tanh(norm(y + y[::-1], b, -1))),
        IMAGES,
        ALL,
    ),
    "read_exactly": Hinted(dense(jax.nn.relu), dense(jax.nn.silu), DENSE, ALL),
    "picked": Hinted(
        classified(lambda y: optax.softmax_cross_entropy_with_integer_labels(y, LABELS)),
        classified(lambda y: jax.nn.log_softmax(y)[LABELS]),
        DENSE,
        ALL,
    ),
    "merged": Hinted(cell, gate_of_one, DENSE, ALL),
    "summed_apart": Hinted(
        timed,
        of_images(lambda y, b, x: jnp.tanh(norm(y + b, b))),
        IMAGES,
        ALL,
    ),
    "added_to_convolutions": Hinted(
        of_images(lambda y, b, x: y + b),
        of_images(lambda y, b, x: jax.nn.silu(y + b)),
        IMAGES,
        GPU,
    ),
    "held_low": Hinted(stream, one_layer, DENSE, GPU),
    "activated": Hinted(normed(jax.nn.silu), normed(lambda y: 2 * y), DENSE, (*GPU, *TPU)),
    "stored_cotangent": Hinted(normed(jax.nn.silu), one_layer, DENSE, (*GPU, *TPU)),
    "moved_low": Hinted(cut(halves), cut(lambda y, b: (y[:, :32], y[:, 16:48])), DENSE, ALL),
    "copied_last": Hinted(upsampled(), upsampled(1.5), DENSE, ALL),
    "moved_again": Hinted(by_groups, normed(jnp.tanh), DENSE, ALL),
    "read_in_parts": Hinted(
        cut(lambda y, b: jnp.split(y + b, 2, -1)),
        cut(lambda y, b: ((y + b)[:, :32], jnp.max(jnp.exp(y + b), -1, keepdims=True))),
        DENSE,
        ALL,
    ),
    "chosen_wide": Hinted(dense(jax.nn.relu), dense(jax.nn.silu), DENSE, TPU),
    "recomputed": Hinted(dense(jax.nn.silu), lambda w, b, x: jnp.sum(x @ w), DENSE, ALL),
    "centred": Hinted(normed(jax.nn.silu), normed(jax.nn.silu, -1), DENSE, ALL),
    "shifted_apart": Hinted(
        of_images(lambda y, b, x: jax.nn.silu(norm(y, b))),
        of_images(lambda y, b, x: jax.nn.relu(norm(y, b))),
        IMAGES,
        ALL,
    ),
    "read_low": Hinted(between(one_after_another), first_and_last, DEEP, GPU, FLOAT8),
    "spread_scales": Hinted(between(of_rows), first_and_last, DEEP, ALL, INT8),
    "multiplied_alone": Hinted(between(three_of_one), first_and_last, DEEP, GPU, FLOAT8),
    "pooled": Hinted(pooled(lax.max, -np.inf), pooled(lax.add, 0.0), IMAGES, GPU),
    "kept_apart": Hinted(dense(jax.nn.gelu), dense(jax.nn.relu), DENSE, ALL),
    "curves_apart": Hinted(normed(jnp.tanh, -1), normed(jax.nn.silu, -1), DENSE, ALL),
    "smaller_first": Hinted(one_layer, lambda w, b, x: one_layer(w, b, w), DENSE, GPU),
    "attended": Hinted(attend(jax.nn.softmax), attend(bounded), ROWS, ALL),
    "rows_apart": Hinted(attend(dropped), attend(bounded), ROWS, ALL),
    "passes_apart": Hinted(
        classified(lambda y: -jax.nn.log_softmax(5 * jnp.tanh(y / 5))[:, :1]),
        classified(lambda y: -jax.nn.log_softmax(y)[:, :1]),
        DENSE,
        ALL,
    ),
}
