"""The policy that is suggested keeps gradients within what was asked for, with few modules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.numerics import suggest

pytestmark = pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs")

RNG = np.random.default_rng(0)
WS = [jnp.asarray(RNG.normal(size=(8, 8)).astype(np.float32) / 3) for _ in range(3)]
X = RNG.normal(size=(16, 8)).astype(np.float32)


def loss(ws: Any, x: Any) -> Any:
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
            if i == 1:  # sensitive: a small difference of large numbers
                x = (x + 200.0) @ jnp.eye(8) - 200.0
    with jax.named_scope("head"):
        return jnp.mean(x**2)


def error(policy: Any) -> float:
    low, full = (jax.grad(mpjax.autocast(loss, p))(WS, X) for p in (policy, "float32"))
    pairs = zip(low, full, strict=True)
    return max(float(jnp.abs(a - b).sum() / jnp.abs(b).sum()) for a, b in pairs)


def test_the_sensitive_module_is_kept_and_the_tolerance_is_met():
    assert error("bf16-mixed") > 0.05
    found = suggest(loss, "bf16-mixed", tolerance=0.05)(WS, X)
    assert found.full == ("layer_1",)
    assert {"layer_0", "layer_2"} <= set(found.low)
    assert error(found.policy) == pytest.approx(
        found.error, rel=0.1
    )  # XLA fuses the two differently
    assert found.error <= 0.05
    assert found.bytes["layer_1"] > 0
    assert len(found.tried) >= 3
    assert "layer_1" in str(found)
    assert found.to_dict()["policy"]["rules"][0][0] == "layer_1"


def test_nothing_is_kept_where_nothing_is_needed_and_all_where_all_is():
    assert suggest(loss, "bf16-mixed", tolerance=100)(WS, X).full == ()
    tight = suggest(loss, "bf16-mixed", tolerance=1e-6)(WS, X)
    assert set(tight.full) >= {"layer_0", "layer_1", "layer_2"}


@pytest.mark.parametrize("tolerance", [0, -1.0, 1e-9, float("nan"), "1%", True])
def test_a_tolerance_that_float32_misses_is_refused(tolerance: Any):
    with pytest.raises(ValueError, match=r"at least 1.2e-07, what float32 itself rounds; got"):
        suggest(loss, "bf16-mixed", tolerance=tolerance)


def test_modules_without_names_are_told_to_be_named():
    with pytest.raises(ValueError, match=r"all 0 named modules in float32(.|\n)*named_scope"):
        suggest(lambda w, x: jnp.mean(x @ w), "bf16-mixed", tolerance=1e-6)(WS[0], X)
    with pytest.raises(TypeError, match="got a PolicyMap, and it makes one"):
        suggest(loss, mpjax.PolicyMap("bf16-mixed", {"a": "float32"}), tolerance=1e-2)
