"""`DelayedScaling`: amax histories against a plain-Python model, and where they have no place."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _samples import normal

import mpjax

LENGTH, WIDTH, ROWS = 3, 64, 4
DELAYED = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=LENGTH))
CURRENT = mpjax.QuantizedPolicy("bf16-mixed", mpjax.Float8CurrentScaling())
PARAMS = [jnp.eye(WIDTH) * size for size in (1.0, 0.5, 1.0)]


def loss_fn(ws, batch):
    """The second product sees what the rows hold, half an identity, and what the loss weighs."""
    x = jnp.broadcast_to(batch["rows"][:, None], (*batch["rows"].shape, WIDTH))
    for w in ws:
        x = x @ w
    return jnp.sum(x * batch["weights"][:, None])


def batch_of(rows, weights):
    return {"rows": jnp.asarray(rows, jnp.float32), "weights": jnp.asarray(weights, jnp.float32)}


ONES = batch_of([1.0] * ROWS, [1.0] * ROWS)


def histories(history):
    """Returns the arrays by product."""
    return history["_overwrite_with_gradient"]["_recorded_amax"]


@functools.cache
def train_step(accumulate):
    scale = mpjax.DynamicLossScale(loss_scale=4.0, growth_interval=2)
    step = mpjax.make_train_step(
        loss_fn, optax.sgd(0.0), DELAYED, loss_scale=scale, accumulate=accumulate
    )
    return step, step.init(PARAMS, batch=ONES)


class Model:
    """What a history of one product is to hold: a list of three deques, newest first."""

    def __init__(self, first):
        self.kept = [[amax] + [0.0] * (LENGTH - 1) for amax in first]

    def step(self, rows, weights):
        seen = (max(map(abs, rows)), 0.5, max(map(abs, weights)))
        values = [*rows, *weights]
        if not all(map(math.isfinite, values)):
            return  # skipped
        for kept, amax in zip(self.kept, seen, strict=True):
            if amax > 0:
                kept.insert(0, amax)
                kept.pop()


SIZES = st.sampled_from([0.0, 0.25, 1.0, -8.0, 1024.0, math.nan, math.inf])
BATCHES = st.tuples(st.lists(SIZES, min_size=ROWS, max_size=ROWS), st.sampled_from([0.5, 2.0, 64]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(st.lists(BATCHES, min_size=1, max_size=5))
def test_law_history_is_that_of_a_plain_python_model(accumulate, batches):
    step, start = train_step(accumulate)
    state = jax.tree.map(jnp.copy, start)
    model = Model([1.0, 0.5, 1.0])
    for rows, weight in batches:
        state, metrics = step(state, batch_of(rows, [weight] * ROWS))
        model.step(rows, [weight] * ROWS)
        (found,) = histories(state.amax_history).values()
        np.testing.assert_array_equal(found, np.array(model.kept, np.float32))
        assert bool(metrics["grads_finite"]) == all(map(math.isfinite, rows))


def layers(ws, x):
    """Products at the top, inside a `jit`, twice with one weight, and in a checkpointed scan."""
    x = jnp.tanh(x @ ws["first"])
    x = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, ws["shared"])
    x = jnp.tanh(x @ ws["shared"])
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, ws["stack"])
    return jnp.mean((x @ ws["last"]) ** 2)


def weights(seed):
    one = normal(seed, 5, WIDTH, WIDTH, scale=1 / 8)
    return {"first": one[0], "shared": one[1], "last": one[2], "stack": one[2:]}


WEIGHTS = weights(0)
X = normal(1, 8, WIDTH)


@functools.cache
def own():
    """Returns a function with histories, its first history, and its jitted derivative."""
    fast = mpjax.with_amax_history(layers, DELAYED)
    differentiate = jax.jit(jax.value_and_grad(fast.apply, argnums=(0, 1)))
    return fast, jax.jit(fast.init)(WEIGHTS, X), differentiate


def test_products_have_histories_by_weight_and_use_stacked_under_scan():
    _, history, _ = own()
    shapes = {name: x.shape for name, x in histories(history).items()}
    each = (3, LENGTH)
    assert shapes == {"shared": each, "shared#2": each, "stack": (3, *each)}
    iterations = histories(history)["stack"][:, 1, 0]
    wanted = jnp.max(jnp.abs(WEIGHTS["stack"]), axis=(1, 2))
    np.testing.assert_array_equal(iterations, wanted)  # each its own weight


def test_first_step_is_that_of_current_scaling_and_its_gradients():
    _, history, differentiate = own()
    loss, (_, grads) = differentiate(history, WEIGHTS, X)
    current = mpjax.autocast(layers, CURRENT)
    wanted, gradients = jax.jit(jax.value_and_grad(current))(WEIGHTS, X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-2)
    for a, b in zip(*map(jax.tree.leaves, (grads, gradients)), strict=True):
        assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b)


def test_step_of_ones_own_keeps_the_history_of_a_step_that_does_not_count():
    fast, history, differentiate = own()
    _, (seen, _) = differentiate(history, WEIGHTS, X)
    kept, new = (fast.update(history, seen, finite) for finite in (False, True))
    for before, after, later in zip(*map(jax.tree.leaves, (history, kept, new)), strict=True):
        np.testing.assert_array_equal(before, after)
        np.testing.assert_array_equal(before[..., :-1], later[..., 1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_law_what_is_not_finite_is_seen_in_the_loss_and_never_in_a_history(bad):
    fast, history, differentiate = own()
    loss, (seen, grads) = differentiate(history, WEIGHTS, X.at[0, 0].set(bad))
    if np.isnan(bad):  # tanh of an infinity is 1
        assert not jnp.isfinite(loss)
    assert not mpjax.all_finite(grads)
    assert mpjax.all_finite(fast.update(history, seen))
    broken = {**WEIGHTS, "shared": WEIGHTS["shared"].at[3, 3].set(bad)}
    loss, (seen, grads) = differentiate(history, broken, X)
    assert not jnp.isfinite(loss)
    assert not mpjax.all_finite(grads)
    assert mpjax.all_finite(fast.update(history, seen))


MOST_RECENT = mpjax.QuantizedPolicy(
    "bf16-mixed", mpjax.DelayedScaling(amax_history_len=LENGTH, amax_compute_algo="most_recent")
)


def sizes_after(policy, sizes):
    """Returns the history of a function, by product, after steps that saw numbers of some sizes."""
    fast = mpjax.with_amax_history(layers, policy)
    history = fast.init(WEIGHTS, X)
    seen = jax.tree.map(jnp.ones_like, history)
    for size in sizes:
        history = fast.update(history, jax.tree.map(lambda x, size=size: size * x, seen))
    return fast, history


@pytest.mark.parametrize("policy", [DELAYED, MOST_RECENT], ids=["max", "most recent"])
def test_most_recent_reads_the_newest_and_max_the_largest(policy):
    fast, large = sizes_after(policy, [64.0, 64.0, 1 / 64])
    want = 1 / 64 if policy is MOST_RECENT else 64.0
    assert all(bool((x.max(-1) == want).all()) for x in histories(large).values())
    _, small = sizes_after(policy, [1 / 64] * LENGTH)
    clipped, after_large = (jax.jit(fast.apply)(h, WEIGHTS, X) for h in (small, large))
    assert (after_large == clipped) == (policy is MOST_RECENT)


@pytest.mark.parametrize("default", [DELAYED, MOST_RECENT], ids=["max", "most recent"])
def test_each_layer_has_the_history_of_its_own_recipe(default):
    other = MOST_RECENT if default is DELAYED else DELAYED
    policies = mpjax.PolicyMap(default, {"*stack": other})
    mixed, own, others = (
        histories(sizes_after(policy, [2.0, 8.0, 4.0])[1]) for policy in (policies, default, other)
    )
    assert {name.partition("#")[0] for name in mixed} == {"stack", "shared"}
    for name, sizes in mixed.items():
        np.testing.assert_array_equal(sizes, (others if name == "stack" else own)[name])


def test_examples_under_vmap_share_a_history_or_have_one_each():
    fast, history, _ = own()
    examples = jnp.stack([X, X / 2])

    def mean(history, x):
        return jnp.mean(jax.vmap(fast.apply, (None, None, 0))(history, WEIGHTS, x))

    def seen_alone(x):
        return jax.grad(fast.apply)(history, WEIGHTS, x)

    shared = jax.jit(jax.grad(mean))(history, examples)
    each = jax.jit(jax.vmap(seen_alone))(examples)
    alone = jax.jit(seen_alone)(X)
    for a, b, c in zip(*map(jax.tree.leaves, (shared, each, alone)), strict=True):
        np.testing.assert_array_equal(b[0], c)
        largest = jnp.max(b[..., :2, 0], axis=0)  # of inputs and weights; gradients are of a mean
        # Two programs may round a hidden value to neighbours in bfloat16.
        np.testing.assert_allclose(a[..., :2, 0], largest, rtol=2**-7)


@pytest.mark.no_leak_check("shard_map keeps the tracers of its body")
def test_devices_take_the_largest_of_what_each_saw():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.0), DELAYED, axis_name="data", donate=False)
    state = step.init(PARAMS, batch=ONES)
    spec = jax.sharding.PartitionSpec
    parallel = jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    rows = [1.0, -16.0, 2.0, 0.5]
    new, metrics = parallel(state, batch_of(rows, [1.0] * 4))
    (found,) = histories(new.amax_history).values()
    np.testing.assert_array_equal(found[:, 0], [16.0, 0.5, 1.0])
    assert metrics["grads_finite"]
    skipped, _ = parallel(new, batch_of([1.0, np.nan, 1.0, 1.0], [1.0] * 4))
    np.testing.assert_array_equal(*(histories(s.amax_history)["1"] for s in (skipped, new)))


def test_branches_and_while_loops_keep_no_history_and_say_so():
    def branched(ws, x):
        x = x @ ws["first"]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ ws["shared"], lambda x: x, x)
        return jnp.sum(x @ ws["last"])

    rows = mpjax.explain(branched, DELAYED)(WEIGHTS, X).rows
    (reason,) = (row.reason for row in rows if "shared" in row.reason)
    assert "of the values at hand, inside a branch, a while loop or a shard_map" in reason


def test_state_of_another_policy_is_adopted_with_a_batch():
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), DELAYED)
    old = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16-mixed").init(PARAMS)
    adopted = step.adopt(old, batch=ONES)
    assert list(histories(adopted.amax_history)) == ["1"]
    back = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16-mixed").adopt(adopted)
    assert back.amax_history is None
