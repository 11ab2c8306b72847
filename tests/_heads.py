"""Models and the losses that stand behind them: the programs that the law of cutting is tried on.

Each is made of `dot`, the product that it uses, so that a hand cast (16-bit operands, float32 sums,
all else float32) is the same program with another `dot`. `TUNED` are those that the rules were
made for; `JUDGES` were written afterwards, and no rule may name what only one of them does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A loss of parameters and data; gradients are those of the parameters."""

    of_dot: Callable[..., Any]
    params: Any
    data: tuple[Any, ...]

    @property
    def name(self):
        return self.of_dot.__name__

    def make(self, dot):
        return functools.partial(self.of_dot, dot)


TUNED: list[Head] = []
JUDGES: list[Head] = []
_RNG = np.random.default_rng(3)
_N, _D, _H = 24, 12, 16


def _normal(*shape, scale=1.0):
    return (scale * _RNG.normal(size=shape)).astype(np.float32)


def _net(outs, scale):
    """Two layers; a large `scale` makes sure answers, as a trained model's are."""
    return {
        "a": _normal(_D, _H, scale=_D**-0.5),
        "b": _normal(_H, scale=0.1),
        "c": _normal(_H, outs, scale=2 * scale * _H**-0.5),
        "d": _normal(outs, scale=0.1),
    }


def _apply(dot, p, x):
    return dot(jnp.tanh(dot(x, p["a"]) + p["b"]), p["c"]) + p["d"]


_X = _normal(_N, _D)
_LABELS = _RNG.integers(0, 5, _N)
_BITS = _RNG.integers(0, 2, (_N, 1)).astype(np.float32)
_ONE_HOT = np.eye(5, dtype=np.float32)[_LABELS]


def _head(rows, outs=1, scale=4.0, params=None, data=()):
    def add(of_dot):
        known = _net(outs, scale) if params is None else params
        rows.append(Head(of_dot, known, (_X, *data)))
        return of_dot

    return add


# -- detection, click rates, survival --------------------------------------------------------------


@_head(TUNED, scale=6.0, data=(_BITS,))
def cross_entropy_of_a_clipped_probability(dot, p, x, y):
    q = jnp.clip(jax.nn.sigmoid(_apply(dot, p, x)), 1e-7, 1 - 1e-7)
    return -jnp.mean(y * jnp.log(q) + (1 - y) * jnp.log(1 - q))


@_head(TUNED, scale=6.0, data=(_BITS,))
def focal(dot, p, x, y):
    q = jax.nn.sigmoid(_apply(dot, p, x))
    right = jnp.where(y > 0, q, 1 - q)
    return -jnp.mean((1 - right) ** 2 * jnp.log(right + 1e-6))


@_head(TUNED, outs=6, scale=4.0)
def hazards(dot, p, x):
    h = jax.nn.sigmoid(_apply(dot, p, x))
    return -jnp.mean(jnp.cumsum(jnp.log1p(-h), axis=1))


@_head(TUNED, outs=6, scale=3.0)
def halting_weights(dot, p, x):
    h = jax.nn.sigmoid(_apply(dot, p, x))
    left = jnp.cumprod(1 - h, axis=1)
    weights = h * jnp.concatenate([jnp.ones_like(left[:, :1]), left[:, :-1]], axis=1)
    return -jnp.mean(jnp.log(weights + 1e-6)) + jnp.mean(-jnp.log(left))


@_head(TUNED, outs=6, scale=3.0)
def survival_by_a_distribution(dot, p, x):
    density = jax.nn.softmax(_apply(dot, p, x))
    survived = 1 - jnp.cumsum(density, axis=1)[:, :-1]
    return -jnp.mean(jnp.log(jnp.maximum(survived, 1e-6)))


@_head(TUNED, outs=1, scale=5.0, data=(_BITS,))
def log_odds_of_a_probability(dot, p, x, y):
    q = jax.nn.sigmoid(_apply(dot, p, x))
    return jnp.mean((jnp.log(q / (1 - q)) - 8 * (y - 0.5)) ** 2)


@_head(JUDGES, outs=1, scale=6.0, data=(_BITS,))
def click_rate_of_a_click_and_a_conversion(dot, p, x, y):
    z = _apply(dot, p, x)
    both = jax.nn.sigmoid(z) * jax.nn.sigmoid(z[::-1] + 3)
    return -jnp.mean(y * jnp.log(both + 1e-7) + (1 - y) * jnp.log1p(-both + 1e-7))


@_head(JUDGES, outs=5, scale=3.0)
def noisy_or(dot, p, x):
    q = jax.nn.sigmoid(_apply(dot, p, x) + 2)
    return -jnp.mean(jnp.log(jnp.prod(1 - q, axis=1) + 1e-12))


@_head(JUDGES, outs=5, scale=4.0, data=(_ONE_HOT,))
def bootstrapped_labels(dot, p, x, y):
    q = jax.nn.softmax(_apply(dot, p, x))
    target = lax.stop_gradient(0.8 * y + 0.2 * q)
    return -jnp.mean(jnp.sum(target * jnp.log(q + 1e-9), 1)) - jnp.mean(jnp.log1p(-q.max(1)))


# -- mixtures of experts, reinforcement learning ---------------------------------------------------


@_head(TUNED, params={**_net(5, 5.0), "e": _normal(5, 3)}, data=())
def router(dot, p, x):
    q = jax.nn.softmax(_apply(dot, p, x))
    return jnp.mean(dot(q, p["e"]) ** 2) - 0.1 * jnp.mean(jnp.log1p(-q.max(1)))


@_head(TUNED, params={**_net(3, 3.0), "e": _normal(_D + 3, 1)}, data=())
def tanh_policy_with_a_critic(dot, p, x):
    a = jnp.tanh(_apply(dot, p, x))
    value = dot(jnp.concatenate([x, a], axis=1), p["e"])
    return -jnp.mean(value) - 0.1 * jnp.mean(jnp.log(1 - a**2 + 1e-6))


@_head(TUNED, params={**_net(4, 2.0), "e": _normal(4, 4)}, data=(_normal(4, 4),))
def arccos_of_a_cosine(dot, p, x, anchors):
    u = _apply(dot, p, x)
    v = dot(u[:4], p["e"]) * 0.05 + u[:4]
    cos = jnp.sum(u[:4] * v, 1) / (jnp.linalg.norm(u[:4], axis=1) * jnp.linalg.norm(v, axis=1))
    return jnp.mean(jnp.arccos(jnp.clip(cos, -1 + 1e-6, 1 - 1e-6))) + 1e-3 * anchors.mean()


@_head(JUDGES, params={**_net(3, 3.0), "e": _normal(3, 2)}, data=())
def squashed_gaussian_with_a_second_reader(dot, p, x):
    a = jnp.tanh(_apply(dot, p, x))
    correction = jnp.log1p(-jnp.square(a) + 1e-6).sum(1)
    return jnp.mean(jnp.square(dot(a, p["e"]))) - 0.05 * jnp.mean(correction)


@_head(JUDGES, params={**_net(4, 4.0), "e": _normal(4, 3)}, data=())
def gates_with_a_penalty(dot, p, x):
    g = jax.nn.sigmoid(_apply(dot, p, x))
    sure = -jnp.log(1 - jnp.abs(2 * g - 1) + 1e-6)
    return jnp.mean(dot(g, p["e"]) ** 2) + 0.01 * jnp.mean(sure)


@_head(JUDGES, params={**_net(6, 4.0), "e": _normal(6, 4)}, data=())
def attention_entropy(dot, p, x):
    w = jax.nn.softmax(_apply(dot, p, x))
    entropy = -jnp.sum(w * jnp.log(w + 1e-9) + (1 - w) * jnp.log1p(-w + 1e-7), 1)
    return jnp.mean(dot(w, p["e"]) ** 2) + 0.1 * jnp.mean(entropy)


# -- flows, energies, densities --------------------------------------------------------------------


@_head(TUNED, outs=4, scale=1.5, data=(_normal(_N, 4),))
def gaussian_mixture(dot, p, x, y):
    z = _apply(dot, p, x)
    weights = jax.nn.softmax(z)
    density = jnp.exp(-0.5 * (y - z) ** 2)
    return -jnp.mean(jnp.log(jnp.sum(weights * density, 1) + 1e-9))


@_head(TUNED, outs=4, scale=2.0)
def coupling_layer(dot, p, x):
    z = _apply(dot, p, x)
    scale = jax.nn.sigmoid(z[:, :2] + 2)
    y = x[:, :2] * scale + z[:, 2:]
    return 0.5 * jnp.mean(jnp.sum(y**2, 1)) - jnp.mean(jnp.sum(jnp.log(scale), 1))


@_head(TUNED, outs=3, scale=2.0)
def logit_flow(dot, p, x):
    u = jax.nn.sigmoid(_apply(dot, p, x))
    u = 0.99 * u + 0.005
    y = jnp.log(u) - jnp.log1p(-u)
    return jnp.mean(y**2) - jnp.mean(jnp.log(u) + jnp.log1p(-u))


@_head(JUDGES, outs=3, scale=3.0)
def inverse_hyperbolic_flow(dot, p, x):
    a = 0.999 * jnp.tanh(_apply(dot, p, x))
    return jnp.mean(jnp.arctanh(a) ** 2) - jnp.mean(jnp.log(1 - a * a))


@_head(JUDGES, outs=4, scale=3.0, data=(_normal(_N, 4),))
def mixture_of_logistics(dot, p, x, y):
    z = _apply(dot, p, x)
    between = jax.nn.sigmoid(y + 0.2 - z) - jax.nn.sigmoid(y - 0.2 - z)
    return -jnp.mean(jnp.log(jnp.maximum(between, 1e-7)))


@_head(JUDGES, outs=1, scale=4.0)
def energy_with_two_sides(dot, p, x):
    e = _apply(dot, p, x)
    return jnp.mean(jax.nn.softplus(e[: _N // 2])) + jnp.mean(jax.nn.softplus(-e[_N // 2 :]))


@_head(JUDGES, outs=2, scale=2.0, data=(_normal(_N, 1),))
def censored_gaussian(dot, p, x, y):
    z = _apply(dot, p, x)
    t = (y - z[:, :1]) / (jax.nn.softplus(z[:, 1:]) + 0.1)
    return -jnp.mean(jnp.log(0.5 * (1 - lax.erf(t / np.float32(2**0.5))) + 1e-7))


# -- metric learning, contrastive losses, rendering ------------------------------------------------


@_head(TUNED, outs=8, scale=2.0)
def contrastive(dot, p, x):
    u = _apply(dot, p, x)
    u = u / jnp.linalg.norm(u, axis=1, keepdims=True)
    v = jnp.roll(u, 1, 0)
    logits = dot(u, v.T) / 0.1
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


@_head(TUNED, outs=8, scale=2.0)
def angular_margin(dot, p, x):
    u = _apply(dot, p, x)
    u = u * lax.rsqrt(jnp.sum(u**2, 1, keepdims=True))
    cos = jnp.sum(u * jnp.roll(u, 1, 0), 1)
    sin = jnp.sqrt(jnp.maximum(1 - cos**2, 1e-7))
    return jnp.mean(cos * 0.88 - sin * 0.48) + jnp.mean(1 / jnp.sqrt(1 - 0.999 * cos**2))


@_head(TUNED, outs=6, scale=2.0)
def volume_rendering(dot, p, x):
    density = jax.nn.softplus(_apply(dot, p, x))
    alpha = 1 - jnp.exp(-density)
    passed = jnp.cumprod(1 - alpha + 1e-10, axis=1)
    weights = alpha * jnp.concatenate([jnp.ones_like(passed[:, :1]), passed[:, :-1]], 1)
    return jnp.mean((jnp.sum(weights * jnp.arange(6.0), 1) - 2) ** 2)


@_head(JUDGES, outs=8, scale=2.0)
def hyperbolic_distance(dot, p, x):
    u = _apply(dot, p, x)
    u = (
        jnp.tanh(jnp.linalg.norm(u, axis=1, keepdims=True))
        * u
        / jnp.linalg.norm(u, axis=1, keepdims=True)
    )
    u, v = 0.99 * u, 0.99 * jnp.roll(u, 1, 0)
    far = jnp.sum((u - v) ** 2, 1) / ((1 - jnp.sum(u**2, 1)) * (1 - jnp.sum(v**2, 1)))
    return jnp.mean(jnp.arccosh(1 + 2 * far))


@_head(JUDGES, outs=6, scale=3.0)
def transmittance_in_logs(dot, p, x):
    alpha = jax.nn.sigmoid(_apply(dot, p, x))
    passed = jnp.exp(jnp.cumsum(jnp.log(1 - alpha + 1e-7), axis=1))
    return -jnp.mean(jnp.log(1 - passed[:, -1] + 1e-7)) + jnp.mean(passed * alpha)


@_head(JUDGES, outs=8, scale=2.0)
def triplets_by_cosine(dot, p, x):
    u = _apply(dot, p, x)
    u = u / jnp.sqrt(jnp.sum(u * u, 1, keepdims=True) + 1e-12)
    near, far = jnp.sum(u * jnp.roll(u, 1, 0), 1), jnp.sum(u * jnp.roll(u, 2, 0), 1)
    return jnp.mean(jax.nn.relu((1 - near) - (1 - far) + 0.2) + jnp.log(2 - near - 0.999 * far))


# -- Bayesian losses, the plain ones ---------------------------------------------------------------


@_head(TUNED, outs=6, scale=1.0)
def variational(dot, p, x):
    z = _apply(dot, p, x)
    mean, spread = z[:, :3], jax.nn.softplus(z[:, 3:]) + 1e-3
    kl = 0.5 * jnp.sum(mean**2 + spread**2 - 1 - 2 * jnp.log(spread), 1)
    return jnp.mean(kl)


@_head(TUNED, outs=5, scale=3.0, data=(_LABELS,))
def labels(dot, p, x, y):
    logits = jax.nn.log_softmax(_apply(dot, p, x))
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


@_head(TUNED, outs=1, scale=2.0, data=(_normal(_N, 1),))
def regression(dot, p, x, y):
    return jnp.mean((_apply(dot, p, x) - y) ** 2)


@_head(JUDGES, outs=5, scale=4.0, data=(_ONE_HOT,))
def brier_and_spherical(dot, p, x, y):
    q = jax.nn.softmax(_apply(dot, p, x))
    spherical = jnp.sum(q * y, 1) / jnp.linalg.norm(q, axis=1)
    return jnp.mean(jnp.sum((q - y) ** 2, 1)) - jnp.mean(jnp.log(1.0001 - spherical))


@_head(JUDGES, outs=2, scale=3.0, data=(np.abs(_normal(_N, 1)) / 4 + 0.05,))
def beta_likelihood(dot, p, x, y):
    z = jax.nn.softplus(_apply(dot, p, x)) + 0.1
    a, b = z[:, :1], z[:, 1:]
    norm = lax.lgamma(a) + lax.lgamma(b) - lax.lgamma(a + b)
    y = jnp.clip(y, 0.01, 0.99)
    return jnp.mean(norm - (a - 1) * jnp.log(y) - (b - 1) * jnp.log1p(-y))


@_head(JUDGES, outs=5, scale=3.0, data=(_LABELS,))
def evidential(dot, p, x, y):
    alpha = jax.nn.softplus(_apply(dot, p, x)) + 1
    doubt = 5 / jnp.sum(alpha, 1)
    mean = alpha / jnp.sum(alpha, 1, keepdims=True)
    picked = jnp.take_along_axis(mean, y[:, None], 1)
    return jnp.mean(-jnp.log(picked)) - 0.1 * jnp.mean(jnp.log(1 - 0.999 * doubt))


# -- between products: a difference, an angle, a distance, a gradient ------------------------------


@_head(JUDGES, params={**_net(6, 0.3), "e": _normal(6, 3)})
def differences_of_a_field_in_kelvin(dot, p, x):
    u = 288.0 + _apply(dot, p, x)
    centred = u - u.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    spread = (u * u).mean(0) - u.mean(0) ** 2
    slope = dot(u[1:] - u[:-1], p["e"])
    return jnp.mean((dot(normed, p["e"]) - 0.3) ** 2) + jnp.mean(slope**2) + jnp.mean(spread)


@_head(JUDGES, params={**_net(3, 0.1), "e": _normal(3, 4)}, data=(50 + _normal(_N, 3),))
def relative_positions_of_moved_points(dot, p, x, points):
    points = points + _apply(dot, p, x)
    between = points[:, None] - points[None]
    return jnp.mean((jnp.tanh(dot(between, p["e"])).mean(1) - 0.3) ** 2)


@_head(
    JUDGES, params={**_net(5, 1.0), "e": _normal(5, 5)}, data=(np.abs(_normal(_N, 5)) * 100 + 5,)
)
def returns_of_predicted_prices(dot, p, x, prices):
    later = prices * (1 + 0.01 * jnp.tanh(_apply(dot, p, x)))
    return jnp.mean((dot(100 * (later - prices) / prices, p["e"]) - 1) ** 2)


@_head(JUDGES, params={**_net(4, 1.0), "e": _normal(4, 4)})
def slopes_of_a_softmax_by_two_values(dot, p, x):
    z = _apply(dot, p, x)
    slope = jax.nn.softmax(z + 0.01 * jnp.sin(z)) - jax.nn.softmax(z)
    return jnp.mean((dot(100 * slope, p["e"]) - 1) ** 2)


@_head(JUDGES, params={**_net(1, 1.0), "e": _normal(16, 5)}, data=(1000 * _BITS + _X[:, :1],))
def embedding_of_a_predicted_time(dot, p, x, time):
    time = time + jax.nn.sigmoid(_apply(dot, p, x))
    angles = time * jnp.exp(-jnp.arange(8, dtype=x.dtype))
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)
    return jnp.mean((dot(waves, p["e"]) - 1) ** 2)


@_head(JUDGES, params={**_net(8, 1.0), "e": _normal(8, 5)})
def sines_of_many_periods(dot, p, x):
    angles = jax.checkpoint(lambda z: 3 * z + 60 * jnp.arange(8, dtype=x.dtype))
    return jnp.mean((dot(jnp.sin(angles(_apply(dot, p, x))), p["e"]) - 1) ** 2)


@_head(JUDGES, params={**_net(4, 2.0), "e": _normal(4, 4), "f": _normal(4, 4)})
def layers_in_a_poincare_ball(dot, p, x):
    def expmap(v):
        size = jnp.linalg.norm(v, axis=-1, keepdims=True)
        return (1 - 1e-3) * jnp.tanh(size) * v / size

    def logmap(y):
        size = jnp.linalg.norm(y, axis=-1, keepdims=True)
        return jnp.arctanh(size) * y / size

    y = expmap(_apply(dot, p, x))
    for w in (p["e"], p["f"]):
        y = expmap(0.5 * dot(logmap(y), w))
    return jnp.mean(jnp.arctanh(jnp.linalg.norm(y, axis=-1)))


@_head(JUDGES, outs=6, scale=2.0, data=(_normal(_N, 6),))
def sinkhorn_by_a_scan(dot, p, x, y):
    z = _apply(dot, p, x)
    cost = (jnp.sum(z**2, 1)[:, None] + jnp.sum(y**2, 1) - 2 * dot(z, y.T)) / 2

    def turn(potentials, _):
        f, g = potentials
        f = -jax.nn.logsumexp(g - cost, axis=1)
        return (f, -jax.nn.logsumexp(f[:, None] - cost, axis=0)), None

    (f, g), _ = lax.scan(turn, (jnp.zeros_like(cost[:, 0]), jnp.zeros_like(cost[0])), None, 9)
    return jnp.mean(f) + jnp.mean(g)


@_head(JUDGES, outs=1, scale=1.0)
def penalty_on_a_gradient(dot, p, x):
    slopes = jax.vmap(jax.grad(lambda x: jnp.sum(_apply(dot, p, x[None]))))(x)
    size = jnp.sqrt(jnp.sum(slopes**2, 1) + 1e-12)
    return 10 * jnp.mean((size - 1) ** 2) + jnp.mean(_apply(dot, p, x))


HEADS = [*TUNED, *JUDGES]
