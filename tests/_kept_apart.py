"""More programs that keep a value: outside of loops, in parts, or read in two ways.

Unrolled recursions and steps, coordinates that stand beside features, phases that a product reads
too, and loops that look like a stack of layers to whoever looks for a norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
from _kept_programs import _D, _W, _X, _normal, program
from jax import lax

_FAR = np.float32(30) + _normal(8, _D)
_W2 = _normal(_D, _D, scale=0.3)
_XS = _normal(12, 6, _D)


# -- recursions, outside of loops and in loops that pass no norm -----------------------------------


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
