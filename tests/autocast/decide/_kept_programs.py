"""Programs that keep a value and change it a little: solvers, averages, filters, recursions.

The last ones do so outside of loops: unrolled recursions and steps, coordinates that stand beside
features, phases that a product reads too.

Each is made of `dot`, the product that it uses, so that a careful hand cast (16-bit operands, all
else in float32) is the same program with another `dot`. What autocast makes of it may be no
further from float64 than twice that, or than PyTorch's rule.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Fun = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A program, its arguments, and whether its gradient in the first of them is compared."""

    of_dot: Fun
    args: tuple[Any, ...]
    gradient: bool = True

    @property
    def name(self):
        return self.of_dot.__name__

    def make(self, dot):
        return functools.partial(self.of_dot, dot)


PROGRAMS: list[Kept] = []
_RNG = np.random.default_rng(0)
_D = 16


def _normal(*shape, scale=1.0):
    return (scale * _RNG.normal(size=shape)).astype(np.float32)


_W = _normal(_D, _D, scale=_D**-0.5)
_X = _normal(8, _D)


def program(*args, gradient=True):
    """Adds a program, a function of `dot` and of its arguments."""

    def add(of_dot):
        PROGRAMS.append(Kept(of_dot, args, gradient))
        return of_dot

    return add


# -- solvers and samplers ----------------------------------------------------------------


@program(_W, _X)
def euler_scan(dot, w, x):
    def step(x, _):
        return x + 1e-3 * jnp.tanh(dot(x, w)), None

    return lax.scan(step, x, None, length=100)[0]


@program(_W, _X, gradient=False)
def euler_while(dot, w, x):
    def step(carry):
        x, t = carry
        return x + 1e-3 * jnp.tanh(dot(x, w)), t + 1e-3

    return lax.while_loop(lambda carry: carry[1] < 0.1, step, (x, 0.0))[0]


@program(_W, _X)
def unrolled_after_encoder(dot, w, x):
    z = dot(x, w)  # a latent state, low from the start
    for _ in range(20):
        z = z + 2e-3 * jnp.tanh(dot(z, w))
    return z


@program(_W, _X, np.float32(1e-2))
def unrolled_with_a_given_step(dot, w, x, step):
    z = dot(x, w)
    for _ in range(20):
        z = z + step * jnp.tanh(dot(z, w))
    return z


@program(np.array([1.0, -2.0, 1.0], np.float32), _normal(2, 1, 32), gradient=False)
def heat_by_convolution(dot, kernel, u):
    def step(u, _):
        change = dot.convolve(u, kernel[None, None])
        return u + 1e-3 * change, None

    return lax.scan(step, u, None, length=100)[0]


@program(_W, _X)
def hamiltonian(dot, w, q):
    def energy(q):
        return jnp.sum(jnp.log(jnp.cosh(dot(q, w))))

    def leap(carry, _):
        q, p = carry
        p = p - 1e-3 * jax.grad(energy)(q)
        q = q + 2e-3 * p
        return (q, p - 1e-3 * jax.grad(energy)(q)), None

    (q, p), _ = lax.scan(leap, (q, jnp.ones_like(q)), None, length=100)
    return q, p


@program(_W, np.float32(100.0) + _normal(8, _D), gradient=False)
def positions_read_by_products(dot, w, p):
    for _ in range(3):
        p = p + 0.1 * jnp.tanh(dot(p - 100.0, w))
    return p


@program(_W, _X)
def loop_in_a_loop(dot, w, x):
    def inner(_, x):
        return jax.jit(lambda x: x + 1e-3 * jnp.tanh(dot(x, w)))(x)

    def outer(x, _):
        x = lax.cond(x[0, 0] > -9, lambda x: lax.fori_loop(0, 20, inner, x), lambda x: x, x)
        return x, None

    return lax.scan(outer, x, None, length=20)[0]


@program(_normal(24, _D, scale=0.2), _normal(24))
def shrinkage(dot, a, b):
    def step(x, _):
        x = x - 0.02 * dot(a.T, dot(a, x) - b)
        return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 1e-4, 0), None

    return lax.scan(step, jnp.ones_like(a[0]) * b[0], None, length=100)[0]


# -- averages and recurrences ----------------------------------------------------------------


@program(_W, _normal(100, 8, _D), gradient=False)
def moving_average(dot, w, xs):
    def step(mean, x):
        return 0.99 * mean + 0.01 * jnp.tanh(dot(x, w)), None

    return lax.scan(step, jnp.tanh(dot(xs[0], w)), xs)[0]


@program(_W, _normal(64, _D), _normal(_D, _D))
def linear_attention(dot, w, xs, state):
    def step(state, x):
        key, value = dot(x, w), dot(x, w.T)
        state = 0.99 * state + 0.05 * key[:, None] * value[None, :]
        return state, dot(key, state)

    return lax.scan(step, state, xs)[1]


@program(_normal(_D, 4 * _D, scale=0.25), _normal(60, 4, _D), _normal(4, _D), _normal(4, _D))
def lstm_with_given_state(dot, w, xs, hidden, cell):
    def step(carry, x):
        hidden, cell = carry
        i, f, g, o = jnp.split(dot(x + hidden, w), 4, axis=-1)
        cell = jax.nn.sigmoid(f + 3) * cell + jax.nn.sigmoid(i - 3) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    return lax.scan(step, (hidden, cell), xs)[0]


# -- log-space recursions ----------------------------------------------------------------


@program(_normal(_D, 6, scale=0.5), _normal(60, _D), _normal(6, 6))
def crf_log_partition(dot, w, xs, transitions):
    emissions = dot(xs, w)

    def step(alpha, emission):
        alpha = jax.nn.logsumexp(alpha[:, None] + transitions, axis=0) + emission
        return alpha, None

    alpha, _ = lax.scan(step, emissions[0], emissions[1:])
    return jax.nn.logsumexp(alpha)


@program(_normal(_D, 6, scale=0.5), _normal(40, _D))
def logaddexp_recursion(dot, w, xs):
    emissions = dot(xs, w)

    def step(alpha, emission):
        return jnp.logaddexp(alpha, jnp.roll(alpha, 1)) + emission, None

    return lax.scan(step, emissions[0], emissions[1:])[0]


@program(_normal(32, _D), _normal(32, _D), _normal(8, _D, scale=2.0))
def online_softmax(dot, keys, values, queries):
    def step(carry, block):
        top, total, out = carry
        key, value = block
        scores = dot(queries, key.T)
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top - new)
        total = total * old + weights.sum(-1, keepdims=True)
        return (new, total, out * old + dot(weights, value)), None

    start = (jnp.full_like(queries[:, :1], -1e4), jnp.zeros_like(queries[:, :1]), 0 * queries)
    blocks = (keys.reshape(8, 4, _D), values.reshape(8, 4, _D))
    (_, total, out), _ = lax.scan(step, start, blocks)
    return out / total


# -- what is read exactly ----------------------------------------------------------------


@program(_normal(24, 4), gradient=False)
def cholesky_of_a_kernel(dot, x):
    kernel = dot(x, x.T) + 0.02 * jnp.eye(24, dtype=x.dtype)
    return jnp.linalg.cholesky(kernel)


@program(np.arange(512, dtype=np.float32), (10.0 ** -np.linspace(0, 4, 8)).astype(np.float32))
def rotary_angles(dot, positions, frequencies):
    del dot  # an outer product adds nothing up: it is elementwise, not a matrix unit's work
    angles = jnp.einsum("i,j->ij", positions, frequencies)
    return jnp.sin(angles) * 1e-2


# -- outside of loops, in parts, or read in two ways ---------------------------------------------

_FAR = np.float32(30) + _normal(8, _D)
_W2 = _normal(_D, _D, scale=0.3)
_XS = _normal(12, 6, _D)


@program(_normal(6, 6), _normal(_D, 6, scale=0.5), _XS)
def hidden_markov_unrolled(dot, transitions, w, xs):
    among, seen = jax.nn.softmax(transitions), dot(xs, w) * 4 - 20
    alpha = seen[0]
    for t in range(1, len(xs)):
        top = alpha.max(-1, keepdims=True)
        alpha = jnp.log(dot(jnp.exp(alpha - top), among)) + top + seen[t]
    return alpha


@program(_normal(_D, 6, scale=0.5), _normal(40, 3, _D), _normal(40, 6, 6), _normal(3, 6))
def transitions_that_differ_by_step(dot, w, xs, transitions, alpha):
    def step(alpha, given):
        emission, among = given
        top = lax.stop_gradient(alpha.max(-1, keepdims=True))
        return jnp.log(dot(jnp.exp(alpha - top), among) + 1e-30) + top + emission, None

    return lax.scan(step, alpha, (dot(xs, w), jax.nn.softmax(transitions)))[0]


@program(_normal(60, 5, 4), _normal(4), 3 * np.eye(4, dtype=np.float32), gradient=False)
def bandit_that_solves(dot, xs, b, a):
    def step(carry, x):
        a, b = carry
        chosen = dot(jax.nn.softmax(3 * dot(x, jnp.linalg.solve(a, b))), x)
        a = a + 0.1 * chosen[:, None] * chosen[None, :]
        return (a, b + 0.1 * jnp.tanh(chosen[0]) * chosen), None

    return lax.scan(step, (a, b), xs)[0]


# -- arguments that are changed, or joined with what is low ----------------------------------------


@program(_W, _X, _FAR, _W2)
def steps_by_a_softmax(dot, w, x, y, decode):
    for _ in range(8):
        y = y + 0.1 * jax.nn.softmax(dot(y, w) * 0.01 + x)
    return jnp.tanh(dot(y - 30, decode))


@program(_W, _normal(24, _D), np.float32(100) + _normal(24, 3), _normal(_D + 3, _D, scale=0.3))
def coordinates_beside_features(dot, w, features, places, mix):
    joined = jnp.concatenate([places, jnp.tanh(dot(features, w))], -1)
    features = jax.nn.relu(dot(joined - jnp.where(jnp.arange(_D + 3) < 3, 100.0, 0.0), mix))
    for _ in range(2):
        apart = joined[:, None, :3] - joined[None, :, :3]
        near = jax.nn.softmax(-jnp.sum(apart**2, -1))
        features = jnp.tanh(dot(dot(near, features), w))
        joined = jnp.concatenate([joined[:, :3], features], -1)
    return dot(features, w)


@program(_W, _FAR, _W2)
def coupling_layers(dot, w, x, decode):
    for _ in range(4):
        first, second = x[:, : _D // 2], x[:, _D // 2 :]
        moved = second + jnp.tanh(dot(first - 30, w[: _D // 2, : _D // 2]))
        x = jnp.concatenate([moved, first], -1)
    return jnp.tanh(dot(x - 30, decode))


# -- read by a product, and by what shows every rounding -------------------------------------------


@program(_W, _normal(32, _D), _W2)
def phases_read_twice(dot, w, x, decode):
    phase = jnp.cumsum(jax.nn.softplus(dot(x, w)), 0)
    return jnp.sin(phase), jnp.sin(3 * phase) + 0.01 * dot(phase, decode)


@program(_W, _normal(64, _D), _W2)
def times_of_events(dot, w, x, decode):
    times = jnp.cumsum(jax.nn.softplus(dot(x, w)), 0)
    apart = times[1:] - times[:-1]
    return dot(jnp.tanh(apart), decode), jnp.tanh(0.01 * dot(times, decode))


@program(_W2, _normal(64, _D), _normal(64))
def frequency_modulation(dot, w, x, frequency):
    phase = jnp.cumsum(jax.nn.softplus(frequency)[:, None] + 0.1 * jnp.tanh(dot(x, w)), 0)
    for _ in range(2):
        phase = phase + jnp.tanh(dot(jnp.sin(phase), w))
    return dot(jnp.cos(phase), w)


@program(_X, _W)
def flow_in_twenty_steps(dot, x, w):
    for i in range(20):
        x = x + jnp.tanh(dot(x, w) + i / 20) / 20
    return x
