"""Random programs under 8-bit policies: types, exact parts, and values within the formats' error.

Values are compared with float64, in which the operands of each product carry the noise that their
8-bit format causes (`_eight_bits`). All 2000 programs, and others with a seed that is printed:

    pytest tests/autocast/eight_bits/test_quantized_fuzz.py -m ''
    MPJAX_FUZZ_PROGRAMS=2000 pytest tests/autocast/eight_bits/test_quantized_fuzz.py -m '' -s
"""

import collections
import functools
import os
import random
import re

import _eight_bits
import _programs
import _rounding
import jax.numpy as jnp
import pytest
from _differential import (
    MODES,
    JaxRefusesError,
    check_types,
    check_values,
    check_wide,
    run_together,
    trace,
)

import mpjax

BY_HAND = "MPJAX_FUZZ_PROGRAMS" in os.environ
SHARD = 8  # programs of one shard
OFTEN = 11  # the shard of each run of the tests: half of its programs are quantised
SHARDS = int(os.environ.get("MPJAX_FUZZ_PROGRAMS", "2000")) // SHARD
SEED = random.SystemRandom().randrange(10**6) if BY_HAND else 0
COMPILED = 3  # programs of which XLA's own values are compared
RECIPES = (
    mpjax.Int8CurrentScaling(wgrad="int8"),
    mpjax.Float8CurrentScaling(),
    mpjax.Float8CurrentScaling(granularity="channel"),
)
_OPERAND = re.compile(r":(?:i8|f8_e\w+)\[")

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.filterwarnings("ignore::mpjax.PolicyWarning"),  # programs without products
]


def traced(seed, modes=MODES):
    """Returns a program as it is and under a policy, and the recipe of all its products."""
    rng = random.Random(seed)
    program = _programs.random_program(rng)
    mode = rng.choice([mode for mode in modes if mode.fits(program)])
    recipe = rng.choice(RECIPES)
    everywhere = {"re:.*": mpjax.QuantizedPolicy("bf16-mixed", recipe)}
    policy = mpjax.PolicyMap("bf16-mixed", everywhere)
    return trace(program, mode, lambda fun: mpjax.autocast(fun, policy)), recipe


def is_quantised(case):
    """Returns whether a program multiplies 8-bit operands."""
    return bool(_OPERAND.search(str(case.transformed)))


def verdict(case, recipe, outputs=None):
    """Raises where values are further off than the formats explain; returns what was compared."""
    options = _eight_bits.spread_options(recipe)
    return check_values(
        case,
        jnp.dtype("bfloat16"),
        outputs,
        evaluate=_eight_bits.evaluate,
        spread_of=functools.partial(_rounding.float64_spread, **options),
        quantile=_eight_bits.QUANTILE,
    )


@pytest.mark.parametrize(
    "shard",
    [pytest.param(n, marks=[] if n == OFTEN else [pytest.mark.slow]) for n in range(SHARDS)],
)
def test_random_programs_keep_types_and_exact_parts_and_stay_within_the_formats_error(shard):
    if BY_HAND and shard == OFTEN:
        print(f"seed {SEED}")  # noqa: T201 - a run by hand, shown by -s
    found = collections.Counter()
    first = SEED + shard * SHARD
    for seed in range(first, first + SHARD):
        try:
            case, recipe = traced(seed)
        except JaxRefusesError:
            found["refused"] += 1
            continue
        check_types(case)
        check_wide(case)
        if is_quantised(case):
            found["quantised"] += 1
            found["compared"] += verdict(case, recipe).compared
    assert found["refused"] <= 2, found
    if shard == OFTEN and not BY_HAND:  # a run that compares little would prove little
        assert found["quantised"] >= 2, found  # one contracts one element: elementwise
        assert found["compared"] >= 2, found


@pytest.mark.slow
def test_compiled_programs_stay_within_the_formats_error():
    """What XLA makes of a few programs in one compilation; what is finite stays so."""
    forward = [mode for mode in MODES if mode.name == "autocast(f)"]
    cases = []
    seed = 0
    while len(cases) < COMPILED:
        case, recipe = traced(seed, forward)
        if is_quantised(case) and verdict(case, recipe).compared:
            cases.append((case, recipe))
        seed += 1

    outputs = run_together([case for case, _ in cases])
    for (case, recipe), outs in zip(cases, outputs, strict=True):
        assert verdict(case, recipe, outs).compared
