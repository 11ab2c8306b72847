"""Attention that nobody named runs in one kernel: found here, not found there, speed alone."""

import functools

import _attention_kernel as formulas
import _attention_written as written
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention_written import FOUND, NOT_FOUND, TIME, WEIGHTS, X
from _differential import equations
from _hinted import hints

import mpjax

pytestmark = [
    pytest.mark.standard_promotion("libraries promote masks and counts implicitly"),
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
]
HINT = "attended"
SCALE = pytest.approx(written.SIZE**-0.5)


def attentions(fun, *args):
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return [eqn for eqn in eqns if eqn.primitive.name == "attention"]


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_here(name, policy):
    assert len(attentions(mpjax.autocast(FOUND[name], policy), WEIGHTS, X)) == 1


@pytest.mark.parametrize("name", NOT_FOUND)
def test_it_is_not_found_there(name):
    assert not attentions(mpjax.autocast(NOT_FOUND[name], "bf16-mixed"), WEIGHTS, X)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FOUND)
def test_it_is_not_found_where_a_gradient_inside_reads_its_weights(name):
    gradient = jax.grad(lambda *args: jnp.sum(FOUND[name](*args)))
    assert not attentions(mpjax.autocast(gradient, "bf16-mixed"), WEIGHTS, X)


@pytest.mark.parametrize("policy", ["float32", "tf32"])
def test_nothing_is_found_where_nothing_is_low(policy):
    fun = functools.partial(mpjax.autocast, FOUND["of_all"])
    fun = fun("float32") if policy == "float32" else fun("float32", dot_precision=policy)
    assert not attentions(fun, WEIGHTS, X)


def results(fun):
    """Returns what a function gives, and the gradients of a loss of it."""

    def loss(weights, x):
        out = fun(weights, x)
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def error(found, wanted):
    """Returns the relative error; infinite unless both are NaN at the same places."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    if not np.array_equal(np.isnan(found), np.isnan(wanted)):
        return np.inf
    found, wanted = np.nan_to_num(found), np.nan_to_num(wanted)
    if not wanted.any():
        return np.linalg.norm(found)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.fixture(
    scope="module",
    params=[5, pytest.param(3, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.slow)],
)
def computed(request):
    """Returns by name what a program gives: in float32, without the hint, with it, by a kernel.

    Of each fifth attention, in CI of each third, or of all. These are compiled together, once:
    tests that had one name each would do so in each process.
    """
    names = list(FOUND)[:: request.param]
    if request.config.getoption("first_case"):
        names = names[:1]
    funs = [FOUND[name] for name in names]
    programs = [
        lambda w, x: [results(fun)(w, x) for fun in funs],
        lambda w, x: [results(mpjax.autocast(f, "bf16-mixed"))(w, x) for f in funs],
    ]
    plain, low = programs
    wide = jax.jit(plain)(WEIGHTS, X)
    with hints.without(HINT):
        without = jax.jit(lambda w, x: low(w, x))(WEIGHTS, X)
    hinted = jax.jit(lambda w, x: low(w, x))(WEIGHTS, X)
    with formulas.everywhere(formulas):
        by_kernel = jax.jit(lambda w, x: low(w, x))(WEIGHTS, X)
    columns = zip(wide, without, hinted, by_kernel, strict=True)
    return dict(zip(names, columns, strict=True))


def test_on_a_cpu_values_are_equal_to_the_bit(computed):
    for name, (_, ((_, before), _), ((_, after), _), _) in computed.items():
        np.testing.assert_array_equal(before, after, name)


def test_gradients_are_as_exact_as_without_it(computed):
    for name, columns in computed.items():
        for wide, without, *ours in zip(*(gradients for _, gradients in columns), strict=True):
            allowed = 1.25 * error(without, wide) + 2**-9
            assert [error(found, wide) < allowed for found in ours] == [True, True], name


def test_values_of_a_kernel_are_as_exact(computed):
    for name, (((_, wide), _), ((_, without), _), _, ((_, by_kernel), _)) in computed.items():
        assert error(by_kernel, wide) < 1.25 * error(without, wide) + 2**-9, name


PAIRS = {"causal_by_tril", "in_groups", "by_jax_nn", "by_nnx", "of_all", "in_a_scan"}


def kept(fun):
    low = mpjax.autocast(fun, "bf16-mixed")
    leaves = jax.eval_shape(lambda w, x: jax.vjp(low, w, x)[1], WEIGHTS, X)
    return [x.shape for x in jax.tree.leaves(leaves) if x.shape[-2:] == (TIME, TIME)]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_no_pairs_of_tokens_are_kept(name):
    assert kept(FOUND[name]) == []
    with hints.without(HINT):
        assert kept(FOUND[name])


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("causal_by_tril", {"right": 0, "left": None, "scale": 1.0}),
        ("by_nnx", {"right": 0}),
        ("by_linen", {"right": 0}),
        ("by_jax_nn_in_a_window", {"right": 0, "left": 5, "scale": pytest.approx(0.3)}),
        ("heads_first_by_hand", {"right": 0, "scale": SCALE}),
        ("of_padded_keys", {"right": None}),
    ],
)
def test_masks_of_positions_are_read_and_not_computed(name, spec):
    (eqn,) = attentions(mpjax.autocast(FOUND[name], "bf16-mixed"), WEIGHTS, X)
    found = eqn.params["program"].spec
    assert {field: getattr(found, field) for field in spec} == spec


def test_equal_layers_are_one_program():
    def two(weights, x):
        for _ in range(2):
            x = x + FOUND["causal_by_tril"](weights, x)
        return x @ weights[4]

    eqns = attentions(mpjax.autocast(two, "bf16-mixed"), WEIGHTS, X)
    assert len({eqn.params["program"] for eqn in eqns}) == 1
    assert len(eqns) == 2


def of_places(weights, x, places):
    """An attention over the keys whose places are no later than a query's."""
    mask = jnp.asarray(places)[:, None] >= jnp.asarray(places)
    return written.attend(*written.heads(weights, x), mask, jnp.float32)


def of_scale(weights, x, size):
    query, *others = written.heads(weights, x)
    scale = jax.lax.rsqrt(jnp.asarray(size))
    return written.attend(query * scale, *others, jnp.ones((), bool), jnp.float32)


def of_bias(weights, x, times):
    """A bias that is moved to where the logits are before any step of the attention reads it."""
    bias = times * weights[: written.HEADS, :TIME, :TIME]
    return jax.nn.dot_product_attention(*written.heads(weights, x), bias=bias[None])


PLACES = np.arange(TIME, dtype=np.int32)


@pytest.mark.parametrize(
    ("fun", "given"),
    [
        (of_places, [PLACES, PLACES[::-1].copy()]),
        (of_places, [PLACES[::-1].copy(), PLACES]),
        (of_bias, [1.0, -2.0]),
        (of_scale, [np.full(1, 4.0, np.float32), np.full(1, 1 / 16, np.float32)]),
    ],
)
def test_attentions_that_differ_outside_of_them_are_two(fun, given):
    def both(weights, x):
        return [written.out(weights, fun(weights, x, one)) for one in given]

    low = mpjax.autocast(both, "bf16-mixed")
    assert len(attentions(low, WEIGHTS, X)) == 2
    with formulas.everywhere(formulas):
        found = jax.jit(low)(WEIGHTS, X)
    for one, wanted in zip(found, both(WEIGHTS, X), strict=True):
        assert error(one, wanted) < 2**-5


def test_a_deep_program_is_planned_as_fast_as_without_it():
    """Sums of values that are read twice lead back to the input in 2³⁰⁰ ways."""

    def deep(weights, x):
        for _ in range(300):
            x = x + x * jax.nn.softmax(x)
        return FOUND["causal_by_tril"](weights, x)

    low = mpjax.autocast(deep, "bf16-mixed")
    assert len(attentions(low, WEIGHTS, X)) == 1
