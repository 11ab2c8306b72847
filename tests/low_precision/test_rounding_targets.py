"""Roundings stay in the programs for GPUs and TPUs that are not here: their values, run here."""

import functools

import _hlo_values
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import compiled_for
from _optimizers import OWNERS

from mpjax import optim, pods
from mpjax.testing import assert_bitwise_equal

pytestmark = pytest.mark.standard_promotion("optax.apply_updates adds float32 to half parameters")

NEAREST = {"nearest": lambda tx: tx}
TARGETS = [
    pytest.param("h100", marks=pytest.mark.gpu_compiler),
    pytest.param("v5e-4", marks=pytest.mark.tpu_compiler),
]
# Where a thousand steps of a thousandth end, from 1, and how far their mean may be from there.
ENDS = {
    "nearest": (1.0, 0.0),
    "master": (2.0, 0.0),
    "split": (2.0, 2.0**-6),
    "kahan": (2.0, 2.0**-6),
    "stochastic": (2.0, 0.012),  # of 1024: 0.084 / √1024 is a deviation, of which these are 4.5
}


def stepper(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def compiled(target, name, dtype, count):
    """Returns the text of a step for hardware that is not here."""
    tx = (OWNERS | NEAREST)[name](optax.sgd(1.0))
    params = jax.ShapeDtypeStruct((count,), dtype)
    grads = jax.ShapeDtypeStruct((count,), jnp.float32)
    return compiled_for(target, stepper(tx), params, jax.eval_shape(tx.init, params), grads)


def advanced(text, params, state, grads):
    """Returns what the program for the target makes of a step."""
    leaves, treedef = jax.tree.flatten(state)
    out = _hlo_values.run(text, *map(np.asarray, (params, *leaves, grads)))
    out = out if isinstance(out, tuple) else (out,)
    return out[0], treedef.unflatten(out[1:])


# -- as their compilers left them -----------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "stochastic" else ()) for name in ENDS],
)
def test_a_thousand_steps_of_a_thousandth_end_there_as_here(target, name):
    text = compiled(target, name, "bfloat16", 1024)
    tx = (OWNERS | NEAREST)[name](optax.sgd(1.0))
    params = jnp.ones(1024, jnp.bfloat16)
    state, grads = tx.init(params), np.full(1024, -1e-3, np.float32)
    for _ in range(1000):
        params, state = advanced(text, params, state, grads)
    got = np.asarray(params, np.float64)
    end, within = ENDS[name]
    assert abs(got.mean() - end) <= within
    assert (np.ptp(got) > 0) == (name == "stochastic")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OWNERS)
def test_law_17_programs_for_what_is_not_here_land_on_the_same_bits(target, name, dtype):
    count = 50_000
    random = np.random.default_rng(5)
    # Every exponent of float16, and as many of bfloat16's; steps of every size beside them.
    size = np.ldexp(random.choice([-1, 1], count), random.integers(-13, 15, count))
    params = jnp.asarray(size * random.uniform(1, 2, count), dtype)
    steps = size * np.ldexp(random.normal(size=count), random.integers(-24, 1, count))
    near = -np.asarray(params, np.float64) * (1 + np.ldexp(1.0, -random.integers(1, 20, count)))
    steps = np.where(random.random(count) < 0.7, steps, near).astype(np.float32)
    tx = OWNERS[name](optax.sgd(1.0))
    text, here = compiled(target, name, dtype, count), jax.jit(stepper(tx))
    state = tx.init(params)
    for grads in (steps, steps[::-1].copy(), -steps):
        want = here(params, state, grads)
        assert_bitwise_equal(advanced(text, params, state, grads), want)
        params, state = want


@pytest.mark.gpu_compiler
def test_a_sum_as_in_a_textbook_is_dead_on_an_h100():
    """What the two tests above are for, and that they would see it."""

    def textbook(params, rest, grads):
        step = rest.astype(jnp.float32) - grads
        full = params.astype(jnp.float32)
        new = (full + step).astype(params.dtype)
        return new, (step - (new.astype(jnp.float32) - full)).astype(params.dtype)

    params = jnp.ones(8, jnp.bfloat16)
    args = (params, jnp.zeros_like(params), jnp.full(8, -1e-3))
    text = compiled_for("h100", textbook, *args)
    here = jax.jit(textbook)
    there = args[:2]
    for _ in range(1000):
        args = (*here(*args), args[2])
        there = advanced(text, *there, args[2])
    assert float(args[0][0]) == 2
    assert float(there[0][0]) == 1


# Bytes for each parameter: what a step of AdamW holds is read and written, gradients are read.
ROWS = functools.partial(optim.with_quantized_state, block_size=None)
BF16 = functools.partial(optim.with_state_dtypes, mu_dtype="bf16", nu_dtype="bf16")
ONCE = {
    "master": (OWNERS["master"], 30),
    "split": (OWNERS["split"], 24),
    "kahan": (OWNERS["kahan"], 26),
    "split, bf16": (lambda tx: OWNERS["split"](BF16(tx)), 16),
    # In 8 bits moments and gradients are read twice: for a row's largest, and to be coded by it.
    "kahan, int8 rows": (lambda tx: OWNERS["kahan"](ROWS(tx)), 14 + 4),
    "split, int8 rows": (lambda tx: OWNERS["split"](ROWS(tx)), 12 + 4),
}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("form", ONCE)
def test_a_tpu_takes_one_pass_over_what_a_step_holds(form):
    wrap, least = ONCE[form]
    tx, topology = wrap(optax.adamw(1e-3)), pods.get_topology("v5e-4")
    params = jax.ShapeDtypeStruct((4 * 2048, 2048), jnp.bfloat16)
    mesh = topology.make_mesh({"x": -1})

    def placed(x):
        spec = jax.P("x") if x.ndim else jax.P()
        return x.update(sharding=jax.sharding.NamedSharding(mesh, spec))

    args = jax.tree.map(placed, (params, jax.eval_shape(tx.init, params), params))
    report = pods.check(jax.jit(stepper(tx), donate_argnums=(0, 1)), args, topology)
    assert report.hbm_bytes / 2048**2 <= 1.02 * least


# -- as they are given to them --------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", OWNERS)
def test_exported_modules_for_what_is_not_here_end_there_too(platform, name):
    if name == "stochastic":  # threefry is a kernel of its own on GPUs, which is not here
        tx = optim.with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0, impl="rbg"))
    else:
        tx = OWNERS[name](optax.sgd(1.0))

    def thousand(params):
        step = functools.partial(stepper(tx), grads=jnp.full(params.shape, -1e-3))
        body = lambda carry, _: (step(*carry), None)  # noqa: E731 - a scan's
        return jax.lax.scan(body, (params, tx.init(params)), None, 1000)[0][0]

    unchecked = [jax.export.DisabledSafetyCheck.platform()]
    exporting = jax.export.export(
        jax.jit(thousand), platforms=[platform], disabled_checks=unchecked
    )
    params = jnp.ones(1024, jnp.bfloat16)
    got = np.asarray(exporting(params).call(params), np.float64)
    end, within = ENDS[name]
    assert abs(got.mean() - end) <= within
