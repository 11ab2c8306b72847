"""Parameters that come in 16 bits, as of a checkpoint in bfloat16, are read in float32.

By JAX's promotion a softmax, a sum and a sample of them would run in bfloat16. Widening is exact:
products read the same bits. A stack of layers is not copied in float32 for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax

_RNG = np.random.default_rng(0)
WIDE = {
    "embedding": jnp.asarray(_RNG.normal(size=(32, 16)), jnp.float32),
    "layers": jnp.asarray(_RNG.normal(size=(4, 16, 16)) / 4, jnp.float32),
    "head": jnp.asarray(_RNG.normal(size=(16, 512)) / 4, jnp.float32),
}
TOKENS = jnp.arange(6)
POLICIES = {
    "O2": jnp.float16,
    "p=bf16,c=bf16,o=f32": jnp.bfloat16,
    "p=bf16,c=f16,o=f32": jnp.bfloat16,
    "p=f16,c=bf16,o=f32": jnp.float16,
}


POLICY = "p=bf16,c=bf16,o=f32"


def _hold(params, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), params)


def _logits(params, tokens):
    x = params["embedding"][tokens]
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["head"]


def _chances(params, tokens):
    ordered = jnp.sort(jax.nn.softmax(_logits(params, tokens)), -1)[:, ::-1]
    return jnp.cumsum(ordered, -1), jax.nn.logsumexp(_logits(params, tokens), -1)


def _loss(params, tokens):
    return -jax.nn.log_softmax(_logits(params, tokens))[:, 0].mean()


@pytest.mark.parametrize("cut", [lambda fun: fun, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("policy", POLICIES)
def test_law_of_narrow_parameters_they_are_as_the_same_numbers_in_float32(policy, cut):
    held = _hold(WIDE, POLICIES[policy])
    for fun in (_chances, jax.grad(_loss)):
        got = jax.jit(mpjax.autocast(cut(fun), policy))(held, TOKENS)
        want = jax.jit(mpjax.autocast(cut(fun), policy))(_hold(held, jnp.float32), TOKENS)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_have_the_dtypes_of_the_parameters(policy):
    held = _hold(WIDE, POLICIES[policy])
    fast = mpjax.autocast(_loss, policy)
    got = jax.jit(jax.grad(fast))(held, TOKENS)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, held)
    want = jax.jit(jax.grad(_loss))(_hold(held, jnp.float32), TOKENS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.float32(a) - b) < 0.03 * np.linalg.norm(b)


def test_a_policy_of_16_bits_alone_and_one_of_float32_leave_them():
    held = _hold(WIDE, jnp.bfloat16)
    for policy, dtype in {"bf16-true": jnp.bfloat16, "float32": jnp.float32}.items():
        assert mpjax.autocast(_logits, policy)(held, TOKENS).dtype == dtype


def test_a_stack_of_layers_is_not_copied_in_float32():
    def deep(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    def by_hand(stack, x):
        return deep(stack, x.astype(stack.dtype)).astype(x.dtype)

    def temporaries(fun):
        compiled = jax.jit(fun).lower(jnp.ones((8, 256, 256), jnp.bfloat16), jnp.ones((4, 256)))
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(mpjax.autocast(deep, POLICY)) <= temporaries(by_hand)  # on a CPU, XLA widens


def test_other_arguments_and_a_cache_in_the_first_one_are_left():
    def step(state, x):
        cache = lax.dynamic_update_slice(
            state["cache"], (x @ state["w"]).astype(jnp.bfloat16), (2, 0)
        )
        return {"w": state["w"], "cache": cache}, cache.astype(jnp.float32).sum()

    state = {"w": jnp.eye(8, dtype=jnp.bfloat16), "cache": jnp.zeros((4, 8), jnp.bfloat16)}
    new, total = jax.jit(mpjax.autocast(step, POLICY))(state, jnp.ones((1, 8)))
    assert {new["w"].dtype, new["cache"].dtype} == {jnp.dtype(jnp.bfloat16)}
    assert total == 8
    seen = []
    mpjax.autocast(lambda p, x: seen.append((p.dtype, x.dtype)) or p, POLICY)(
        jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    )
    assert seen[-1] == (jnp.float32, jnp.bfloat16)


def test_parameters_are_named():
    seen = []
    fun = mpjax.autocast(
        lambda x, p: seen.append((x.dtype, p.dtype)) or (x.sum(), p.sum()), POLICY, params="p"
    )
    fun(jnp.ones(3, jnp.bfloat16), p=jnp.ones(3, jnp.bfloat16))
    assert seen[-1] == (jnp.bfloat16, jnp.float32)


def test_samples_in_bfloat16_are_few_and_those_of_the_policy_as_many_as_in_float32():
    """The page of recipes says so, in "Inference"."""
    head = jnp.asarray(_RNG.normal(size=(16, 20_000)) / 64, jnp.bfloat16)
    x = jnp.ones((1, 16))

    def distinct(logits):
        drawn = jax.random.categorical(jax.random.key(0), logits, shape=(1000, 1))
        return len(set(drawn.ravel().tolist()))

    in_float32 = distinct(x @ head.astype(jnp.float32))
    as_written = distinct(x.astype(jnp.bfloat16) @ head)
    under_the_policy = distinct(mpjax.autocast(lambda w, x: x @ w, POLICY)(head, x))
    assert as_written < in_float32 / 2
    assert abs(under_the_policy - in_float32) < 15
