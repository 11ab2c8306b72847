"""Layers of linen, NNX, Equinox and Haiku, unedited, under each recipe, beside float32."""

import functools
import warnings

import _linen_layers
import _nnx_layers
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax

pytestmark = [
    pytest.mark.standard_promotion("the libraries promote masks and counts implicitly"),
    pytest.mark.no_leak_check("the libraries keep tracers until they are collected"),
    pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning"),  # RoPE's own
]

RECIPES = {
    "int8": mpjax.Int8CurrentScaling(),
    "float8": mpjax.Float8CurrentScaling(),
    "mxfp8": mpjax.MXFP8BlockScaling(),
    "delayed": mpjax.DelayedScaling(amax_history_len=2),
}
# How far results and gradients may be off: of layers with 3 to 8 values to add up.
BOUNDS = {"int8": (0.06, 0.15), "float8": (0.2, 0.4), "mxfp8": (0.2, 0.4), "delayed": (0.2, 0.4)}


def _linen(name):
    layer, args = _linen_layers.LAYERS[name]
    fun, variables = _linen_layers.applied(layer, args)
    return lambda v, *a: fun(v, *a)[0], variables, args


def _nnx(name):
    layer, args = _nnx_layers.LAYERS[name]()
    graph, state = nnx.split(layer)
    return lambda state, *a: nnx.merge(graph, state)(*a), state, args


KEY = jax.random.key(0)
WORDS = _linen_layers.array(32, 64)
EQUINOX = {
    "Linear": lambda: eqx.nn.Linear(64, 32, key=KEY),
    "MLP": lambda: eqx.nn.MLP(64, 32, 48, 2, key=KEY),
    "GRUCell": lambda: eqx.nn.Sequential([eqx.nn.Linear(64, 64, key=KEY), eqx.nn.LayerNorm(64)]),
    "Conv1d": lambda: eqx.nn.Sequential(
        [
            eqx.nn.Linear(64, 64, key=KEY),
            eqx.nn.Lambda(lambda x: x[None]),
            eqx.nn.Conv1d(1, 2, 3, key=KEY),
        ]
    ),
}
HAIKU = {
    "Linear": lambda x: hk.Linear(32)(x),
    "MLP": lambda x: hk.nets.MLP([48, 32])(x),
    "GRU": lambda x: hk.GRU(32)(x, jnp.zeros((32, 32)))[0],
    "LSTM": lambda x: hk.VanillaRNN(32)(x, jnp.zeros((32, 32)))[0],
    "MultiHeadAttention": lambda x: hk.MultiHeadAttention(
        2, 16, w_init=hk.initializers.VarianceScaling()
    )(x, x, x),
}


def _equinox(name):
    return lambda m, x: jax.vmap(m)(x), EQUINOX[name](), (WORDS,)


def _haiku(name):
    fun = hk.without_apply_rng(hk.transform(HAIKU[name]))
    return fun.apply, fun.init(KEY, WORDS), (WORDS,)


LIBRARIES = {
    "linen": (_linen, _linen_layers.LAYERS),
    "nnx": (_nnx, _nnx_layers.LAYERS),
    "equinox": (_equinox, EQUINOX),
    "haiku": (_haiku, HAIKU),
}
CASES = [(library, name) for library, (_, names) in LIBRARIES.items() for name in names]
# One of each library and recipe in each run of the tests; the rest prove the same of more layers.
OFTEN = {
    ("linen", "MultiHeadAttention", "float8"),
    ("nnx", "Linear", "int8"),
    ("equinox", "MLP", "delayed"),
    ("haiku", "MLP", "float8"),
}
ALL = [
    pytest.param(
        library, name, recipe, marks=[] if (library, name, recipe) in OFTEN else [pytest.mark.slow]
    )
    for library, name in CASES
    for recipe in RECIPES
]


def floats(tree):
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return [np.float64(x).ravel() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def error(found, expected):
    a, b = (np.concatenate(floats(tree)) for tree in (found, expected))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))


@functools.cache
def exact(library, name):
    """Returns a layer as a function of its floating parameters, and what it gives in float32."""
    make, _ = LIBRARIES[library]
    fun, params, args = make(name)
    moving, rest = eqx.partition(params, eqx.is_inexact_array)

    def run(moving, *args):
        return fun(eqx.combine(moving, rest), *args)

    def loss(run, moving, *args):
        out = [
            x for x in jax.tree.leaves(run(moving, *args)) if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) ** 2) for x in out), out

    step = jax.jit(jax.grad(functools.partial(loss, run), has_aux=True))
    return run, loss, moving, args, step(moving, *args)


@pytest.mark.parametrize(("library", "name", "recipe"), ALL)
def test_layer_is_itself_to_the_rounding_of_8_bits(library, name, recipe):
    run, loss, moving, args, (gradients, out) = exact(library, name)
    policy = mpjax.PolicyMap(
        "bf16-mixed", {"re:.*": mpjax.QuantizedPolicy("bf16-mixed", RECIPES[recipe])}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpjax.PolicyWarning)  # layers without products
        rows = mpjax.explain(run, policy)(moving, *args).rows
        if recipe == "delayed":
            fast = mpjax.with_amax_history(functools.partial(loss, run), policy)
            history = fast.init(moving, *args)
            step = jax.jit(jax.grad(fast.apply, argnums=1, has_aux=True))
            found, low = step(history, moving, *args)
        else:
            fast = mpjax.autocast(run, policy)
            step = jax.jit(jax.grad(functools.partial(loss, fast), has_aux=True))
            found, low = step(moving, *args)
    assert jax.tree.structure(found) == jax.tree.structure(gradients)
    assert [g.dtype for g in jax.tree.leaves(found)] == [
        g.dtype for g in jax.tree.leaves(gradients)
    ]
    most, most_of_gradients = BOUNDS[recipe]
    assert error(low, out) < most
    assert error(found, gradients) < most_of_gradients
    quantised = any(row.dtype in ("i8", "f8_e4m3fn") for row in rows)
    if name in ("Linear", "MLP", "Dense", "Einsum", "MultiHeadAttention") and recipe != "mxfp8":
        assert quantised


def test_there_are_forty_layers():
    assert len(CASES) >= 40
