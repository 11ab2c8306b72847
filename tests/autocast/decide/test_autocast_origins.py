"""A difference knows what is the same, though its elements were moved, chosen or joined before."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cuts import MOVES as AND_BACK
from _differential import equations
from _planned import op_rules
from jax import lax

import mpjax
from mpjax._autocast.known import facts, traits, walk

_RNG = np.random.default_rng(7)
X, W = (_RNG.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 6)))
ROWS, OTHERS = np.array([1, 0, 2, 3, 5]), np.array([5, 4, 3, 2, 1])
GROUPS = np.array([0, 0, 1, 1, 2, 2, 3, 3])


def _windows(worst, choose):
    return lambda u, _: lax.reduce_window(u, worst, choose, (2, 1), (2, 1), "VALID")


def _put(how):
    return lambda u, rows: getattr(jnp.zeros((8, 6)).at[rows], how)(u[:5])


# What moves or chooses elements: of `f(z)` and `g(z)` it makes values that may be almost the same.
CHOSEN = {
    "abs": lambda u, _: jnp.abs(u),
    "approx_top_k": lambda u, _: lax.approx_max_k(u, 3)[0],
    "broadcast_in_dim": lambda u, _: jnp.broadcast_to(u[None], (2, 8, 6)),
    "clamp": lambda u, _: lax.clamp(-0.5, u, 0.5),
    "concatenate": lambda u, _: jnp.concatenate([u, 2 * u], axis=1),
    "copy": lambda u, _: jnp.copy(u),
    "cummax": lambda u, _: lax.cummax(u, 1),
    "cummin": lambda u, _: lax.cummin(u, 1),
    "dynamic_slice": lambda u, rows: lax.dynamic_index_in_dim(u, rows[0], 0),
    "dynamic_update_slice": lambda u, rows: lax.dynamic_update_slice(
        jnp.zeros((9, 6)), u, (rows[0], 0)
    ),
    "gather": lambda u, rows: u[rows],
    "gather: a row each": lambda u, rows: jax.vmap(lambda row: row[rows[0]])(u),
    "max": lambda u, _: jnp.maximum(u, 0.1),
    "min": lambda u, _: jnp.minimum(u, 0.1),
    "name": lambda u, _: jax.ad_checkpoint.checkpoint_name(u, "u"),
    "neg": lambda u, _: -u,
    "optimization_barrier": lambda u, _: lax.optimization_barrier(u),
    "pad": lambda u, _: jnp.pad(u, 1),
    "reduce_max": lambda u, _: u.max(1),
    "reduce_min": lambda u, _: u.min(0),
    "reduce_window_max": _windows(-np.inf, lax.max),
    "reduce_window_min": _windows(np.inf, lax.min),
    "reshape": lambda u, _: u.reshape(4, 12),
    "rev": lambda u, _: u[::-1],
    "scan": lambda u, _: lax.scan(lambda c, row: (c, row), 0, u)[1],
    "scatter": _put("set"),
    "scatter-max": _put("max"),
    "scatter-max: segments": lambda u, _: jax.ops.segment_max(u, jnp.asarray(GROUPS), 4),
    "scatter-min": _put("min"),
    "select_n": lambda u, _: jnp.where(u > 0, u, 0.0),
    "slice": lambda u, _: u[1:5],
    "sort": lambda u, _: jnp.sort(u, axis=1),
    "split": lambda u, _: jnp.split(u, 2, axis=1)[1],
    "squeeze": lambda u, _: jnp.squeeze(u[None], 0),
    "stack": lambda u, _: jnp.stack([u, u]),
    "stop_gradient": lambda u, _: lax.stop_gradient(u),
    "tile": lambda u, _: jnp.tile(u, (2, 1)),
    "top_k": lambda u, _: lax.top_k(u, 3)[0],
    "transpose": lambda u, _: u.T,
    "unstack": lambda u, _: jnp.unstack(u)[2],
}
# What puts each element back where it was, behind one of the two values alone.
PUT_BACK = {
    **AND_BACK,
    "split and joined": lambda u: jnp.concatenate(jnp.split(u, 2, 1), 1),
    "a function of each half": lambda u: jnp.concatenate([jnp.tanh(h) for h in jnp.split(u, 2, 1)]),
    "pooled and repeated": lambda u: jnp.repeat(_windows(-np.inf, lax.max)(u, None), 2, axis=0),
}
# Functions of each element: of positive values, as some of them need.
_PLAIN_NAMES = """
exp exp2 expm1 log log1p cbrt sin cos tan sinh cosh tanh sqrt square floor ceil rsqrt round
logistic erf erfc atan asinh acosh lgamma digamma bessel_i0e bessel_i1e
"""
OF_EACH = {
    **{name: getattr(lax, name) for name in _PLAIN_NAMES.split()},
    "log2": jnp.log2,
    "erf_inv": lambda p: lax.erf_inv(p / 4),
    "asin": lambda p: lax.asin(p / 4),
    "acos": lambda p: lax.acos(p / 4),
    "atanh": lambda p: lax.atanh(p / 4),
    "atan2": lambda p: jnp.atan2(p, 2.0),
    "pow": lambda p: p**2.5,
    "integer_pow": lambda p: p**3,
    "add": lambda p: p + 1,
    "sub": lambda p: 1 - p,
    "mul": lambda p: p * p,
    "div": lambda p: 1 / p,
    "rem": lambda p: lax.rem(p, 0.7 + 0 * p),
    "polygamma": lambda p: lax.polygamma(1.0 + 0 * p, p),
    "zeta": lambda p: lax.zeta(p + 1, p),
    "igamma": lambda p: lax.igamma(p, p),
    "igammac": lambda p: lax.igammac(p, p),
    "igamma_grad_a": lambda p: lax.igamma_grad_a(p, p),
    "random_gamma_grad": lambda p: lax.random_gamma_grad(p, p),
    "regularized_incomplete_beta": lambda p: lax.betainc(p, p, p / 4),
    "nextafter": lambda p: lax.nextafter(p, p + 1),
    "complex": lambda p: jnp.conj(lax.complex(p, p)).imag + lax.complex(p, p).real,
    "reduce_sum of one": lambda p: p[None].sum(0),
}
# Different elements of one value.
OTHER = {
    "neighbours": lambda u: u[1:] - u[:-1],
    "halves": lambda u: jnp.subtract(*jnp.split(u, 2, 1)),
    "rows of two keys": lambda u: u[ROWS] - u[OTHERS],
    "a softmax": lambda u: u - u.max(1, keepdims=True),
    "the largest and the smallest": lambda u: u.max(1) - u.min(1),
}
# A mesh makes these, a reference, or a memory space; or a sign, which no rounding changes.
_ELSEWHERE_NAMES = """
all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pcast pmax pmin ppermute
preduced pvary reduced_vary_cast reduced_vary_cast_p reshard mesh_cast sharding_constraint
unreduced_pmax unreduced_pmin vary_unreduced_cast vary_unreduced_cast_p shard_alike
layout_constraint with_memory_space_constraint device_put nonbatchable nondifferentiable_backward
xla_metadata_value copy_p expand_dims sign
"""
ELSEWHERE = frozenset(_ELSEWHERE_NAMES.split())


def _differs(difference, boundary=lambda fun: fun):
    """Returns whether a function of `z` is read by a difference that may cancel, as decided."""

    def fun(x, w, rows):
        made = jnp.ravel(difference(x @ w, rows, boundary))[:6]
        return jnp.tanh(100 * made) @ w.T

    with mock.patch("mpjax._autocast.known.fusible._MAX_FUNCTION", 0):  # look into calls
        rows = mpjax.explain(fun, "bf16-mixed")(X, W, jnp.asarray(ROWS)).rows
    # Of a sort the result of the product is float32.
    said = "may be almost the same is subtracted", "a product's float32 sums"
    return any(text in row.reason for text in said for row in rows)


@pytest.mark.parametrize("boundary", [lambda fun: fun, jax.jit], ids=["uncut", "jit"])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_moved_or_chosen_of_two_functions_may_be_almost_the_same(name, boundary):
    chosen = CHOSEN[name]

    def difference(z, rows, boundary):
        first = boundary(lambda z, rows: chosen(jnp.tanh(z), rows))(z, rows)
        return first - boundary(lambda z, rows: chosen(jnp.tanh(1.01 * z), rows))(z, rows)

    assert _differs(difference, boundary)


@pytest.mark.parametrize("boundary", [lambda fun: fun, jax.jit], ids=["uncut", "jit"])
@pytest.mark.parametrize("name", PUT_BACK)
def test_what_is_moved_and_put_back_may_be_almost_the_same(name, boundary):
    def difference(z, _, boundary):
        moved = boundary(lambda z: PUT_BACK[name](jnp.tanh(z)))(z)
        return jnp.ravel(moved) - jnp.ravel(jnp.tanh(1.01 * z))

    assert _differs(difference, boundary)


@pytest.mark.parametrize("name", OF_EACH)
def test_functions_of_almost_the_same_may_be_almost_the_same(name):
    def difference(positive):
        return OF_EACH[name](positive) - OF_EACH[name](1.01 * positive)

    program = jax.make_jaxpr(difference)(jnp.ones((2, 3)))
    known = walk.inside(program, walk.unrelated(program.jaxpr))
    assert facts.is_difference(program.eqns[-1], known)


@pytest.mark.parametrize("name", OTHER)
def test_other_elements_of_one_value_are_not_almost_the_same(name):
    assert not _differs(lambda z, _, __: OTHER[name](jnp.tanh(z)))


def _traced(functions, *args):
    """Returns the names of the operations that some functions consist of."""
    return {
        eqn.primitive.name for fun in functions for eqn in equations(jax.make_jaxpr(fun)(*args))
    }


def test_each_operation_that_moves_or_chooses_is_in_the_table():
    traced = _traced(CHOSEN.values(), X[:, :6], jnp.asarray(ROWS))
    named = {name.split(":")[0] for name in CHOSEN}  # a primitive of a newer JAX
    assert (op_rules.MOVES | op_rules.EXACT) - traced - named <= ELSEWHERE


# Each result of these is made of elements at many places, or of a program that is not known.
_MIXED_NAMES = """
reduce reduce_window reduce_window_sum scatter-add scatter-sub scatter-mul select_and_gather_add
select_and_scatter select_and_scatter_add psum psum_invariant reduce_scatter unreduced_psum
unreduced_reduce_scatter psum_scatter polynomial
"""


def test_each_operation_that_is_a_function_of_each_element_is_in_the_table():
    mixed = traits.STATISTIC | traits.UNFORGIVING | frozenset(_MIXED_NAMES.split())
    known = op_rules.MOVES | op_rules.EXACT | op_rules.PRODUCTS | mixed
    traced = _traced(OF_EACH.values(), jnp.ones((2, 3)))
    named = {name.split(" ")[0] for name in OF_EACH}  # a primitive of a newer JAX
    no_function_makes = {"add_any", "one_minus_square"}
    missing = frozenset(op_rules.OP_RULES) - known - traced - named - no_function_makes
    assert missing == set(), "give each a function in OF_EACH, or its name in _MIXED_NAMES"


# -- what no program of a network shows ------------------------------------------------------------

_HELD = [jnp.asarray(np.full((6, 6), n, np.float32)) for n in (1, 2)]


@jax.custom_jvp
def _with_an_error(u):
    """A function with a rule, one of whose results no one reads, as a solver's error."""
    v = u @ _HELD[0]
    return v, jnp.abs(v).max()


_with_an_error.defjvp(lambda given, moved: jax.jvp(_with_an_error.fun, given, moved))
UNUSUAL = {
    "two arrays that the program holds": lambda z: z @ (_HELD[0] * _HELD[1]),
    "integers as operands": lambda z: jnp.arange(64).reshape(8, 8) @ z / 100,
    "booleans as operands": lambda z: (jnp.arange(64).reshape(8, 8) % 3 == 0) @ z,
    "a result that nobody reads": lambda z: _with_an_error(z)[0],
}


@pytest.mark.standard_promotion("JAX's products take integers beside float32")
@pytest.mark.parametrize("name", UNUSUAL)
def test_facts_of_unusual_operands_are_told(name):
    """Each raised an IndexError or a KeyError once."""

    def fun(x, w):
        return UNUSUAL[name](x @ w).sum()

    got = jax.grad(mpjax.autocast(fun, "bf16-mixed"), argnums=1)(X, W)
    np.testing.assert_allclose(got, jax.grad(fun, argnums=1)(X, W), rtol=0.03, atol=0.03 * 64)
