"""Random programs under 8-bit policies: types, exact parts, and what is finite stays so.

Everyone runs the same few programs. By hand, with other programs each time and the seed printed:

    MPJAX_FUZZ_PROGRAMS=2000 pytest tests/test_quantized_fuzz.py -s
"""

import os
import random
import warnings

import _programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import MODES, JaxRefusesError, check_types, check_wide, trace

import mpjax

BY_HAND = "MPJAX_FUZZ_PROGRAMS" in os.environ
PROGRAMS = int(os.environ.get("MPJAX_FUZZ_PROGRAMS", "60"))
SEED = random.SystemRandom().randrange(10**6) if BY_HAND else 0
COMPILED = 6  # programs of the default run whose values are looked at
RECIPES = (
    mpjax.Int8CurrentScaling(wgrad="int8"),
    mpjax.Float8CurrentScaling(),
    mpjax.Float8CurrentScaling(granularity="channel"),
)

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.filterwarnings("ignore::mpjax.PolicyWarning"),  # programs without products
]


def everywhere(recipe):
    policy = mpjax.QuantizedPolicy("bf16-mixed", recipe)
    return mpjax.PolicyMap("bf16-mixed", {"re:.*": policy})


def eight_bit(jaxpr):
    """Returns whether a program multiplies 8-bit operands."""
    text = str(jaxpr)
    return "low_product" in text or "linked_product" in text


def test_random_programs_keep_types_and_exact_parts():
    if BY_HAND:
        print(f"seed {SEED}")  # noqa: T201 - a run by hand, shown by -s
    quantised = refused = 0
    for seed in range(SEED, SEED + PROGRAMS):
        rng = random.Random(seed)
        program = _programs.random_program(rng)
        mode = rng.choice([mode for mode in MODES if mode.fits(program)])
        policy = everywhere(rng.choice(RECIPES))
        try:
            case = trace(program, mode, lambda fun, policy=policy: mpjax.autocast(fun, policy))
        except JaxRefusesError:
            refused += 1
            continue
        check_types(case)
        check_wide(case)
        quantised += eight_bit(case.transformed)
    assert quantised >= 0.1 * PROGRAMS, quantised
    assert refused <= 0.05 * PROGRAMS + 1, refused


def test_what_is_finite_stays_so():
    looked_at = 0
    for seed in range(200):
        if looked_at == COMPILED:
            break
        fun, args = _programs.random_program(random.Random(seed)).load()
        fast = mpjax.autocast(fun, everywhere(RECIPES[seed % len(RECIPES)]))
        if not eight_bit(jax.make_jaxpr(fast)(*args)):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            plain, low = (jax.tree.leaves(jax.jit(f)(*args)) for f in (fun, fast))
        pairs = [
            p for p in zip(plain, low, strict=True) if jnp.issubdtype(p[0].dtype, jnp.floating)
        ]
        if not all(np.isfinite(a).all() and np.abs(a).max(initial=0) < 1e4 for a, _ in pairs):
            continue
        looked_at += 1
        assert all(np.isfinite(b).all() for _, b in pairs), seed
    assert looked_at == COMPILED
