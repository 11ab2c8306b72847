"""Random programs under autocast against themselves: types, exact parts, and rounding.

Everyone runs the same programs, in shards that several processes can share. By hand, with other
programs each time, the seed printed, and what fails shrunk by Hypothesis:

    MPJAX_FUZZ_PROGRAMS=10000 pytest tests/autocast/test_autocast_fuzz.py -k random_programs -s
    MPJAX_FUZZ_PROGRAMS=10000 MPJAX_FUZZ_SEED=7 pytest ...

Hypothesis itself draws other programs whenever a number in anyone's source code changes: it likes
those that it finds there.
"""

import collections
import os
import random
import re
from unittest import mock

import _differential as differential
import _evaluate
import _programs
import _rounding
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import (
    MODES,
    Mismatch,
    check_types,
    check_values,
    check_wide,
    run_together,
    trace,
)
from _program_text import Program, Var
from jax.extend.core import Literal, jaxpr_as_fun

from mpjax import autocast

# What is checked are autocast's decisions, which hardly depend on JAX's version; seams do.
IS_FLOOR = jax.__version_info__ < (0, 11)
PROGRAMS = int(os.environ.get("MPJAX_FUZZ_PROGRAMS", "40" if IS_FLOOR else "1000"))
SEED = int(os.environ.get("MPJAX_FUZZ_SEED", random.SystemRandom().randrange(10**6)))
BY_HAND = "MPJAX_FUZZ_PROGRAMS" in os.environ
POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
SHARDS = 1 if IS_FLOOR else 20
# The first in each run of the tests; CI's stage `fuzz` takes the others, a run by hand takes all.
ALL_SHARDS = [
    pytest.param(shard, marks=pytest.mark.slow if shard and not BY_HAND else [])
    for shard in range(SHARDS)
]
_REFUSED = "JAX itself refuses the program"

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")


def _each(examples, shard, test):
    """Calls a test with so many sources of choices: fixed ones, or by hand those of Hypothesis."""
    if not BY_HAND:
        for i in range(examples):
            test(random.Random(f"shard {shard}, program {i}"))
        return
    print(f"MPJAX_FUZZ_SEED={SEED}")  # noqa: T201 - a run by hand, shown by -s
    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    given = hypothesis.given(st.randoms(use_true_random=False))
    settings(hypothesis.seed(1000 * SEED + shard)(given(test)))()


def _verdict(program, mode, policy, small):
    try:
        with mock.patch("mpjax._autocast.speed.marks._SMALL", small):
            case = trace(program, mode, lambda fun: autocast(fun, policy))
    except differential.JaxRefusesError:
        return differential.Verdict(compared=False, reason=_REFUSED)
    check_types(case)
    check_wide(case)
    return check_values(case, POLICIES[policy])


@pytest.mark.parametrize("shard", ALL_SHARDS)
def test_random_programs_keep_types_exact_parts_and_stay_within_rounding(shard):
    verdicts: collections.Counter[str] = collections.Counter()

    def run(rng):
        program = _programs.random_program(rng)
        mode = rng.choice([mode for mode in MODES if mode.fits(program)])
        policy = rng.choice(list(POLICIES))
        small = rng.choice((0, 1024))  # with 0, groups as small as these are computed again too
        try:
            verdict = _verdict(program, mode, policy, small)
        except Exception as error:
            error.add_note(f"{mode.name}, {policy}, groups of at least {small} elements")
            raise
        verdicts[verdict.reason or "compared"] += 1

    _each(PROGRAMS // SHARDS, shard, run)
    # What could not be compared is known: a run that compares little would prove little.
    assert verdicts["compared"] >= 0.6 * verdicts.total(), verdicts
    assert verdicts[_REFUSED] <= 0.03 * verdicts.total(), verdicts


def test_a_float32_policy_leaves_the_jaxpr_as_it_is():
    def run(rng):
        fun, args = _programs.random_program(rng).load()
        jaxprs = (jax.make_jaxpr(f)(*args) for f in (fun, autocast(fun, "float32")))
        # Some parameters print with the address of a function that each trace makes.
        plain, cast = (re.sub("0x[0-9a-f]+", "0x", str(jaxpr)) for jaxpr in jaxprs)
        assert cast == plain

    _each(100, 0, run)


def _seeded(seed):
    rng = random.Random(seed)
    program = _programs.random_program(rng)
    return program, rng.choice([mode for mode in MODES if mode.fits(program)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, marks=pytest.mark.share),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 40, 10)),
    ],
)
def test_compiled_programs_stay_within_rounding(policy, first):
    """What XLA makes of ten programs in one compilation: its own fusions, kernels and layouts."""
    cases = [
        trace(*_seeded(seed), lambda fun: autocast(fun, policy))
        for seed in range(first, first + 10)
    ]
    for case, outs in zip(cases, run_together(cases), strict=True):
        check_values(case, POLICIES[policy], outs)


# -- the fuzzer itself -------------------------------------------------------------------------


def _primitives(jaxpr, found):
    for eqn in differential.equations(jaxpr):
        found.add(eqn.primitive.name)
    return found


@pytest.mark.ci
def test_programs_cover_the_primitives():
    found: set[str] = set()
    for seed in range(300):
        fun, args = _programs.random_program(random.Random(seed)).load()
        _primitives(jax.make_jaxpr(fun)(*args).jaxpr, found)
    structure = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "remat2", "jit"}
    assert structure <= found
    assert {"dot_general", "conv_general_dilated", "random_bits", "scatter-add"} <= found
    assert len(found) >= 100, sorted(found)


@pytest.mark.ci
def test_numpy_evaluates_programs_as_jax_does():
    for seed in range(40):
        fun, args = _programs.random_program(random.Random(seed)).load()
        jaxpr = jax.make_jaxpr(fun)(*args)
        flat = jax.tree.leaves(args)
        spread = _rounding.float64_spread(jaxpr, flat, jnp.float32)
        if not spread.decided:
            continue
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(jaxpr_as_fun(jaxpr))(*flat)
        got = _evaluate.evaluate(jaxpr, flat)
        for a, b, deviation in zip(got, expected, spread.deviations, strict=True):
            assert a.dtype == b.dtype
            scale = 0 if deviation is None else 20 * deviation + 1e-6
            assert (np.abs(a.astype(np.float64) - np.asarray(b, np.float64)) <= scale).all(), seed


def _count_caught(cast, low, seeds, mode):
    """Returns on how many programs with a product a transformation is caught, of how many."""
    caught = ran = 0
    for seed in seeds:
        program = _programs.random_program(random.Random(seed))
        if not mode.fits(program):
            continue
        fun, args = program.load()
        if not any(_rounding.reached(jax.make_jaxpr(mode.build(fun, lambda g: g))(*args))):
            continue
        ran += 1
        try:
            case = trace(program, mode, cast)
            check_types(case)
            check_wide(case)
            check_values(case, low)
        except Mismatch:
            caught += 1
    return caught, ran


def _on_floats(change):
    return lambda x: change(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


def _rounding_inputs(fun):
    """Rounds every float32 argument, read by a product or not."""
    rounded = _on_floats(lambda x: jax.lax.reduce_precision(jnp.float32(x), 8, 7))
    return lambda *args: fun(*map(rounded, args))


def _two_bits(fun):
    """Rounds the results to three bits: far more than bfloat16 does."""
    rounded = _on_floats(lambda x: jax.lax.reduce_precision(x, 8, 2))
    return lambda *args: jax.tree.map(rounded, fun(*args))


def _low_results(fun):
    lowered = _on_floats(lambda x: x.astype(jnp.bfloat16))
    return lambda *args: jax.tree.map(lowered, fun(*args))


def _without_rules(fun):
    """Inlines functions that have a derivative rule: JAX then differentiates what they compute."""

    def inline(jaxpr, consts, args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom):
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
                inner = eqn.params["call_jaxpr"]
                outs = inline(inner.jaxpr, inner.consts, values)
            else:
                outs = eqn.primitive.bind(*values, **eqn.params)
                outs = outs if eqn.primitive.multiple_results else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def run(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        outs = inline(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


FORWARD, GRAD = MODES[0], MODES[1]


@pytest.mark.parametrize(
    ("broken", "mode", "share"),
    [
        (_rounding_inputs, FORWARD, 0.3),  # caught wherever an output depends on no product
        (_two_bits, FORWARD, 0.6),  # not where a comparison or a long chain makes rounding matter
        (_low_results, FORWARD, 1.0),
    ],
)
@pytest.mark.ci
def test_a_broken_autocast_is_caught(broken, mode, share):
    caught, ran = _count_caught(broken, jnp.bfloat16, range(60), mode)
    assert ran >= 20
    assert caught >= share * ran, (caught, ran)


def test_a_lost_derivative_rule_is_caught():
    lines = ("v1 = jax.nn.tanh(a1)", "@jax.custom_vjp", "def rule(x): return jnp.sin(x)")
    rule = ("rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (ct,))", "return (rule(v1 @ a2),)")
    inputs = [Var("a1", (3, 4)), _programs.Var("a2", (4, 4))]
    program = Program(seed=1, inputs=inputs, lines=[*lines, *rule], backward_rule=True)
    check_values(trace(program, GRAD, lambda fun: fun), jnp.bfloat16)
    with pytest.raises(Mismatch, match="output 0"):
        check_values(trace(program, GRAD, _without_rules), jnp.bfloat16)


@pytest.mark.ci
def test_the_identity_is_not_caught():
    caught, ran = _count_caught(lambda fun: fun, jnp.bfloat16, range(40), FORWARD)
    assert ran >= 10
    assert caught == 0
