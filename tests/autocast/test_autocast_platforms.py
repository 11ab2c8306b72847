"""The programs that JAX lowers for a GPU and for a TPU, run on this CPU: right there too."""

import functools
import random
from typing import Any
from unittest import mock

import _differential as differential
import _programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import MODES, check_values, run_together, trace

from benchmarks.measure.errors import gradient_errors
from benchmarks.networks import NETWORKS
from mpjax import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
PLATFORMS = ("cuda", "tpu")
# Half of the first in each run of the tests; CI's stage `fuzz` takes all.
_PROGRAMS = [
    pytest.param(range(0, 20, 10), id="half", marks=pytest.mark.share),
    *(pytest.param(range(n, n + 40, 10), marks=pytest.mark.slow) for n in range(0, 160, 40)),
]
# What a platform has a library for, which is not here; what calls back, or is laid out over this
# machine's devices; what StableHLO's text cannot say; and what XLA:CPU fails to compile as other
# platforms write it.
_NOT_HERE = frozenset(
    {"cholesky", "lu", "eigh", "qr", "svd", "debug_callback", "pure_callback", "io_callback"}
    | {"shard_map", "sharding_constraint"}
    | {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
    | {"erfc"}
)

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.filterwarnings("ignore:autocast:mpjax.SupportWarning"),  # float16 on a TPU
]


@functools.cache
def _cases(first, count):
    """Returns those of some random programs that can run here, with their compute dtypes."""
    found: list[tuple[differential.Case, Any]] = []
    for seed in range(first, first + count):
        rng = random.Random(seed)
        program = _programs.random_program(rng)
        mode = rng.choice([mode for mode in MODES if mode.fits(program)])
        policy = rng.choice(list(POLICIES))
        try:
            case = trace(program, mode, lambda fun, policy=policy: autocast(fun, policy))
        except differential.JaxRefusesError:
            continue
        if _runs_here(case):
            found.append((case, POLICIES[policy]))
    return found


def _runs_here(case):
    used = {eqn.primitive.name for eqn in differential.equations(case.transformed.jaxpr)}
    types = [getattr(x, "dtype", np.dtype(float)) for x in case.args]
    # A key is given a layout over an empty mesh, which StableHLO alone cannot read.
    keys = any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in types)
    return not keys and not used & _NOT_HERE


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("tens", _PROGRAMS)
@mock.patch("mpjax._autocast.speed.marks._SMALL", 0)  # or no group is large enough to be kept apart
def test_random_programs_of_another_platform_stay_within_rounding(platform, tens):
    verdicts: list[bool] = []
    for first in tens:
        cases = _cases(first, 10)  # in one compilation, and traced once for all platforms
        outputs = run_together([case for case, _ in cases], platform)
        for (case, low), outs in zip(cases, outputs, strict=True):
            verdicts.append(check_values(case, low, outs).compared)
    assert len(verdicts) >= 5 * len(tens)
    assert sum(verdicts) >= 0.6 * len(verdicts)


@pytest.mark.standard_promotion("linen promotes masks and counts implicitly")
# Those that compile for long are left to CI's stage `fuzz` and `make test SLOW=1`.
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("mlp", "bf16-mixed"),
        ("mlp", "16-mixed"),
        pytest.param("unet", "16-mixed", marks=pytest.mark.slow),
        pytest.param("unet", "bf16-mixed", marks=pytest.mark.slow),
        pytest.param("bert", "bf16-mixed", marks=pytest.mark.slow),
        pytest.param("bert", "16-mixed", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_networks_on_other_platforms_are_as_exact(name, policy):
    network = NETWORKS[name]("tiny")

    def error(platform):
        (found,) = gradient_errors(autocast(network.loss, policy), network, platform, seeds=1)
        return found

    here = error("cpu")
    assert 0 < here < 0.1
    for platform in PLATFORMS:
        assert error(platform) < 1.25 * here
