"""Linear algebra, geometry and spectra: a loss that is written with products keeps them float32.

A user who casts by hand casts the network, and leaves the loss in float32. So the errors of
autocast are compared with those of that cast, and both with float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import AROUND
from _small import check_all, together
from jax import lax

import mpjax

_RNG = np.random.default_rng(3)


def _normal(*shape, scale=1.0):
    return (scale * _RNG.normal(size=shape)).astype(np.float32)


pytestmark = pytest.mark.standard_promotion("losses are run in float64 too, with float32 arrays")
LOW = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
WAYS = {
    "uncut": lambda fun: fun,
    "checkpoint": jax.checkpoint,
    "barrier": lambda fun: lambda *xs: lax.optimization_barrier(fun(*lax.optimization_barrier(xs))),
    "cond": AROUND["cond"],
    "fori_loop": AROUND["fori_loop"],
}


def _kernel(a, b):
    return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))


def _posterior(z, cut):
    """A Gaussian process: how likely the last points are, given the first."""
    old, new = z[:40, :2], z[40:, :2]
    y = jnp.asarray(TARGETS, z.dtype)
    factor = jnp.linalg.cholesky(_kernel(old, old) + 1e-3 * jnp.eye(len(old)))

    def moments(factor, old, new):
        across = _kernel(new, old)
        mean = across @ jax.scipy.linalg.cho_solve((factor, True), y[:40])
        spread = across @ jax.scipy.linalg.cho_solve((factor, True), across.T)
        return mean, 1.001 - jnp.diag(spread)

    mean, spread = cut(moments)(factor, old, new)
    return jnp.mean(0.5 * jnp.log(spread) + 0.5 * (y[40:] - mean) ** 2 / spread)


def _inverse_root(matrix):
    values, vectors = jnp.linalg.eigh(matrix)
    return vectors @ jnp.diag(values**-0.5) @ vectors.T


def _whitened(z, cut):
    """Two views' canonical correlations."""
    a, b = z[:, :4] - z[:, :4].mean(0), z[:, 4:] - z[:, 4:].mean(0)
    ridge = 1e-3 * jnp.eye(4)

    def correlations(a, b):
        roots = [_inverse_root(v.T @ v / len(v) + ridge) for v in (a, b)]
        return [roots[0] @ (a.T @ b / len(a)) @ roots[1]]

    (between,) = cut(correlations)(a, b)
    return -jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(between.T @ between + 1e-6 * jnp.eye(4))))


def _log_spectrum(filters):
    def loss(z, cut):
        """Sines, whose amplitudes a network gives; their spectrum is compared with another one."""
        phases = 2 * np.pi * FREQUENCIES * np.arange(512)[None]
        sines = jnp.asarray(np.sin(phases[..., None] * np.arange(1, 9)), z.dtype)

        def signal(z):
            return [jnp.einsum("bk,btk->bt", jax.nn.softplus(z), sines)]

        def logs(y):
            spectrum = jnp.abs(jnp.fft.rfft(y.reshape(64, -1, 128) * jnp.hanning(128))) ** 2
            return jnp.log((spectrum @ jnp.asarray(MEL, y.dtype) if filters else spectrum) + 1e-5)

        (y,) = cut(signal)(z)
        return jnp.mean(jnp.abs(logs(y) - logs(jnp.asarray(SIGNAL, z.dtype))))

    return loss


def _rotation(angle):
    length = jnp.sqrt(jnp.sum(angle**2) + 1e-12)
    x, y, z = angle / length
    o = jnp.zeros_like(x)
    cross = jnp.stack([jnp.stack([o, -z, y]), jnp.stack([z, o, -x]), jnp.stack([-y, x, o])])
    return jnp.eye(3) + jnp.sin(length) * cross + (1 - jnp.cos(length)) * (cross @ cross)


def _projected(z, cut):
    """Poses from a network: how far pixels are from where they should be."""

    def pixels(pose):
        def move(pose):
            return [jnp.asarray(POINTS, pose.dtype) @ _rotation(pose[:3]).T + pose[3:6]]

        (moved,) = cut(move)(pose)
        at = moved @ jnp.asarray(CAMERA, pose.dtype).T
        return at[:, :2] / at[:, 2:]

    poses = 0.1 * jnp.asarray(TARGETS, z.dtype)[:, None] + 0.01 * z
    return jnp.mean(jnp.abs(jax.vmap(pixels)(poses) - jax.vmap(pixels)(poses + 1e-3)))


def _filtered(z, cut):
    """A Kalman filter of the outputs of a network, whose prior knows nothing."""
    step, seen = jnp.array([[1.0, 0.1], [0.0, 1.0]]), jnp.array([[1.0, 0.0]])

    def filtered(ys):
        def turn(carry, y):
            mean, spread = carry
            mean, spread = step @ mean, step @ spread @ step.T + 0.01 * jnp.eye(2)
            around = seen @ spread @ seen.T + 0.02
            gain = spread @ seen.T @ jnp.linalg.inv(around)
            off = y - seen @ mean
            cost = off @ jnp.linalg.solve(around, off) + jnp.log(jnp.linalg.det(around))
            return (mean + gain @ off, (jnp.eye(2) - gain @ seen) @ spread), cost

        return [lax.scan(turn, (jnp.zeros(2), 1e3 * jnp.eye(2)), ys[:, None])[1]]

    (costs,) = cut(filtered)(z[:, 0])
    return costs.mean()


def _features(z, cut):
    """Fourier features of places in an image, whose frequencies are data."""
    places, waves = jnp.asarray(PLACES, z.dtype), jnp.asarray(WAVES, z.dtype)
    (made,) = cut(lambda p, w: [jnp.sin(2 * jnp.pi * (p @ w))])(places, waves)
    return jnp.mean((z * made[:, :8] - 1) ** 2)


def _diffused(z, cut):
    """Twenty steps of heat, in kelvin, and a network's heating."""
    stencil = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], z.dtype)[None, None]
    u = 288 + jnp.asarray(TARGETS, z.dtype)[:, None] * jnp.ones(8)

    def turn(u, _):
        padded = jnp.pad(u, 1, mode="edge")[None, None]
        return u + 0.1 * cut(lambda u: [lax.conv(u, stencil, (1, 1), "VALID")])(padded)[0][
            0, 0
        ], None

    out, _ = lax.scan(turn, u + 0.01 * z, None, length=20)
    return jnp.mean((out - 288 - jnp.asarray(TARGETS, z.dtype).mean()) ** 2)


def _expected(z, cut):
    """The mean place of a peak, in pixels, whose logits a network gives; and a table's prices."""

    def places(z):
        return [jax.nn.softmax(3 * z) @ jnp.asarray(CORNERS, z.dtype)]

    chosen = jax.nn.one_hot(np.arange(64) % 8, 8, dtype=z.dtype)
    (at,) = cut(places)(z)
    prices = chosen @ jnp.asarray(PRICES, z.dtype)
    right = np.asarray(PRICES)[np.arange(64) % 8] + 1
    return jnp.mean(jnp.abs(at - 70)) + jnp.mean(
        (prices + z[:, 0] - jnp.asarray(right, z.dtype)) ** 2
    )


def _valued(z, cut):
    """Value iteration: rewards from a network, 200 turns."""
    chances, rewards = jnp.asarray(CHANCES, z.dtype), z[:20, 0]

    def turn(v, _):
        return cut(lambda v: [jnp.max(rewards + 0.98 * chances @ v, 0)])(v)[0], None

    return jnp.mean((lax.scan(turn, 0 * rewards, None, length=200)[0] - 20) ** 2)


def _stationary(z, cut):
    """A Markov chain, whose chances a network gives, after 200 turns."""
    chances = jax.nn.softmax(z[:8])

    def turn(v, _):
        return cut(lambda v: [v @ chances])(v)[0], None

    out, _ = lax.scan(turn, jnp.ones(8, z.dtype) / 8, None, length=200)
    return -jnp.sum(jnp.arange(1.0, 9.0).astype(z.dtype) * jnp.log(out))


def _dependence(z, cut):
    """How much two kernels have in common, centred by a matrix that is made in the function."""
    centre = jnp.eye(len(z), dtype=z.dtype) - 1 / len(z)

    def common(a, b):
        return [jnp.trace(a @ centre @ b @ centre)]

    a, b = _kernel(z / 4, z / 4), _kernel(*[jnp.asarray(TARGETS, z.dtype)[:, None]] * 2)
    (ab,), (aa,), (bb,) = (cut(common)(*pair) for pair in ((a, b), (a, a), (b, b)))
    return -ab / jnp.sqrt(aa * bb)


X, U, D = _normal(64, 6), _normal(6, 32, scale=0.5), _normal(32, 8, scale=0.25)
TARGETS = _normal(64)
FREQUENCIES = _RNG.uniform(0.01, 0.03, (64, 1))
SIGNAL = np.sin(2 * np.pi * FREQUENCIES * np.arange(512)).astype(np.float32)
MEL = np.maximum(0, 1 - np.abs(np.linspace(0, 11, 65)[:, None] - np.arange(12))).astype(np.float32)
POINTS = _RNG.uniform(-1, 1, (12, 3)).astype(np.float32) + np.array([0, 0, 6], np.float32)
CAMERA = np.array([[1000, 0, 960], [0, 1000, 540], [0, 0, 1]], np.float32)
CORNERS = _RNG.integers(64, 80, (8, 2)).astype(np.float32)
PROJECTION = _normal(8, 2)
ON_A_DEVICE = jnp.asarray(PROJECTION)
CHANCES = _RNG.dirichlet(np.ones(20) * 0.3, size=(3, 20)).astype(np.float32)
PRICES = (1e4 + 30 * _RNG.normal(size=8)).astype(np.float32)
PLACES, WAVES = (_RNG.integers(0, 512, (64, 2)) / 512).astype(np.float32), _normal(2, 16, scale=20)

LOSSES = {
    "a posterior": _posterior,
    "canonical correlations": _whitened,
    "a log spectrum": _log_spectrum(filters=False),
    "a log mel spectrum": _log_spectrum(filters=True),
    "pixels of moved points": _projected,
    "a Kalman filter": _filtered,
    "Fourier features": _features,
    "diffused heat": _diffused,
    "expected places, and prices": _expected,
    "value iteration": _valued,
    "a Markov chain": _stationary,
    "an independence criterion": _dependence,
}


CASES = [  # each loss under both policies, and each way
    (name, way, list(LOW)[(i + j) % 2])
    for i, name in enumerate(LOSSES)
    for j, way in enumerate(WAYS)
]


def _network(u, d, x):
    return jnp.tanh(x @ u) @ d


def _loss(name, way="uncut", low=None):
    def loss(u, d, x):
        cast = [a if low is None else a.astype(low) for a in (u, d, x)]
        return LOSSES[name](_network(*cast).astype(u.dtype), WAYS[way])

    return loss


@functools.cache
def _right(name):
    with jax.enable_x64(True):
        return _both(_loss(name))(*(jnp.asarray(a, jnp.float64) for a in (U, D, X)))


def _errors(name, loss):
    value, *gradients = [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(_both(loss)(U, D, X), _right(name), strict=True)
    ]
    return value, max(gradients)


@functools.cache
def _errors_by_hand(name, policy):
    return _errors(name, _loss(name, low=LOW[policy]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "way", "policy"), CASES)
def test_law_of_matrices_the_errors_are_those_of_a_network_cast_by_hand(name, way, policy):
    hand = [max(e, 2**-7) for e in _errors_by_hand(name, policy)]
    got = _errors(name, mpjax.autocast(_loss(name, way), policy))
    assert all(a <= 2 * b for a, b in zip(got, hand, strict=True)), (got, hand)


def _both(loss):
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return lambda *args: [np.asarray(a, np.float64) for a in jax.tree.leaves(run(*args))]


def _stream(x, w):
    h = jnp.tanh(x @ w)
    h = h + jnp.linalg.solve(9 * jnp.eye(8) + jnp.abs(w), h.T).T
    return jnp.tanh(h @ w) @ w


def _turned_gradient(x, w):
    """A Hamiltonian network: its gradient is turned by a constant that swaps places and signs."""
    turn = np.kron(np.array([[0, 1], [-1, 0]]), np.eye(4)).astype(np.float32)
    gradient = jax.vmap(jax.grad(lambda x: (jnp.tanh(x @ w) @ w).sum()))(x)
    return jnp.mean((gradient @ turn - x) ** 2)


def _spectral_norm(x, w):
    return jnp.tanh(x @ (w / jnp.linalg.norm(w, 2))) @ w


def _scored_states(x, w):
    """A recurrent network, whose states a vector of weights scores in each turn."""

    def turn(h, row):
        return jnp.tanh(row @ w + h @ w), jnp.tanh(h) @ w[0]

    return lax.scan(turn, x[:1] @ w, x[:, None])[1]


@pytest.mark.parametrize(
    ("fun", "dtypes"),
    [
        (_stream, ["bf16"] * 3),
        (_scored_states, ["bf16"] * 4),
        (_spectral_norm, ["bf16"] * 2),
        (_turned_gradient, ["bf16"] * 5),
        (lambda x, w: jnp.tanh(x @ jnp.linalg.qr(w)[0]) @ w, ["f32", "bf16"]),
        (lambda x, w: jnp.tanh(jnp.linalg.solve(w, x.T).T) @ w, ["bf16"]),
        (lambda x, w: jnp.log(jax.nn.softmax(x @ w) @ w), ["bf16"] * 2),
        (lambda x, w: jnp.abs(jnp.fft.fft(jnp.tanh(x @ w) @ w)) @ w, ["bf16"] * 3),
        (lambda x, w: x @ jnp.stack([w, w])[1], ["bf16"]),
        (lambda x, w: jnp.tanh(x @ w) @ PROJECTION, ["bf16"] * 2),
        (lambda x, w: jnp.tanh(x[:, :4] @ w[:4, :4]) @ PROJECTION[:4], ["bf16"] * 2),
        (lambda x, w: jnp.tanh(x @ w) @ ON_A_DEVICE, ["bf16"] * 2),
        (lambda x, w: jax.nn.one_hot(3, 8) @ w @ w, ["bf16"] * 2),
        (lambda x, w: jnp.arange(8.0) @ w, ["bf16"]),
        (lambda x, w: x @ w[0], ["bf16"]),
        (lambda x, w: jnp.tanh(x @ w) @ w[0], ["bf16"] * 2),
        (lambda x, w: jnp.tanh(x) @ w, ["bf16"]),
        (lambda x, w: x[:, :3] @ CAMERA, ["f32"]),
        (lambda x, w: jnp.asarray(np.eye(4, 8, dtype=np.float32)) @ w, ["bf16"]),
    ],
)
def test_layers_beside_linear_algebra_are_low(fun, dtypes):
    rows = mpjax.explain(fun, "bf16-mixed")(_normal(16, 8), np.eye(8, dtype=np.float32)).rows
    made = [row.dtype for row in rows if row.operation == "dot_general" for _ in range(row.count)]
    assert sorted(made) == sorted(dtypes)


# -- matrices that a branch chooses, or a loop carries ---------------------------------------------

OBSERVED = (np.eye(2, 6) + 0.3 * _RNG.normal(size=(2, 6))).astype(np.float32)
SPREAD = (lambda a: (3 * (a @ a.T + 5 * np.eye(6))).astype(np.float32))(_RNG.normal(size=(6, 6)))


def _seen(p):
    return OBSERVED @ p @ OBSERVED.T + 1e-3 * jnp.eye(2)


def _gain(p):
    return jnp.linalg.solve(_seen(p), OBSERVED @ p).T


# Updates of a Kalman filter's covariance: what was observed is known to 1e-3 afterwards.
UPDATES = {
    "p - k h p": lambda p: p - _gain(p) @ OBSERVED @ p,
    "p - k (h p)": lambda p: p - _gain(p) @ (OBSERVED @ p),
    "(1 - k h) p": lambda p: (jnp.eye(6) - _gain(p) @ OBSERVED) @ p,
    "(1 - k h) p, of a given 1": lambda p: (EYE - _gain(p) @ OBSERVED) @ p,
    "Joseph's": lambda p: (
        (jnp.eye(6) - _gain(p) @ OBSERVED) @ p @ (jnp.eye(6) - _gain(p) @ OBSERVED).T
        + 1e-3 * _gain(p) @ _gain(p).T
    ),
    "by an inverse": lambda p: p - p @ OBSERVED.T @ jnp.linalg.inv(_seen(p)) @ OBSERVED @ p,
    "by a factor": lambda p: (
        p
        - (OBSERVED @ p).T
        @ jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(_seen(p)), OBSERVED @ p)
    ),
    "by einsum": lambda p: p - jnp.einsum("ij,jk,kl->il", _gain(p), OBSERVED, p),
    "after a prediction": lambda p: UPDATES["p - k h p"](MOVE @ p @ MOVE.T + 0.1 * jnp.eye(6)),
    "if observed": lambda p: (
        p - lax.cond(p[0, 0] > 0, _gain, lambda p: jnp.zeros((6, 2)), p) @ OBSERVED @ p
    ),
}
EYE = np.eye(6, dtype=np.float32)
MOVE = (np.eye(6) + 0.1 * np.eye(6, k=2)).astype(np.float32)
TURNS = {
    "one": lambda update: update,
    "in a branch": lambda update: lambda p: lax.cond(p[0, 0] > 0, update, lambda p: p, p),
    "scan": lambda update: lambda p: lax.scan(lambda p, _: (update(p), None), p, None, 5)[0],
    "fori_loop": lambda update: lambda p: lax.fori_loop(0, 20, lambda _, p: update(p), p),
    "written out": lambda update: lambda p: update(update(update(p))),
}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", UPDATES)
def test_law_of_matrices_a_filters_covariance_is_float32_in_each_turn(name, policy):
    funs = {turns: around(UPDATES[name]) for turns, around in TURNS.items()}
    right = together(funs, SPREAD)
    got = together({k: mpjax.autocast(fun, policy) for k, fun in funs.items()}, SPREAD)
    for turns in TURNS:
        np.testing.assert_allclose(got[turns], right[turns], rtol=1e-2, atol=1e-4, err_msg=turns)


def _turned_about(angle):
    c, s = jnp.cos(angle), jnp.sin(angle)
    return jnp.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


# Rotations that a branch or a loop hands on; the angles, of a matrix of them, are data.
HANDED_ON = {
    "else zeros": lambda a: lax.cond(a[0] < 9, _turned_about, lambda _: jnp.zeros((3, 3)), a[0]),
    "else a given one": lambda a: lax.cond(
        a[0] < 9, lambda a: _turned_about(a[0]), lambda a: a[:9].reshape(3, 3), a
    ),
    "one of three": lambda a: lax.switch(
        1, [lambda _: jnp.eye(3), _turned_about, lambda _: jnp.zeros((3, 3))], a[0]
    ),
    "of a scan": lambda a: lax.scan(lambda _, t: (_turned_about(t), None), jnp.eye(3), a)[0],
    "composed in a scan": lambda a: lax.scan(
        lambda c, t: (_turned_about(t) @ c, None), _turned_about(a[0]), a
    )[0],
    "composed in a while": lambda a: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, _turned_about(a[1]) @ c[1]),
        (0, _turned_about(a[0])),
    )[1],
    "composed in nested loops": lambda a: lax.fori_loop(
        0,
        2,
        lambda _, c: lax.fori_loop(0, 2, lambda _, c: _turned_about(a[1]) @ c, c),
        jnp.eye(3),
    ),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_law_of_matrices_a_rotation_is_one_behind_a_branch_and_a_loop(name):
    def fun(points, angles):
        return points @ HANDED_ON[name](angles).T

    points = _normal(32, 3) + np.float32([120, -80, 40])
    angles = _normal(9)
    for policy in LOW:
        got = mpjax.autocast(fun, policy)(points, angles)
        np.testing.assert_allclose(got, fun(points, angles), atol=1e-3)


@pytest.mark.parametrize("policy", LOW)
def test_law_of_matrices_a_known_turn_and_colours_are_float32(policy):
    turn = np.linalg.qr(_normal(3, 3))[0]
    ycc = np.float32(
        [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]
    )
    points = _normal(32, 3) + np.float32(120)
    for known in (turn, jnp.asarray(turn), ycc, ycc[1:], ycc.T):
        fun = lambda p, m=known: p[:, : m.shape[1]] @ m.T  # noqa: E731
        np.testing.assert_allclose(mpjax.autocast(fun, policy)(points), fun(points), atol=1e-3)


def _damped(size):
    """A Gram matrix, scaled by a number, damped, and scaled back."""

    def loss(u):
        g = u.T @ u / 32
        a = size(jnp.trace(g))
        return jnp.linalg.slogdet((g / a + 1e-4 * jnp.eye(8)) * a)[1]

    return loss


@pytest.mark.parametrize("policy", LOW)
def test_law_of_matrices_a_number_is_no_gate(policy):
    sizes = {
        "as it is": lambda t: t,
        "by logarithms": lambda t: jnp.exp(jnp.log(t)),
        "a geometric mean": lambda t: jnp.exp(jnp.mean(jnp.log(jnp.stack([t, 3.0])))),
        "by a softplus": jax.nn.softplus,
    }
    rows = {
        name: mpjax.explain(_damped(size), policy)(_normal(32, 8)).rows
        for name, size in sizes.items()
    }
    made = {
        name: {row.dtype for row in of if row.operation == "dot_general"}
        for name, of in rows.items()
    }
    assert len({frozenset(dtypes) for dtypes in made.values()}) == 1, made


COEFFICIENTS = np.array(
    [6.112, 0.444, 1.43e-2, 2.648e-4, 3.03e-6, 2.067e-8, 6.407e-11, -9.524e-14, -9.76e-16],
    np.float32,
)
"""Of the pressure of saturated water vapour, in hPa, by powers of the temperature in Celsius."""
LONGITUDE = np.array([4.8952, 6.28332, -0.0075, -0.0326, -0.0003, 0.0002], np.float32)


def _of_the_sun(days):
    years = days / 365.25
    turn = 1.7535 + 6.283076 * years
    waves = [f(k * turn) for k in (1, 2) for f in (jnp.sin, jnp.cos)]
    return jnp.stack([jnp.ones_like(years), years, *waves], -1)


# Sums of functions of inputs, with a coefficient for each, as people write them.
EXPANSIONS = {
    "a polynomial by its powers": lambda t: jnp.stack([t**k for k in range(9)], -1) @ COEFFICIENTS,
    "a polynomial by vander": lambda t: jnp.vander(t, 9, increasing=True) @ COEFFICIENTS,
    "a polynomial by an array": lambda t: jnp.array(COEFFICIENTS) @ t ** jnp.arange(9.0)[:, None],
    "a polynomial of each": lambda t: jax.vmap(lambda t: COEFFICIENTS @ t ** np.arange(9))(t),
    "its logarithm": lambda t: jnp.log(jnp.vander(t, 9, increasing=True) @ COEFFICIENTS),
    "declination of the sun": lambda t: jnp.sin(_of_the_sun(9000 + t) @ LONGITUDE),
    "a series of cosines": lambda t: jnp.cos(t[:, None] * np.arange(1, 10) / 40) @ COEFFICIENTS,
    "an angle of coordinates": lambda t: jnp.sin((t[:, None] * np.arange(1, 7)) @ LONGITUDE),
}


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", EXPANSIONS)
def test_law_of_expansions_a_sum_of_functions_of_inputs_is_float32(name, policy):
    t = np.linspace(-79, 30, 24).astype(np.float32)
    funs = {where: cut(EXPANSIONS[name]) for where, cut in AROUND.items()}
    check_all(funs, policy, t, rtol=2e-3, atol=1e-5)
