"""What Flax modules change of themselves, under autocast: statistics, counts, optimizers.

What they compute is in `test_library_layers.py` and `test_autocast_library_cuts.py`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _linen_layers import LAYERS, ROWS, applied
from _small import BF16, distance
from flax import nnx

from mpjax import autocast

KEY = jax.random.key(0)
pytestmark = pytest.mark.standard_promotion("the models promote their own scalars")


@pytest.mark.no_leak_check("linen keeps tracers on its scopes until they are collected")
def test_batch_statistics_are_those_of_float32_where_no_product_comes_before():
    fun, variables = applied(*LAYERS["BatchNorm"])
    expected = jax.jit(fun)(variables, ROWS)[1]["batch_stats"]
    got = jax.jit(autocast(fun, "bf16-mixed"))(variables, ROWS)[1]["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def nnx_model():
    rngs = nnx.Rngs(0, dropout=1)
    return nnx.Sequential(
        nnx.Linear(4, 8, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.relu,
        nnx.Dropout(0.5, rngs=rngs),
        nnx.Linear(8, 2, rngs=rngs),
    )


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


NNX_CALLS = {
    "module as argument": lambda m, x: autocast(nnx_loss, "bf16-mixed")(m, x),
    "inside nnx.jit": lambda m, x: nnx.jit(autocast(nnx_loss, "bf16-mixed"))(m, x),
    "around nnx.jit": lambda m, x: autocast(lambda m, x: nnx.jit(nnx_loss)(m, x), "bf16-mixed")(
        m, x
    ),
    "inside nnx.grad": lambda m, x: nnx.grad(autocast(nnx_loss, "bf16-mixed"))(m, x),
    "inside nnx.jit and nnx.grad": nnx.jit(
        lambda m, x: nnx.grad(autocast(nnx_loss, "bf16-mixed"))(m, x)
    ),
    "the module itself": lambda m, x: autocast(m, "bf16-mixed")(x),
    "its method": lambda m, x: autocast(m.__call__, "bf16-mixed")(x),
}


@pytest.mark.sampled(2)
@pytest.mark.no_leak_check("nnx keeps tracers on the objects that it merges")
@pytest.mark.parametrize("name", NNX_CALLS)
def test_nnx_keeps_statistics_and_random_counts(name):
    model, plain = nnx_model(), nnx_model()
    x = jax.random.normal(KEY, (6, 4))
    out = NNX_CALLS[name](model, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {jnp.dtype("float32")}
    nnx_loss(plain, x)
    for kind in (nnx.BatchStat, nnx.RngCount):
        got, want, old = (jax.tree.leaves(nnx.state(m, kind)) for m in (model, plain, nnx_model()))
        assert not all(map(np.array_equal, want, old))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-2, atol=2e-3)


def step_of_objects(module, optimizer, metric, streams, total, x):
    noise = jax.random.normal(streams.noise(), x.shape)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x + noise)) ** 2))(module)
    optimizer.update(module, grads)
    metric.update(values=loss)
    total[...] = total[...] + loss
    return loss


@pytest.mark.no_leak_check("nnx keeps tracers on the objects that it merges")
def test_optimizers_metrics_streams_and_variables_keep_their_updates():
    x = jax.random.normal(KEY, (4, 6))

    def objects():
        module = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        metric = nnx.metrics.Average()
        return module, optimizer, metric, nnx.Rngs(noise=1), nnx.Variable(jnp.zeros(()))

    plain, fast, before = objects(), objects(), objects()
    want = nnx.jit(step_of_objects)(*plain, x)
    assert jnp.allclose(autocast(step_of_objects, "bf16-mixed")(*fast, x), want, rtol=2**-6)
    for ours, theirs, old in zip(fast, plain, before, strict=True):
        found, expected, start = (
            [x for x in jax.tree.leaves(y) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
            for y in (ours, theirs, old)
        )
        assert not all(map(np.array_equal, expected, start))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2**-5, atol=2**-7)


@pytest.mark.no_leak_check("nnx keeps tracers on the objects that it merges")
def test_a_variable_that_two_arguments_share_is_changed_by_none():
    module, x = nnx_model(), jax.random.normal(KEY, (6, 4))
    twice = autocast(lambda a, b, x: a(x) + b(x), "bf16-mixed")
    with pytest.raises(ValueError, match=r"changes a BatchStat that its arguments hold twice"):
        twice(module, module, x)
    module.eval()
    assert twice(module, module, x).shape == (6, 2)


# -- linen modules from within ------------------------------------------------------------------


class Decorated(nn.Module):
    """A module whose author put autocast on its call."""

    batch_norm: bool = False

    @nn.compact
    @autocast("bf16-mixed")
    def __call__(self, x):
        y = nn.Dense(4)(x)
        return nn.BatchNorm(use_running_average=False)(y) if self.batch_norm else y


class Around(nn.Module):
    """A module that calls another one under autocast."""

    @nn.compact
    def __call__(self, x):
        return autocast(nn.Dense(4), "bf16-mixed")(x)


@pytest.mark.parametrize("model", [Decorated(), Around()], ids=["decorated", "around"])
def test_a_linen_module_is_initialised_and_applied(model):
    x = jax.random.normal(KEY, (3, 6))
    variables = model.init(KEY, x)
    plain = nn.Dense(4)
    params = jax.tree.leaves(variables)
    assert sorted(p.shape for p in params) == [(4,), (6, 4)]
    (dense,) = variables["params"].values()
    got, want = model.apply(variables, x), plain.apply({"params": dense}, x)
    assert 0 < distance(got, want) < 4 * BF16
    grads = jax.grad(lambda v: model.apply(v, x).sum())(variables)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.no_leak_check("the scope holds the tracers that the message is about")
def test_statistics_that_a_linen_module_changes_from_within_are_not_lost():
    x = jax.random.normal(KEY, (3, 6))
    model = Decorated(batch_norm=True)
    variables = model.init(KEY, x)
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(variables))
    with pytest.raises(ValueError, match=r"(?s)changes variables of its Decorated.*model\.apply"):
        model.apply(variables, x, mutable=["batch_stats"])
