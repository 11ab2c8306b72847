"""Heads whose readers do not look like readers that rounding would ruin.

A difference written as a sum, a threshold beside a large offset, a moment of two values, a product
of many factors, what multiplies a loop's carry in each turn. Each is a loss of a network.
"""

import jax
import jax.numpy as jnp
import numpy as np
from _heads import _head
from jax import lax

HIDDEN = []
ONCE = []  # not cut: a cut may change a constant, a rank, which sums are fused, what float16 holds
_RNG = np.random.default_rng(3)  # of its own: other tests draw theirs from that of the heads


def _normal(*shape, scale=1.0):
    return (scale * _RNG.normal(size=shape)).astype(np.float32)


def _net(outs, scale=0.5, **more):
    return {
        "a": _normal(12, 16, scale=0.3),
        "c": _normal(16, outs, scale=scale / 4),
        "e": _normal(outs, 4),
        **more,
    }


def _made(dot, p, x):
    return dot(jnp.tanh(dot(x, p["a"])), p["c"])


def _read(dot, p, h):
    return jnp.mean((dot(h, p["e"]) - 1) ** 2)


# -- differences that are written as sums, or to a table -------------------------------------------


@_head(HIDDEN, params=_net(4))
def minus_its_mean_added(dot, p, x):
    u = 288 + _made(dot, p, x)
    return _read(dot, p, u + -u.mean(0))


@_head(HIDDEN, params=_net(4))
def minus_a_neighbour_added(dot, p, x):
    u = 288 + _made(dot, p, x)
    return _read(dot, p, u[1:] + -1.0 * u[:-1])


@_head(HIDDEN, params=_net(4))
def minus_two_and_its_neighbours(dot, p, x):
    u = 288 + _made(dot, p, x)
    return _read(dot, p, -2 * u + jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0))


@_head(HIDDEN, params=_net(4))
def a_stencil_of_weights(dot, p, x):
    u = 288 + _made(dot, p, x)
    weights = jnp.array([1.0, -2.0, 1.0], u.dtype)
    return _read(dot, p, sum(weights[i] * jnp.roll(u, i - 1, 0) for i in range(3)))


@_head(HIDDEN, params=_net(4))
def a_sum_of_what_is_joined_with_its_mean_negated(dot, p, x):
    u = 288 + _made(dot, p, x)
    return _read(dot, p, jnp.stack([u, jnp.broadcast_to(-u.mean(0), u.shape)]).sum(0))


@_head(HIDDEN, params=_net(4))
def a_sum_of_neighbours_times_signs(dot, p, x):
    u = 288 + _made(dot, p, x)
    signs = jnp.array([1.0, -1.0], u.dtype)[:, None, None]
    return _read(dot, p, (jnp.stack([u[1:], u[:-1]]) * signs).sum(0))


@_head(HIDDEN, params=_net(4, m=np.full(4, 50, np.float32), v=np.ones(4, np.float32)))
def a_norm_with_running_statistics_folded(dot, p, x):
    scale = lax.rsqrt(p["v"] + 1e-5)
    return _read(dot, p, (_made(dot, p, x) + p["m"]) * scale + -p["m"] * scale)


@_head(HIDDEN, params=_net(1, 1.0))
def distances_to_a_table(dot, p, x):
    t = 288 + 2 * jnp.tanh(_made(dot, p, x))
    grid = jnp.linspace(285.0, 291.0, 32, dtype=t.dtype)
    near = jnp.exp(-(((t - grid) / 0.4) ** 2))
    return _read(dot, p, near.sum(1, keepdims=True) * t / 288)


@_head(HIDDEN, params=_net(1, 1.0))
def a_table_that_is_interpolated(dot, p, x):
    t = 288 + 2 * jnp.tanh(_made(dot, p, x))
    grid = jnp.linspace(285.0, 291.0, 32, dtype=t.dtype)
    return _read(dot, p, jnp.interp(t, grid, jnp.sin(3 * grid)) * t / 288)


# -- decisions beside a large offset ---------------------------------------------------------------


@_head(
    HIDDEN, params=_net(1, 2.0, t=_normal(40, 1)), data=(np.linspace(284.5, 291.5, 39, dtype="f"),)
)
def a_bin_of_a_temperature(dot, p, x, bins):
    t = 288 + 2 * jnp.tanh(_made(dot, p, x))
    return _read(dot, p, p["t"][jnp.searchsorted(bins, t[:, 0])] * t / 288)


@_head(HIDDEN, params=_net(6, 2.0), data=(np.arange(6, dtype="f"),))
def the_action_of_the_largest_value(dot, p, x, names):
    q = 200 + _made(dot, p, x)
    chosen = names[jnp.argmax(q, axis=1)]
    return _read(dot, p, q / 200 * chosen[:, None])


@_head(
    HIDDEN,
    params=_net(1, 2.0, t=_normal(1024, 1)),
    data=(_RNG.uniform(0, 1000, (24, 1)).astype("f"), _RNG.integers(0, 24, 24)),
)
def the_nearest_entry_of_gathered_places(dot, p, x, base, rows):
    at = (base + 3 * jnp.tanh(_made(dot, p, x)))[rows]
    return _read(dot, p, p["t"][jnp.round(at[:, 0]).astype(jnp.int32)] * at / 1000)


@_head(HIDDEN, params=_net(4, 2.0))
def the_order_of_large_values(dot, p, x):
    u = 288 + _made(dot, p, x)
    return _read(dot, p, u[jnp.argsort(u[:, 0])] * jnp.arange(24.0)[:, None] / 288)


# -- moments of two values -------------------------------------------------------------------------


@_head(HIDDEN, params=_net(4, 0.3, d=_normal(16, 4, scale=0.1)))
def a_covariance_by_moments(dot, p, x):
    h = jnp.tanh(dot(x, p["a"]))
    y, z = dot(h, p["c"]) + 3, dot(h, p["d"]) + 3
    return _read(dot, p, 5 * (y.T @ z / 24 - jnp.outer(y.mean(0), z.mean(0))))


@_head(HIDDEN, params=_net(4, 0.3), data=(np.kron(np.eye(4), np.ones((6, 6)) / 6).astype("f"),))
def a_variance_of_neighbours_by_a_product(dot, p, x, mean):
    h = _made(dot, p, x) + 3
    m = mean @ h
    return _read(dot, p, 5 * (mean @ (h * h) - m * m))


@_head(HIDDEN, params=_net(4, 0.3))
def a_variance_of_windows(dot, p, x):
    def pooled(h):
        zero = np.zeros((), h.dtype)
        return lax.reduce_window(h, zero, lax.add, (6, 1), (6, 1), "VALID") / 6

    h = _made(dot, p, x) + 3
    m = pooled(h)
    return _read(dot, p, 20 * (pooled(h * h) - m * m))


def _variance_by_two_convolutions(dot, p, x, kernel):
    def blurred(h):
        for sides in ((1, 1, 3, 1), (1, 1, 1, 3)):
            weights = kernel.astype(h.dtype).reshape(sides)
            h = lax.conv_general_dilated(h[None, None], weights, (1, 1), "VALID")[0, 0]
        return h

    h = _made(dot, p, x) + 3
    m = blurred(h)
    return jnp.mean((dot(5 * (blurred(h * h) - m * m), p["o"]) - 1) ** 2)


_KERNEL = np.array([0.25, 0.5, 0.25], np.float32)
_BLURRED = _net(6, 0.3, o=_normal(4, 4))


@_head(HIDDEN, params=_BLURRED, data=(_KERNEL,))
def a_variance_by_two_convolutions(dot, p, x, kernel):
    return _variance_by_two_convolutions(dot, p, x, kernel)


@_head(ONCE, params=_BLURRED)
def a_variance_with_another_numpy_kernel_in_each_call(dot, p, x):
    return _variance_by_two_convolutions(dot, p, x, _KERNEL)


@_head(HIDDEN, params=_net(4, 0.3, d=_normal(16, 4, scale=0.15)))
def a_sum_of_covariances(dot, p, x):
    h = jnp.tanh(dot(x, p["a"]))
    y, z = dot(h, p["c"]) + 3, dot(h, p["d"]) + 3
    total = (y.T @ z).sum() / 24 - y.mean(0).sum() * z.mean(0).sum()
    return _read(dot, p, jnp.full((1, 4), total))


# -- products of many factors ----------------------------------------------------------------------


@_head(HIDDEN, params=_net(256, 2.0, o=_normal(4, 4)), data=(_normal(24, 4),))
def all_of_many_conditions(dot, p, x, y):
    q = jax.nn.sigmoid(_made(dot, p, x) + 6)
    both = jnp.prod(q, axis=1, keepdims=True) * y
    return jnp.mean((dot(both, p["o"]) - 1) ** 2)


@_head(HIDDEN, params=_net(4, 2.0))
def a_high_power(dot, p, x):
    q = jax.nn.sigmoid(_made(dot, p, x) + 5)[:, ::-1]
    return _read(dot, p, q**100 + q**50.5)


# -- what multiplies a carry -----------------------------------------------------------------------


@_head(HIDDEN, params=_net(4))
def a_rate_compounded(dot, p, x):
    rate = 1 + 0.01 * jnp.tanh(_made(dot, p, x))
    return _read(dot, p, lax.fori_loop(0, 100, lambda _, h: h * rate, jnp.ones_like(rate)))


@_head(HIDDEN, params=_net(8, 2.0), data=(_normal(100, 24, 4),))
def gates_made_before_the_scan(dot, p, x, drive):
    gates = jax.nn.sigmoid(_made(dot, p, x + 0.01 * drive[:, :, :1])[..., :4] + 6)
    start = jnp.zeros(drive.shape[1:], drive.dtype)
    total, _ = lax.scan(lambda c, row: (row[0] * c + row[1], None), start, (gates, 0.05 * drive))
    return jnp.mean((dot(total, p["e"][:4]) - 1) ** 2)


# -- what no low dtype can hold --------------------------------------------------------------------


@_head(
    HIDDEN,
    params=_net(8, 2.0, k=_normal(16, 8, scale=0.3)),
    data=(np.repeat([1.0, 0.0], 12)[:, None].astype("f") * np.ones((1, 24), "f"),),
)
def the_best_of_masked_scores(dot, p, x, seen):
    h = jnp.tanh(dot(x, p["a"]))
    scores = dot(dot(h, p["c"]), dot(h, p["k"]).T) + (1 - seen) * float(np.finfo("f").min)
    best = jax.nn.softmax(jnp.sort(scores, axis=-1)[:, ::-1][:, :8])
    return jnp.mean((dot(best, p["e"]) - 1) ** 2)


@_head(
    HIDDEN,
    params=_net(8, 2.0, k=_normal(16, 8, scale=0.3)),
    data=(3.0 * np.arange(100, 124, dtype="f"),),
)
def attention_that_prefers_later_keys(dot, p, x, later):
    h = jnp.tanh(dot(x, p["a"]))
    weights = jax.nn.softmax(dot(dot(h, p["c"]), dot(h, p["k"]).T) + later)
    return jnp.mean((dot(dot(weights, h)[:, :8], p["e"]) - 1) ** 2)


# -- products whose result is read as a number, a rank or a distance -------------------------------


@_head(HIDDEN, params=_net(8, 6.0))
def a_softmax_whose_sum_is_a_product(dot, p, x):
    z = _made(dot, p, x)
    e = jnp.exp(z - z.max(-1, keepdims=True))
    share = e / dot(e, jnp.ones((8, 1), e.dtype))
    return _read(dot, p, -jnp.log(1 - share + 1e-4))


@_head(
    HIDDEN,
    params=_net(4, t=_normal(4096, 4)),
    data=(_RNG.integers(0, 8, (24, 4)).astype("f"), 8.0 ** np.arange(4, dtype="f")),
)
def a_row_whose_number_is_a_product(dot, p, x, digits, places):
    rows = p["t"][dot(digits, places[:, None])[:, 0].astype(jnp.int32)]
    return _read(dot, p, rows + 0.1 * _made(dot, p, x))


@_head(
    HIDDEN, params=_net(4, t=_normal(600, 4)), data=(_RNG.integers(0, 60, (24, 10)).astype("f"),)
)
def the_last_of_each_segment(dot, p, x, lengths):
    last = dot(lengths, jnp.ones((10, 1), lengths.dtype)) - 1
    chosen = (jnp.arange(600) == last).astype(x.dtype)
    return _read(dot, p, dot(chosen, p["t"]) + 0.1 * _made(dot, p, x))


@_head(HIDDEN, params=_net(4), data=(np.tril(np.ones((24, 24), "f")),))
def decays_by_a_given_triangle(dot, p, x, triangle):
    logs = dot(triangle, -3 * jax.nn.softplus(_made(dot, p, x) + 1))
    return _read(dot, p, jnp.exp(logs[-1] - logs))


@_head(ONCE, params=_net(4, 2.0, m=_normal(16, 64), o=_normal(64, 4)))
def sorted_by_ranks_of_pairs(dot, p, x):
    s = jax.nn.sigmoid(dot(jnp.tanh(dot(x, p["a"])), p["m"]))
    ranks = jnp.sum(s[:, :, None] > s[:, None, :], -1)
    rows = jnp.arange(s.shape[0])[:, None]
    return jnp.mean((dot(jnp.zeros_like(s).at[rows, ranks].set(s), p["o"]) - 1) ** 2)


@_head(HIDDEN, params=_net(4), data=((200 + 5 * _RNG.normal(size=(24, 1))).astype("f"),))
def mean_of_what_was_added_to_a_base(dot, p, x, base):
    q = base + _made(dot, p, x)
    return _read(dot, p, (q.mean(1, keepdims=True) - base) * jnp.ones((1, 4), q.dtype))


@_head(HIDDEN, params=_net(4))
def a_power_by_squarings(dot, p, x):
    a = 1 - 0.003 * jax.nn.softplus(_made(dot, p, x))
    for _ in range(8):
        a = a * a
    return _read(dot, p, a)


@_head(HIDDEN, params=_net(4))
def a_power_by_a_loop(dot, p, x):
    start = 1 + _made(dot, p, x) / 256
    return _read(dot, p, lax.fori_loop(0, 8, lambda _, a: a * a, start))


@_head(HIDDEN, params=_net(24, 2.0))
def chords_of_unit_vectors(dot, p, x):
    k = _made(dot, p, x)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return _read(dot, p, 0.1 * jnp.sqrt(jnp.maximum(2 - 2 * dot(k, k.T), 0) + 1e-5))


@_head(ONCE, params=_net(16))
def batch_norm_over_devices(dot, p, x):
    def norm(u):
        m = lax.pmean(u.mean(0), "devices")
        variance = lax.pmean((u * u).mean(0), "devices") - m * m
        return (u - m) * lax.rsqrt(variance + 1e-5)

    u = dot(x + 10, p["a"])
    return _read(dot, p, jax.nn.relu(jax.vmap(norm, axis_name="devices")(u[None])[0]))


@_head(
    ONCE,
    params={"a": _normal(4, 16, scale=0.5), "c": _normal(16, 4, scale=0.3), "e": _normal(4, 4)},
    data=((np.linspace(280, 310, 4) + 3 * _RNG.normal(size=(24, 4))).astype("f"),),
)
def states_after_steps_in_a_map(dot, p, x, start):
    def step(state):
        return dot(jnp.tanh(dot((state - 295) / 10, p["a"])), p["c"])

    first = lax.map(lambda pair: pair[0] + pair[1], (start, step(start)))
    states = jnp.stack([start, first, first + step(first)])
    return _read(dot, p, (states - states.mean(0))[2])


@_head(
    HIDDEN,
    params=_net(4, a=_normal(64, 16, scale=0.06)),
    data=(_RNG.integers(0, 256, (24, 64)).astype("f"),),
)
def covariance_of_pixels(dot, p, x, pixels):
    h = dot(pixels, p["a"])
    made = dot(h.T, h) / 16 / 128
    return jnp.mean((dot(jnp.tanh(made / 50), _tall(p["e"])) - 1) ** 2) + 0 * x.sum()


@_head(HIDDEN, params=_net(16, 2.0))
def near_saturation(dot, p, x):
    return _read(dot, p, jnp.tanh(jnp.tanh(_made(dot, p, x)) - 2.2))


@_head(
    HIDDEN,
    params=_net(16, 2.0),
    data=(101325 * (1 + 0.1 * _RNG.normal(size=16)).astype("f"),),
)
def a_pressure_in_a_map(dot, p, x, pressure):
    parts = lax.map(lambda h: 1e3 * h / pressure, _made(dot, p, x))
    return _read(dot, p, jnp.tanh(100 * parts))


@_head(
    ONCE,
    params=_net(16, 2.0, s=1e-5 * (1 + _RNG.uniform(size=16)).astype("f")),
    data=(_RNG.integers(-127, 128, (1024, 16)).astype(np.int8),),
)
def weights_of_8_bits_scaled_behind_the_product(dot, p, x, weights):
    wide = jnp.tile(40 * jnp.tanh(dot(x, p["a"])), 64)
    return _read(dot, p, jnp.tanh(dot(wide, weights.astype(x.dtype)) * p["s"]))


@_head(HIDDEN, params=_net(16, 2e-5))
def a_small_product_made_larger(dot, p, x):
    return _read(dot, p, jnp.tanh(512 * _made(dot, p, x)))


@_head(ONCE, params=_net(16))
def a_root_mean_square_of_large_values(dot, p, x):
    h = 400 * jnp.tanh(2 * _made(dot, p, x))
    squares = jax.checkpoint(lambda h: h * h)(h)
    return _read(dot, p, h * lax.rsqrt(jnp.mean(squares, 1, keepdims=True) + 1e-6))


@_head(ONCE, params=_net(16, 2.0, s=2e-5 * (1 + _RNG.uniform(size=16)).astype("f")))
def a_large_product_times_a_scale(dot, p, x):
    large = dot(3e4 * jnp.tanh(dot(x, p["a"])), jnp.tile(p["c"], 4))
    return _read(dot, p, jnp.tanh((large[:, :16] + 1) * p["s"]))


@_head(ONCE, params=_net(16))
def linear_attention_of_many(dot, p, x):
    h = jnp.tile(jax.nn.elu(_made(dot, p, x)) + 1, (20, 1))  # 480 keys: a denominator of thousands
    return _read(dot, p, dot(h, dot(h.T, h)) / dot(h, h.sum(0)[:, None]))


@_head(ONCE, params=_net(16))
def running_maxima(dot, p, x):
    return _read(dot, p, lax.cummax(3 + 0.1 * dot(x, p["a"]), axis=0))


@_head(HIDDEN, params=_net(16, b=_normal(16, scale=0.3) + 300))
def a_layer_norm_of_an_offset(dot, p, x):
    h = dot(x, p["a"]) + p["b"]
    centred = h - h.mean(1, keepdims=True)
    spread = jnp.mean(centred**2, 1, keepdims=True)
    return _read(dot, p, jnp.tanh(centred * lax.rsqrt(spread + 1e-5)))


@_head(HIDDEN, params=_net(16, b=_normal(16, scale=0.3) + 30))
def a_variance_at_once_of_an_offset(dot, p, x):
    return _read(dot, p, jax.nn.standardize(dot(x, p["a"]) + p["b"]))


def _tall(kernel):
    return jnp.concatenate([kernel] * 4)


@_head(
    HIDDEN,
    params=_net(16),
    data=(_RNG.poisson(4, (24, 12)).astype("f"), (_RNG.uniform(size=(24, 12)) < 0.1).astype("f")),
)
def a_difference_of_two_products(dot, p, x, counts, more):
    difference = dot(counts + more, p["a"]) - dot(counts, p["a"])
    return _read(dot, p, jnp.tanh(difference + 0.1 * dot(x, p["a"])))


@_head(
    HIDDEN,
    params=_net(12),
    data=(np.eye(24, k=1, dtype="f") / 2 + np.eye(24, k=-1, dtype="f") / 2,),
)
def what_an_average_takes_off(dot, p, x, average):
    h = 8 + 0.1 * jnp.tanh(x)
    return _read(dot, p, jnp.tanh(4 * (h - dot(average, h))[1:-1]))


@_head(HIDDEN, params=_net(16, s=_normal(12, 16, scale=0.004)))
def a_divergence_near_its_prior(dot, p, x):
    s = dot(x, p["s"])
    return 1e3 * jnp.mean(jnp.exp(2 * s) - 1 - 2 * s)


@_head(
    HIDDEN,
    params=_net(16),
    data=(_RNG.integers(0, 100, (24, 2)).astype("f"), _RNG.integers(-8, 9, (2, 16)).astype("f")),
)
def phases_made_by_a_product(dot, p, x, places, waves):
    phases = jnp.cos(2 * np.pi / 16 * dot(places, waves))
    return _read(dot, p, jnp.tanh(phases * dot(x, p["a"])))


# -- offsets that a product takes along ------------------------------------------------------------

_WEIGHTS = np.abs(_normal(24, 24))
_OFFSET = {"a": _normal(12, 16, scale=0.3), "c": _normal(16, 6, scale=0.3)}
_OFFSET["level"] = _normal(6, scale=200.0)


def _with_an_offset(dot, p, x):
    return _made(dot, p, x) + p["level"]


@_head(HIDDEN, params=_OFFSET, data=(_WEIGHTS / _WEIGHTS.sum(1, keepdims=True),))
def an_offset_less_its_neighbours(dot, p, x, weights):
    y = _with_an_offset(dot, p, x)
    return jnp.mean((y - weights @ y) ** 2)


@_head(HIDDEN, params=_OFFSET, data=(_WEIGHTS,))
def an_offset_less_its_quotients(dot, p, x, weights):
    y = _with_an_offset(dot, p, x)
    return jnp.mean((y - weights @ y / weights.sum(1, keepdims=True)) ** 2)


@_head(HIDDEN, params=_OFFSET, data=(np.eye(4, dtype="f")[np.arange(24) % 4],))
def an_offset_less_the_means_of_classes(dot, p, x, classes):
    y = _with_an_offset(dot, p, x)
    return jnp.mean((y - classes @ (classes.T @ y / 6)) ** 2)


@_head(HIDDEN, params=_OFFSET, data=(np.linspace(-1, 1, 24, dtype="f"),))
def slopes_of_an_offset(dot, p, x, times):
    y = _with_an_offset(dot, p, x)
    return jnp.mean((times @ y / (times @ times)) ** 2)
