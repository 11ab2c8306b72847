"""Around the wrappers: norms, bytes, and states that go from one form to another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

# -- norms ----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["f16", "bf16", "f32"]
)
@pytest.mark.parametrize("power", [-140, -48, 0, 14, 47, 48, 120])
def test_norms_are_those_of_float64_at_every_size(dtype, power):
    dtype = jnp.dtype(dtype)
    info = jnp.finfo(dtype)
    power = int(np.clip(power, int(info.minexp) + 8, int(info.maxexp) - 8))
    random = np.random.default_rng(0)
    x = np.ldexp(random.choice([-1, 1], 1000) * random.uniform(1, 4, 1000), power).astype(dtype)
    tree = {"a": jnp.asarray(x[:10]), "b": [jnp.asarray(x[10:]), jnp.arange(3), None]}
    want = np.linalg.norm(x.astype(np.float64))
    got = float(optim.global_norm(tree))
    assert abs(got / want - 1) < 1e-6
    limit = np.float32(want / 3)
    clipped, _ = jax.jit(optim.clip_by_global_norm(limit).update)(tree, optax.EmptyState())
    assert clipped["a"].dtype == dtype
    parts = [np.asarray(clipped["a"], np.float64), np.asarray(clipped["b"][0], np.float64)]
    assert abs(np.linalg.norm(np.concatenate(parts)) / limit - 1) < 4 * float(info.eps) + 2.0**-10
    same, _ = optim.clip_by_global_norm(np.float32(min(want * 2, 3e38))).update(tree, ())
    assert_bitwise_equal(same["a"], tree["a"])


@pytest.mark.parametrize("power", [-120, -60, 0, 60, 120])
def test_gradients_of_norms_are_those_of_float64_at_every_size(power):
    x = np.ldexp(np.random.default_rng(0).uniform(-4, 4, 24), power).astype(np.float32)
    tree = {"a": jnp.asarray(x[:8]), "zeros": jnp.zeros(3), "b": jnp.asarray(x[8:])}
    norm = np.linalg.norm(x.astype(np.float64))
    grads = jax.jit(jax.grad(optim.global_norm))(tree)
    got = np.concatenate([grads["a"], grads["b"]])
    np.testing.assert_allclose(got, x / norm, rtol=1e-5)
    assert not grads["zeros"].any()

    def clipped(tree):
        return optim.clip_by_global_norm(np.float32(norm / 3)).update(tree, ())[0]["a"].sum()

    got = jax.jit(jax.grad(clipped))(tree)
    ones = np.concatenate([np.ones(8), np.zeros(16)])
    want = (ones - x * x[:8].sum(dtype=np.float64) / norm**2) / 3
    np.testing.assert_allclose(np.concatenate([got["a"], got["b"]]), want, atol=1e-5)


def test_gradients_of_norms_are_finite_at_zero_and_where_nothing_is_clipped():
    zeros, small = {"w": jnp.zeros(3)}, {"w": jnp.array([0.3, 0.4, 0.0])}
    clip = optim.clip_by_global_norm(1.0).update
    assert_bitwise_equal(jax.grad(optim.global_norm)(zeros), zeros)
    assert_bitwise_equal(
        jax.grad(optim.global_norm)({"w": jnp.zeros(3), "b": None})["w"], zeros["w"]
    )
    for tree in (zeros, small):
        grads = jax.grad(lambda tree: clip(tree, ())[0]["w"].sum())(tree)
        assert_bitwise_equal(grads, {"w": jnp.ones(3)})
    hessian = jax.hessian(optim.global_norm)(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(hessian, [[0.128, -0.096], [-0.096, 0.072]], rtol=1e-5)


def test_norms_of_mixed_sizes_zeros_and_what_is_not_finite():
    mixed = {"a": jnp.array([3e30, 1e-30]), "b": jnp.array([4e30])}
    assert abs(float(optim.global_norm(mixed)) / 5e30 - 1) < 1e-6
    assert abs(float(optim.global_norm([jnp.array([3.0, 1e-40]), jnp.array([4.0])])) - 5) < 1e-6
    assert float(optim.global_norm({"a": jnp.zeros(3)})) == 0
    assert float(optim.global_norm({})) == 0
    assert float(optim.global_norm(jnp.array([np.inf, 1.0]))) == np.inf
    for bad in (jnp.array([np.nan, 1e30]), jnp.array([np.nan, np.inf]), jnp.array([np.nan, 1e-30])):
        assert np.isnan(float(optim.global_norm(bad)))
    many = jnp.full(4, 3e38)  # the norm itself is beyond float32
    assert float(optim.global_norm(many)) == np.inf
    clipped, _ = optim.clip_by_global_norm(1.0).update(many, optax.EmptyState())
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-6)
    zero, _ = optim.clip_by_global_norm(1.0).update(jnp.zeros(3), optax.EmptyState())
    np.testing.assert_array_equal(zero, 0)


# -- bytes ----------------------------------------------------------------------------------------

SPEC = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)}
FULL = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}


def quantized(tx):
    return optim.with_quantized_state(tx)


BYTES = {
    "float32": (optax.adamw(1e-3), FULL, "float32", 16.0),
    "master": (optim.with_master_weights(optax.adamw(1e-3)), SPEC, "float32", 18.0),
    "stochastic": (optim.with_stochastic_rounding(optax.adamw(1e-3)), SPEC, "float32", 14.0),
    "and gradients": (optim.with_stochastic_rounding(optax.adamw(1e-3)), SPEC, "bfloat16", 12.0),
    "24 bits": (optim.with_master_weights(optax.adamw(1e-3), bits=24), SPEC, "float32", 15.0),
    "24 + bf16": (
        optim.with_master_weights(
            optim.with_state_dtypes(optax.adamw(1e-3), mu_dtype="bf16", nu_dtype="bf16"), bits=24
        ),
        *(SPEC, "float32", 11.0),
    ),
    "24 + int8": (
        optim.with_master_weights(quantized(optax.adamw(1e-3)), bits=24),
        *(SPEC, "float32", 9.04),
    ),
    "kahan": (optim.with_kahan(quantized(optax.adamw(1e-3))), SPEC, None, 6.04),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_counted_for_what_is_kept(name):
    tx, params, grads, most = BYTES[name]
    report = optim.bytes_per_parameter(tx, params, grad_dtype=grads)
    assert most - 0.05 <= report.total <= most + 1e-5
    state = jax.eval_shape(tx.init, params)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    width = 0 if grads is None else jnp.dtype(grads).itemsize
    assert abs(report.total - width - held / 4096**2) < 1e-9


# -- from one form to another ---------------------------------------------------------------------

FORMS = {
    "plain": lambda tx: tx,
    "master": optim.with_master_weights,
    "split": lambda tx: optim.with_master_weights(tx, bits=24),
    "kahan": lambda tx: optim.with_kahan(optim.with_quantized_state(tx)),
    "stochastic": lambda tx: optim.with_stochastic_rounding(
        optim.with_state_dtypes(tx, mu_dtype="bf16", nu_dtype="bf16")
    ),
    "scaled": lambda tx: mpjax.with_loss_scale(optim.with_quantized_state(tx, "float8")),
}


def trained(tx, dtype, steps=3):
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.normal(size=(64, 64)), dtype)}
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        grads = {"w": jnp.asarray(random.normal(size=(64, 64)), jnp.float32)}
        updates, state = update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def moments(state):
    from mpjax._low_precision.forms import plain

    found = [x for x in jax.tree.leaves(plain(state)) if x.shape == (64, 64)]
    return [np.asarray(x, np.float32) for x in found][-2:]


@pytest.mark.standard_promotion("adamw decays float16 weights in float32")
@pytest.mark.parametrize("name", FORMS)
def test_from_float32_to_each_form_and_back(name):
    full, old = trained(optax.adamw(1e-2), jnp.float32)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), full)
    tx = FORMS[name](optax.adamw(1e-2))
    state = optim.adopt_state(tx, old, params, full_params=full)
    fresh = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    for got, want in zip(moments(state), moments(old), strict=True):
        assert np.max(np.abs(got - want)) <= np.max(np.abs(want)) / 4
        assert (
            np.mean(np.abs(got - want)) <= np.mean(np.abs(want)) / 10
        )  # codes are 18 % apart where a moment is small
    known = optim.full_params(params, state)["w"]
    lost = {"master": 0, "split": 2.0**-15, "kahan": 2.0**-16}.get(name, 2.0**-8)
    assert float(jnp.max(jnp.abs(known / full["w"] - 1))) <= lost * 1.001
    back = optim.adopt_state(optax.adamw(1e-2), state, optim.full_params(params, state))
    assert jax.tree.structure(back) == jax.tree.structure(old)
    for got, want in zip(moments(back), moments(state), strict=True):
        np.testing.assert_array_equal(got, want)
    count = [int(x) for x in jax.tree.leaves(back) if x.dtype == jnp.int32]
    assert count == [int(x) for x in jax.tree.leaves(old) if x.dtype == jnp.int32]


@pytest.mark.standard_promotion("adamw decays bfloat16 weights in float32")
@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_the_same_form_is_adopted_bit_for_bit(name):
    tx = FORMS[name](optax.adamw(1e-2))
    params, old = trained(tx, jnp.bfloat16)
    assert_bitwise_equal(optim.adopt_state(tx, old, params), old)


@pytest.mark.standard_promotion("adamw decays bfloat16 weights in float32")
def test_weights_go_from_form_to_form_as_exactly_as_both_know_them():
    split = FORMS["split"](optax.adamw(1e-2))
    params, old = trained(split, jnp.bfloat16)
    full = optim.full_params(params, old)
    for name in ("master", "kahan", "split"):
        state = optim.adopt_state(FORMS[name](optax.adamw(1e-2)), old, params)
        assert_bitwise_equal(optim.full_params(params, state), full)


@pytest.mark.standard_promotion("adamw decays bfloat16 weights in float32")
def test_a_train_step_adopts_what_is_known_of_the_weights():
    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    x = jnp.ones((4, 64))
    steps = {
        policy: mpjax.make_train_step(loss_fn, tx, policy, donate=False)
        for policy, tx in (
            ("32-true", optax.adamw(1e-3)),
            ("O2", FORMS["master"](optax.adamw(1e-3))),
        )
    }
    first = steps["32-true"].init({"w": jnp.linspace(0.1, 1, 4096).reshape(64, 64)})
    first, _ = steps["32-true"](first, x)
    low = steps["O2"].adopt(first)
    assert_bitwise_equal(optim.full_params(low.params, low.opt_state), first.params)
    back = steps["32-true"].adopt(low)
    assert_bitwise_equal(back.params, first.params)
    steps["O2"](low, x)


@pytest.mark.parametrize("jit", [False, True])
def test_what_has_no_gradient_stays_as_it_is(jit):
    params = {"w": jnp.ones(2), "ids": jnp.arange(3), "key": jax.random.key(0)}
    tx = mpjax.with_loss_scale(
        optax.masked(optax.sgd(0.5), {"w": True, "ids": False, "key": False})
    )

    def step(params):
        loss = mpjax.grad(lambda p: jnp.sum(p["w"]), loss_scale=None, allow_int=True)
        updates, _ = tx.update(loss(params), tx.init(params), params)
        return optim.apply_updates(params, updates)

    moved = (jax.jit(step) if jit else step)(params)
    assert moved["w"].tolist() == [0.5, 0.5]
    assert_bitwise_equal({**moved, "w": params["w"]}, params)
