"""The same forward pass written twice: a cut through one of the two changes no number.

PPO writes `logp(new) - logp(old)` with the same parameters in both at first. Uncut, both copies are
rounded alike, and the difference is 0. A cut stores, and so rounds, a value of one copy only.
"""

import random

import _cuts
import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _heads import _LABELS, _N, _apply, _head, _net, _normal
from _planned import plan_of, read_flags
from jax import lax
from jax.experimental import io_callback

import mpjax

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("heads are run in float64 too, with float32 literals"),
]

WRITTEN_TWICE = []
_FOUR = {**_net(4, 1.0), "e": _normal(4, 4)}


def _read(dot, p, a, b):
    """Returns a loss that reads a difference, and one copy beside it."""
    ratio = jnp.exp(30 * (a - lax.stop_gradient(b)))
    return jnp.mean((dot(ratio * jnp.sin(a), p["e"]) - 1) ** 2)


@_head(WRITTEN_TWICE, outs=5, scale=2.0, data=(_LABELS, _normal(_N)))
def ppo(dot, p, x, actions, gain):
    def logp(p, x, actions):
        logits = jax.nn.log_softmax(_apply(dot, p, x))
        return jnp.take_along_axis(logits, actions[:, None], 1)[:, 0]

    ratio = jnp.exp(logp(p, x, actions) - lax.stop_gradient(logp(p, x, actions)))
    return -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain))


@_head(WRITTEN_TWICE, params=_FOUR)
def a_difference_that_a_product_reads(dot, p, x):
    def net(p, x):
        return jnp.tanh(dot(jnp.sin(_apply(dot, p, x)), p["e"]))

    return _read(dot, p, net(p, x), net(p, x))


@_head(WRITTEN_TWICE, params=_FOUR)
def a_ratio(dot, p, x):
    first, second = (jax.nn.softmax(_apply(dot, p, x)) for _ in range(2))
    ratio = first / lax.stop_gradient(second)
    return jnp.mean(jnp.abs(ratio - 1) + ratio * jnp.sin(first))


@_head(WRITTEN_TWICE, params=_FOUR)
def a_reciprocal(dot, p, x):
    first, second = (jax.nn.log_softmax(_apply(dot, p, x)) for _ in range(2))
    ratio = jnp.exp(first) * jnp.exp(-lax.stop_gradient(second))
    return jnp.mean(jnp.abs(ratio - 1) + ratio * jnp.sin(first))


@_head(WRITTEN_TWICE, params={**_FOUR, "level": _normal(4, scale=10.0)})
def a_bias_that_a_product_takes_along(dot, p, x):
    def net(p, x):
        return dot(jnp.sin(_apply(dot, p, x)) + p["level"], p["e"])

    return _read(dot, p, net(p, x), net(p, x))


@_head(WRITTEN_TWICE, params=_FOUR)
def a_table_that_each_net_makes(dot, p, x):
    def net(p, x):
        prices = np.linspace(-20, 20, 4)[:, None] * np.ones((1, 4))
        return jax.nn.softmax(_apply(dot, p, x)) @ jnp.asarray(prices, x.dtype)

    return _read(dot, p, net(p, x), net(p, x))


@_head(WRITTEN_TWICE, params=_FOUR)
def in_two_jits(dot, p, x):
    @jax.jit
    def net(p, x):
        return _apply(dot, p, x)

    @jax.jit
    def and_softmax(p, x):
        return jax.nn.log_softmax(_apply(dot, p, x))

    return _read(dot, p, jax.nn.log_softmax(net(p, x)), and_softmax(p, x))


@_head(WRITTEN_TWICE, params={**_FOUR, "each": _normal(3, 4, 4, scale=0.5)})
def a_scan_over_layers(dot, p, x):
    def net(p, x):
        def layer(h, w):
            return jnp.tanh(dot(h, w) + 0.1), None

        return jax.nn.log_softmax(lax.scan(layer, _apply(dot, p, x), p["each"])[0])

    return _read(dot, p, net(p, x), net(p, x))


_EIGHT = {name: _normal(8, 8, scale=0.5) for name in "qkv"}


@_head(WRITTEN_TWICE, params={**_net(8, 1.0), **_EIGHT, "o": _normal(8, 4), "e": _normal(4, 4)})
def attention(dot, p, x):
    def net(p, x):
        h = _apply(dot, p, x)
        u = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        weights = jax.nn.softmax(dot(dot(u, p["q"]), dot(u, p["k"]).T) / 3)
        return jax.nn.log_softmax(dot(jax.nn.gelu(h + dot(weights, dot(u, p["v"]))), p["o"]))

    return _read(dot, p, net(p, x), net(p, x))


NAMES = metamorphic.add(WRITTEN_TWICE)


# A `custom_vmap` is compiled, and not evaluated in NumPy: where the last bit of a float32 differs,
# a product's operand may be rounded to a neighbour.
KINDS = [kind for kind in (*_cuts.BOUNDARIES, *_cuts.MOVES) if kind not in metamorphic.ONLY_INSIDE]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_through_one_of_two_copies_changes_no_number(kind):
    rng = random.Random(kind)
    for _ in range(3):
        name, dtype = rng.choice(NAMES), rng.choice(list(metamorphic.POLICIES))
        where = metamorphic.INSIDE if rng.random() < 0.4 else metamorphic.OUTSIDE
        limit = metamorphic.bound(name, dtype, ("uncut", "by hand", "widest"))
        errors = metamorphic.cut_errors(name, dtype, kind, where, rng)
        assert errors[0] <= limit[0], (name, dtype, where)
        assert errors[1] <= limit[1], (name, dtype, where)


# -- what is the same, and what is not -------------------------------------------------------------

X, W, V = _normal(8, 6), _normal(6, 6), _normal(6, 6)


def _net_of(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)


def _dropped(key, x, w, v):
    kept = jax.random.bernoulli(jax.random.key(key), 0.5, x.shape)
    return _net_of(jnp.where(kept, x, 0.0), w, v)


def _measured(x):
    """Returns noise that is another one each time."""
    return io_callback(lambda: np.zeros(X.shape, np.float32), jax.typeof(x))


def _by_turns(x, w, v):
    return lax.fori_loop(0, 5, lambda _, h: _net_of(h, w, v), x)


# fmt: off
THE_SAME = {
    "written twice": lambda x, w, v: _net_of(x, w, v) - _net_of(x, w, v),
    "one copy in a jit": lambda x, w, v: jax.jit(_net_of)(x, w, v) - _net_of(x, w, v),
    "called twice": lambda x, w, v: jnp.subtract(*(jax.jit(_net_of)(x, w, v) for _ in range(2))),
    "by the same random bits": lambda x, w, v: _dropped(0, x, w, v) - _dropped(0, x, w, v),
    "by the same loop": lambda x, w, v: _by_turns(x, w, v) - _by_turns(x, w, v),
    "of a reshaped input": lambda x, w, v: _net_of(x.reshape(2, 4, 6).reshape(8, 6), w, v)
        - _net_of(x, w, v),
    "one copy in a branch": lambda x, w, v: _net_of(x, w, v)
        - lax.cond(x[0, 0] > 0, _net_of, lambda *args: _net_of(*args), x, w, v),
    "of a padded input, cut out": lambda x, w, v: _net_of(jnp.pad(x, 2)[2:-2, 2:-2], w, v)
        - _net_of(x, w, v),
    "of a cut out input, padded": lambda x, w, v: _net_of(jnp.pad(x[1:], ((1, 0), (0, 0))), w, v)
        - _net_of(x, w, v),
    "a ratio": lambda x, w, v: _net_of(x, w, v) / _net_of(x, w, v),
    "sums over an axis": lambda x, w, v: _net_of(x, w, v).sum(1) - (2 * _net_of(x, w, v)).sum(1),
    "a negated copy": lambda x, w, v: -_net_of(x, w, v) + _net_of(x, w, v),
    "a copy times a negative": lambda x, w, v: 0.5 * _net_of(x, w, v) + -0.5 * _net_of(x, w, v),
    "times a reciprocal": lambda x, w, v: _net_of(x, w, v) * (1 / _net_of(x, w, v)),
    "times a negative power": lambda x, w, v: _net_of(x, w, v) * _net_of(x, w, v) ** -1,
    "times a negative exponential": lambda x, w, v: jnp.exp(_net_of(x, w, v))
        * jnp.exp(-_net_of(x, w, v)),
    "squares, one of a negated": lambda x, w, v: jnp.square(-_net_of(x, w, v))
        - jnp.square(_net_of(x, w, v)),
    "in two losses of each example": lambda x, w, v: jnp.mean(
        _net_of(x, w, v)[:, 0] - 0.1 * _net_of(x, w, v).sum(1)),
    "weighted by what may be negative": lambda x, w, v: _net_of(x, w, v) * x[0]
        + _net_of(x, w, v) * -x[0],
    "one layer of two": lambda x, w, v: (lambda h: jnp.tanh(h @ v) - jnp.sin(h @ v))(x @ w),
}
OTHER = {
    "other weights": lambda x, w, v: _net_of(x, w, v) - _net_of(x, v, w),
    "other inputs": lambda x, w, v: jnp.subtract(*(_net_of(u, w, v) for u in jnp.split(x, 2))),
    "a negated input": lambda x, w, v: _net_of(x, w, v) - _net_of(-x, w, v),
    "a transposed input": lambda x, w, v: _net_of(x[:6], w, v) - _net_of(x[:6] @ w.T, w, v),
    "neighbours in a window": lambda x, w, v: (lambda p: _net_of(p[:-1], w, v)
        - _net_of(p[1:], w, v))(jnp.pad(x, ((0, 1), (0, 0)))),
    "tokens that are one later": lambda x, w, v: _net_of(x, w, v)
        - _net_of(jnp.pad(x[:-1], ((1, 0), (0, 0))), w, v),
    "tokens that are one later, joined": lambda x, w, v: _net_of(x, w, v)
        - _net_of(jnp.concatenate([jnp.zeros((1, 6)), x[:-1]]), w, v),
    "other random bits": lambda x, w, v: _dropped(0, x, w, v) - _dropped(1, x, w, v),
    "a measurement": lambda x, w, v: _net_of(x + _measured(x), w, v)
        - _net_of(x + _measured(x), w, v),
    "turns of a loop": lambda x, w, v: _by_turns(x, w, v) - _net_of(x, w, v),
    "another loop": lambda x, w, v: _by_turns(x, w, v)
        - lax.fori_loop(0, 4, lambda _, h: _net_of(h, w, v), x),
    "rows of one": lambda x, w, v: (lambda u: u - u.mean(0))(_net_of(x, w, v)),
    "another choice": lambda x, w, v: _net_of(x, w, v)
        - lax.cond(x[0, 0] > 0, _net_of, lambda *_: x, x, v, w),
    "two losses": lambda x, w, v: _net_of(x, w, v).mean() - 0.1 * _net_of(x, w, v).var(),
    "both negated": lambda x, w, v: -_net_of(x, w, v) - jnp.square(_net_of(x, w, v)),
    "terms of a sum": lambda x, w, v: _net_of(x, w, v) + jnp.abs(_net_of(x, w, v)),
    "copies that never meet": lambda x, w, v: (_net_of(x, w, v), _net_of(x, w, v)),
    "a checkpoint, differentiated": lambda x, w, v: jax.grad(
        lambda w: jax.checkpoint(_net_of)(x, w, v).var())(w),
}
# fmt: on


def _asks(plan):
    for decision in plan.decisions:
        if decision.call is not None and any(map(_asks, decision.call.programs)):
            return True
    return any(read & read_flags.AGAIN for read in plan.reads.values())


@pytest.mark.parametrize("name", [*THE_SAME, *OTHER])
def test_copies_are_found_by_what_they_are_computed_of(name):
    fun = (THE_SAME | OTHER)[name]
    _kept, plan = plan_of(fun, (X, W, V))
    assert _asks(plan) == (name in THE_SAME)


def test_explain_says_that_the_same_is_computed_again():
    def fun(x, w, v):
        return jnp.tanh(100 * (_net_of(x, w, v) - _net_of(x, w, v))) @ v

    rows = mpjax.explain(fun, "bf16-mixed")(X, W, V).rows
    assert {row.reason for row in rows if row.operation == "tanh"} >= {
        "the same is computed again elsewhere, and the two may cancel"
    }


def _block(p, x):
    return jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]


def _add(p, x, by):
    return x + _block(p, by)


def _take_off(p, x, by):
    return x - _block(p, by)


def _scale(p, x, by):
    scale, shift = jnp.split(_block(p, by) @ p["split"], 2, -1)
    return x * jnp.exp(jnp.tanh(scale)) + shift


def _unscale(p, x, by):
    scale, shift = jnp.split(_block(p, by) @ p["split"], 2, -1)
    return (x - shift) * jnp.exp(-jnp.tanh(scale))


COUPLINGS = {"additive": (_add, _take_off), "affine": (_scale, _unscale)}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_law_of_layers_an_inverse_undoes_a_reversible_network(coupling, policy):
    def layer(seed):
        made = ((16, 32), (32, 16), (16, 32))
        draws = [np.random.default_rng((seed, i)).normal(size=s) for i, s in enumerate(made)]
        scaled = [np.float32(w / w.shape[0] ** 0.5) for w in draws]
        return dict(zip(("up", "down", "split"), scaled, strict=True))

    forth, back = COUPLINGS[coupling]
    a, b = np.random.default_rng(9).normal(size=(2, 8, 16)).astype(np.float32)

    def there_and_back(cut):
        def run(layers, a, b):
            for p, q in layers:
                a = cut(forth)(p, a, b)
                b = cut(forth)(q, b, a)
            for p, q in layers[::-1]:
                b = cut(back)(q, b, a)
                a = cut(back)(p, a, b)
            return a, b

        return run

    layers = [(layer(2 * i), layer(2 * i + 1)) for i in range(4)]
    for cut in (lambda fun: fun, jax.jit, jax.checkpoint):
        got = jax.jit(mpjax.autocast(there_and_back(cut), policy))(layers, a, b)
        off = np.abs(np.asarray(got) - (a, b)).max((0, 2))
        # A row comes back to a unit of float32, which may turn one rounding of float16 in a layer.
        assert off.max() < 5e-3
        assert np.sum(off > 1e-4) <= 2, off
