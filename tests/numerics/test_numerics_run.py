"""What `mpjax.numerics` runs is the program itself, and what it counts is right, loops and all."""

import random
from functools import partial

import _differential as differential
import _programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mpjax import autocast
from mpjax.numerics import _bits
from mpjax.numerics._overflow import BORN_INF, BORN_NAN, INHERITED, TURNED, Overflow
from mpjax.numerics._plan import RunPlan, is_inexact
from mpjax.numerics._run import Runner
from mpjax.testing import assert_bitwise_equal

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")


def planned(jaxpr):
    return RunPlan(jaxpr, [f"in{i}" for i in range(len(jaxpr.jaxpr.invars))])


def counted(fun, *args):
    """Returns rows by operation: [inf, nan, amax, origin], and their indices."""
    plan = planned(jax.make_jaxpr(fun)(*args))
    _, rows, _ = jax.jit(Runner(plan, Overflow()).run)(args)
    values, index = np.asarray(rows.values), np.asarray(rows.index)
    names = [site.operation for site in plan.sites]
    return (
        plan,
        {n: values[i] for i, n in enumerate(names)},
        {n: index[i].tolist() for i, n in enumerate(names)},
    )


# -- the same program ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [47])
def test_the_twin_gives_the_values_of_the_program(seed):
    _same_values(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_the_twin_gives_the_values_of_more_programs(seed):
    _same_values(seed)


def _same_values(seed):
    rng = random.Random(seed)
    program = _programs.random_program(rng)
    mode = rng.choice([mode for mode in differential.MODES if mode.fits(program)])
    try:
        case = differential.trace(program, mode, lambda fun: autocast(fun, "bf16-mixed"))
    except differential.JaxRefusesError:
        pytest.skip("JAX cannot do this to the program")
    jaxpr = case.transformed
    plan = planned(jaxpr)
    outs, rows, _ = jax.jit(Runner(plan, Overflow()).run)(list(case.args))
    assert rows.values.shape == (len(plan.sites), 4)
    for out, want in zip(outs, jax.jit(jaxpr_as_fun(jaxpr))(*case.args), strict=True):
        _assert_close(out, want)


def _assert_close(out, want):
    """XLA fuses the two differently: a value may be rounded to bfloat16 the other way."""
    assert (out.dtype, out.shape) == (want.dtype, want.shape)
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        assert_bitwise_equal(out, want)
        return
    out, want = np.asarray(out, np.complex64), np.asarray(want, np.complex64)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
    size = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    np.testing.assert_allclose(out, want, rtol=2**-6, atol=size * 2**-8)


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [7, 70_000])
def test_counts_are_those_of_numpy(dtype, size):
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    x[3], x[-1], x[-2] = np.nan, np.inf, -np.inf
    x = x.astype(jnp.dtype(dtype))
    infs, nans, amax = jax.jit(_bits.counts)(x)[0]
    wide = x.astype(np.float32)
    assert (int(infs), int(nans)) == (np.isinf(wide).sum(), np.isnan(wide).sum())
    assert float(amax) == np.abs(wide[np.isfinite(wide)]).max()


def test_a_chain_of_elementwise_operations_is_counted_in_one_pass():
    def fun(x):
        y = jnp.exp(x)  # inf
        y = jnp.log(y.astype(jnp.float16)).astype(jnp.float32) * 3
        for _ in range(9):
            y = jnp.sin(y)  # NaN of inf
        return jnp.sum(y)

    x = jnp.float32([[100.0, 1.0, 2.0]])
    plan, rows, _ = counted(fun, x)
    assert [rows[n][:2].tolist() for n in ("exp", "log", "sin")] == [[1, 0], [1, 0], [0, 1]]
    assert rows["exp"][2] == pytest.approx(np.exp(2), rel=1e-6)
    assert rows["convert_element_type"][2] == np.float32(np.float16(np.exp(np.float32(2))))
    text = str(jax.make_jaxpr(Runner(plan, Overflow()).run)([x]))
    passes = text.count("name=counts")
    assert passes == 4  # the argument, eight rows, the others of the chain, the sum
    assert len(plan.sites) == 15


def test_counting_leaks_no_tracer():
    with jax.checking_leaks():
        jax.make_jaxpr(lambda x: _bits.counts(x, x * 2))(jnp.ones(5))


def test_nothing_in_an_empty_array_and_the_parts_of_a_complex_one_are_counted():
    assert _bits.counts(jnp.zeros((0, 3))).tolist() == [[0, 0, 0]]
    assert _bits.counts(jnp.array([complex(1, np.nan), 3j])).tolist() == [[0, 1, 3]]


def test_born_turned_and_inherited_are_told_apart():
    def fun(x):
        born = jnp.exp(x)  # inf of finite
        nan = jnp.sin(born)  # NaN of inf
        return jnp.log(x) + jnp.tanh(nan)  # log: NaN of finite

    _, rows, _ = counted(fun, jnp.float32([1000.0, -1.0]))
    origins = {name: row[3] for name, row in rows.items()}
    expected = {"exp": BORN_INF, "sin": TURNED, "log": BORN_NAN, "tanh": INHERITED}
    assert {name: origins[name] for name in expected} == expected
    assert rows["exp"][:2].tolist() == [1, 0]
    assert rows["exp"][2] == pytest.approx(np.exp(-1), rel=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_tells_the_index_in_what_it_scans(reverse):
    def fun(xs):
        return lax.scan(lambda c, x: (c + x, jnp.exp(c)), 0.0, xs, reverse=reverse)

    xs = jnp.zeros(7).at[4].set(200.0)
    plan, rows, index = counted(fun, xs)
    assert index["exp"] == [3 if reverse else 5]
    assert rows["exp"][0] == (4 if reverse else 2)
    assert rows["exp"][3] == BORN_INF
    level = next(s for s in plan.sites if s.operation == "exp").levels[0]
    assert level.executed(index["exp"][0]) == (3 if reverse else 5)


def test_nested_loops_tell_each_index_and_a_while_its_iteration():
    def inner(c, x):
        return c, jnp.exp(x)

    def fun(xs):
        _, ys = lax.scan(lambda c, row: (c, lax.scan(inner, 0.0, row)[1]), 0.0, xs)
        return ys

    _, _, index = counted(fun, jnp.zeros((3, 4)).at[2, 1].set(1e3))
    assert index["exp"] == [2, 1]
    _, rows, index = counted(
        lambda x: lax.while_loop(lambda c: c < 3e38, lambda c: jnp.sinh(c) * 3, x), jnp.float32(1)
    )
    assert rows["sinh"][3] == BORN_INF
    steps = 0
    value = np.float32(1)
    with np.errstate(over="ignore"):
        while np.isfinite(value):
            value, steps = np.float32(np.sinh(value) * 3), steps + 1
    assert index["sinh"] == [steps - 1]


def test_a_loop_that_vmap_joined_ends_for_each_by_itself():
    def fun(x):
        return lax.while_loop(lambda c: c < 3, lambda c: jnp.sinh(c) + 1, x)

    xs = jnp.asarray([0.0, 4.0, 2.0])
    plan = planned(jax.make_jaxpr(jax.vmap(fun))(xs))
    outs, _, _ = Runner(plan, Overflow()).run((xs,))
    np.testing.assert_allclose(outs[0], jax.vmap(fun)(xs), rtol=1e-6)


def test_only_the_branch_that_was_taken_has_counts():
    def fun(i, x):
        return lax.switch(i, [jnp.exp, jnp.sinh, jnp.cosh], x)

    plan, rows, _ = counted(fun, jnp.int32(1), jnp.float32(1000))
    assert [rows[n][0] for n in ("exp", "sinh", "cosh")] == [0, 1, 0]
    branches = {s.operation: s.branch for s in plan.sites}
    assert [branches[n] for n in ("exp", "sinh", "cosh")] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_shard_is_told_and_counts_are_of_all_shards(devices, check_vma):
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    specs = {"in_specs": P(("a", "b")), "out_specs": P(("a", "b"))}

    @partial(jax.shard_map, mesh=mesh, check_vma=check_vma, **specs)
    def fun(x):
        body = lambda c, v: (c + jnp.exp(v), None)  # noqa: E731
        total, _ = lax.scan(body, jnp.zeros_like(x[0]), x)
        return lax.cond(total.sum() > 0, jnp.sinh, jnp.tanh, x)

    x = jnp.ones((16, 3)).at[11].set(100.0)
    jaxpr = jax.make_jaxpr(fun)(x)
    plan = planned(jaxpr)
    outs, rows, _ = jax.jit(Runner(plan, Overflow()).run)([x])
    np.testing.assert_array_equal(outs[0], fun(x))
    row = next(i for i, s in enumerate(plan.sites) if s.operation == "exp")
    infs, nans, amax, origin = np.asarray(rows.values)[row].tolist()
    assert (infs, nans, origin) == (3, 0, BORN_INF)
    assert amax == pytest.approx(np.e, rel=1e-6)
    assert np.asarray(rows.index)[row].tolist() == [5, 1]  # the shard, then the iteration


def test_rows_are_in_program_order_and_operands_are_known_through_programs():
    @jax.jit
    def inside(x):
        return jnp.tanh(x)

    def fun(x):
        y = jnp.exp(x)
        z, _ = lax.scan(lambda c, _: (inside(c), None), y, None, length=2)
        return jax.checkpoint(lambda v: jnp.sin(v) * v)(z) + lax.cond(
            z.sum() > 0, jnp.cos, jnp.tan, y
        )

    plan, rows, _ = counted(jax.grad(lambda v: fun(v).sum()), jnp.float32([1e3, 2.0]))
    names = [s.operation for s in plan.sites]
    assert names.index("exp") < names.index("tanh") < names.index("sin")
    assert rows["exp"][3] == BORN_INF
    _, rows, _ = counted(fun, jnp.float32([1e3, 2.0]))
    assert rows["cos"][3] == TURNED  # what came into the branch was known to hold inf


def test_every_floating_result_has_a_row_or_the_values_of_its_operand():
    jaxpr = jax.make_jaxpr(
        lambda x: jnp.reshape(-x, (4,)) + jnp.sum(x.astype(jnp.bfloat16).astype(jnp.float32))
    )(jnp.ones((2, 2)))
    plan = planned(jaxpr)
    kinds = {step.eqn.primitive.name: step.kind.name for step in plan.block.steps}
    assert kinds["neg"] == kinds["reshape"] == "SAME"
    assert kinds["add"] == "SITE"
    assert kinds["convert_element_type"] in ("SITE", "SAME")
    assert all(is_inexact(v) for v in jaxpr.jaxpr.outvars)
