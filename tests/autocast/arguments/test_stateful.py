"""A function's changes to an NNX module reach the caller's module, whatever the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax

pytestmark = [
    pytest.mark.standard_promotion("nnx promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("nnx keeps the modules of a trace until they are collected"),
]

POLICIES = {
    "float32": "32-true",
    "a map of float32": mpjax.PolicyMap("float32", {"norm": "float32"}),
    "bf16": "bf16-mixed",
    "f16": "16-mixed",
    "a true policy": "bf16-true",
}
X = np.linspace(-20, 30, 2 * 64, dtype=np.float32).reshape(2, 64)


class Network(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=False, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def _loss(model, x):
    return jnp.mean(model(x))


def _changed(model):
    return int(model.dropout.rngs.count[...]), np.asarray(model.norm.mean[...])


def _autocast(policy):
    return mpjax.autocast(_loss, policy)


def _in_the_default_policy(policy):
    def fun(model, x):
        with mpjax.default_policy(policy):
            return mpjax.autocast(_loss)(model, x)

    return fun


@pytest.mark.filterwarnings("ignore::UserWarning")  # a "true" policy, of a function of one's own
@pytest.mark.parametrize("store", [lambda m: m, mpjax.quantize], ids=["whole", "in 8 bits"])
@pytest.mark.parametrize("wrap", [_autocast, _in_the_default_policy])
@pytest.mark.parametrize("policy", POLICIES)
def test_law_of_state_a_module_is_changed_as_without_autocast(policy, wrap, store):
    plain, model = Network(), Network()
    if store is mpjax.quantize:
        model = mpjax.quantize(model, "int8_from_mixed_bfloat16")
    fun = wrap(POLICIES[policy])
    for _ in range(2):
        _loss(plain, X)
        fun(model, X)
    (count, mean), (wanted, right) = _changed(model), _changed(plain)
    assert count == wanted == 2
    assert np.abs(mean).max() > 0.1
    np.testing.assert_allclose(mean, right, atol=0.02)


@pytest.mark.parametrize("policy", ["32-true", "bf16-mixed"])
def test_a_weight_in_8_bits_that_a_function_changes_is_refused(policy):
    def double(model, x):
        model.dense.kernel.set_value(2 * model.dense.kernel.get_value())
        return model(x)

    model = mpjax.quantize(Network(), "int8_from_mixed_bfloat16")
    with pytest.raises(ValueError, match=r"changes a weight that is stored in 8 bits(.|\n)*mpjax"):
        mpjax.autocast(double, policy)(model, X)
    assert isinstance(model.dense.kernel.get_value(), mpjax.QuantizedArray)
    assert jax.tree.leaves(model)
