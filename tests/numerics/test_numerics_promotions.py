"""Every planted promotion is found, with its line and cause, and nothing that widens on purpose."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _libraries import LIBRARIES

from mpjax.numerics import find_promotions

pytestmark = [
    pytest.mark.standard_promotion("promotion is what is looked for"),
    pytest.mark.no_leak_check("Flax's own code runs here"),
]

X = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
SCALAR, CONSTANT, TABLE = "a float32 scalar", "a float32 constant", "a float32 table"
ONES = np.ones(8, np.float32)
POSITIONS = np.sin(np.arange(8, dtype=np.float32))

# Each on a line of its own; the function of JAX that widens, and because of what.
PLANTED = [
    (lambda x: x * np.float32(2), "multiply", SCALAR),
    (lambda x: x / np.sqrt(np.float32(8)), "divide", SCALAR),
    (lambda x: x + jnp.ones(8), "add", CONSTANT),
    (lambda x: x - jnp.asarray(ONES), "subtract", CONSTANT),
    (lambda x: x * jnp.sin(jnp.arange(8, dtype=jnp.float32)), "multiply", TABLE),
    (lambda x: x * jnp.asarray(POSITIONS), "multiply", CONSTANT),
    (lambda x: jnp.mean(x, dtype=jnp.float32), "mean", "dtype= of a reduction"),
    (lambda x: jnp.sum(x, axis=1, dtype=jnp.float32), "sum", "dtype= of a reduction"),
    (lambda x: jnp.where(x > 0, x, np.float32(-1e9)), "where", SCALAR),
    (lambda x: jnp.concatenate([x, jnp.zeros((1, 8))]), "concatenate", CONSTANT),
    (lambda x: jnp.maximum(x, np.zeros((), np.float32)), "max", SCALAR),
    (lambda x: x ** np.float32(3), "power", SCALAR),
    (lambda x: x @ jnp.ones((8, 3)), "matmul", CONSTANT),
    (lambda x: jnp.zeros((2, 8)).at[0].set(x[0]), "set", CONSTANT),
    (lambda x: jax.lax.scan(lambda c, r: (c, r * np.float32(2)), 0, x)[1], "multiply", SCALAR),
]


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_a_planted_promotion_is_found(number):
    fun, function, because = PLANTED[number]
    found = find_promotions(fun)(X)
    assert len(found.rows) == 1, str(found)
    (row,) = found.rows
    assert row.where == f"test_numerics_promotions.py:{inspect.getsourcelines(fun)[1]}"
    assert (row.function, row.because) == (function, because)
    assert (row.source, row.target) == ("bf16", "f32")
    assert row.bytes == 2 * int(np.prod(row.shape))
    assert row.where in str(found)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x * 2.0 + 1,
        lambda x: x.astype(jnp.float32) * jnp.ones(8),
        lambda x: jnp.asarray(x, jnp.float32) + ONES,
        lambda x: jax.lax.convert_element_type(x, jnp.float32),
        jax.nn.softmax,
        jnp.mean,
        jnp.var,
        jnp.linalg.norm,
        lambda x: jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32),
        lambda x: jax.nn.logsumexp(x, axis=-1),
        lambda x: x * jnp.asarray(ONES, x.dtype),
        lambda x: jnp.where(x > 0, x, -1e9),
    ],
)
def test_what_is_on_purpose_or_narrow_again_is_not(fun):
    found = find_promotions(fun)(X)
    assert not found
    assert found.rows == found.library == ()
    assert "no 16-bit value is widened" in str(found)


def test_an_argument_that_widens_is_named_by_its_path():
    def apply(params, x):
        return x @ params["dense"]["kernel"]

    params = {"dense": {"kernel": jax.ShapeDtypeStruct((8, 3), jnp.float32)}}
    (row,) = find_promotions(apply)(params, X).rows
    assert row.because == "the float32 argument 'params/dense/kernel'"


def test_integers_of_numpy_are_taken_as_jax_takes_them():
    labels = np.arange(4)  # int64, of which JAX would warn: a warning is an error here
    (row,) = find_promotions(lambda x, y: x[y] * jnp.ones(8))(X, labels).rows
    assert row.because == CONSTANT


def test_a_gradient_shows_what_the_forward_pass_widened():
    def loss(w, x):
        y = x @ w
        z = y * jnp.ones(3)
        return jnp.sum(z * z)

    found = find_promotions(jax.value_and_grad(loss))(jax.ShapeDtypeStruct((8, 3), jnp.bfloat16), X)
    assert {(r.function, r.because) for r in found.rows} == {("multiply", CONSTANT)}
    assert found.to_dict()["rows"][0]["target"] == "f32"
    assert found.bytes == sum(r.bytes for r in found.rows)


def _low(tree):
    def lowered(x):
        floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.bfloat16) if floating else x

    return jax.tree.map(lowered, tree)


# Statistics, tables of rotations, and a carry that starts in float32: the libraries' own choices.
BY_CHOICE = {
    "linen": "BatchNorm Bidirectional GroupNorm InstanceNorm LayerNorm RMSNorm RNN",
    "nnx": "BatchNorm GroupNorm InstanceNorm LayerNorm RMSNorm RNN RoPE",
    "equinox": "RotaryPositionalEmbedding",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # NNX
@pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning")  # RoPE's own
@pytest.mark.parametrize("library", LIBRARIES)
def test_law_no_layer_of_a_library_is_listed_as_a_mistake(library):
    widened = set()
    for name in LIBRARIES[library].layers:
        program = LIBRARIES[library].program(name)
        found = find_promotions(program.fun)(*_low(program.args))
        assert found.rows == (), f"{name}: {found}"
        widened |= {name} if found.library else set()
    known = set(BY_CHOICE[library].split())
    assert widened in (known, known - {"RoPE"})  # newer than the floor


def test_what_a_library_widens_is_apart():
    module = nn.LayerNorm()  # no dtype: float32 parameters win over a bfloat16 input
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    found = find_promotions(lambda v, x: module.apply(v, x))(variables, X)
    assert found.rows == ()
    assert found.library
    assert all(row.library for row in found.library)
    assert "in libraries, by their own choice" in str(found)
