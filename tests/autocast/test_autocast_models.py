"""Models of Flax Linen, Flax NNX and Equinox, unedited, against themselves in float32."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _linen_layers import LAYERS, ROWS, applied
from _small import distance
from flax import nnx
from jax import lax

from mpjax import autocast

EPS = {"bf16-mixed": 2.0**-8, "16-mixed": 2.0**-11}
KEY = jax.random.key(0)
pytestmark = pytest.mark.standard_promotion("the models promote their own scalars")


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.gelu(nn.GroupNorm(4)(nn.Conv(8, (3, 3), strides=2)(x)))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(5)(nn.LayerNorm()(x.mean((1, 2))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(20, 32)(tokens)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(32)(nn.swish(nn.Dense(64)(nn.RMSNorm()(x))))
        return nn.Dense(20)(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(20, 16)(tokens)
        return nn.Dense(20)(nn.RNN(nn.GRUCell(16))(nn.RNN(nn.LSTMCell(16))(x)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))), None


class ScannedTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8)(tokens)
        blocks = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return nn.Dense(11)(blocks()(x, None)[0])


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        wide = nn.silu(nn.Conv(4, (3, 3))(x))
        deep = nn.silu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), strides=2)(wide)))
        back = nn.ConvTranspose(4, (2, 2), strides=(2, 2))(deep)
        return nn.Conv(1, (1, 1))(jnp.concatenate([wide, back], axis=-1))


class VariationalAutoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.2, deterministic=False)(nn.tanh(nn.Dense(8)(x)))
        mean, log_variance = nn.Dense(3)(h), nn.Dense(3)(h)
        noise = jax.random.normal(self.make_rng("dropout"), mean.shape)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        kl = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=-1)
        return nn.Dense(6)(nn.tanh(nn.Dense(8)(z))), kl


class Experts(nn.Module):
    """Rows are gathered by the expert that inputs choose, and scattered back."""

    @nn.compact
    def __call__(self, x):
        weights = self.param("w", nn.initializers.lecun_normal(), (3, x.shape[-1], 5))
        chosen = jnp.argmax(x[:, :3], axis=-1)
        out = jnp.zeros((3, 5)).at[chosen].add(jnp.einsum("bi,bij->bj", x, weights[chosen]))
        return nn.Dense(2)(jnp.tanh(out[chosen]))


# -- a loss and its arguments, of each -------------------------------------------------------------


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def mean_square(out):
    return sum(jnp.mean(y**2) for y in jax.tree.leaves(out))


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()


def linen(model, x, loss_of=mean_square):
    keys = {"params": KEY, "dropout": KEY}
    variables = jax.jit(model.init)(keys, x)

    def loss(params, x):
        given = {**variables, "params": params}
        out, new = model.apply(given, x, mutable=["batch_stats"], rngs={"dropout": KEY})
        return loss_of(out), new

    return loss, (variables["params"], x)


def classifier():
    def loss_of(logits):
        labels = jnp.arange(5, dtype=jnp.int32) % 4
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return hard + optax.huber_loss(logits, jnp.zeros_like(logits)).mean()

    return linen(nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(4)]), array(5, 6), loss_of)


def haiku():
    def forward(x):
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(8)(x))
        return hk.nets.MLP([8, 3], activation=jax.nn.gelu)(x)

    model, x = hk.without_apply_rng(hk.transform(forward)), array(4, 6)
    return lambda *args: (mean_square(model.apply(*args)), ()), (model.init(KEY, x), x)


def lstm():
    def loss(params, xs):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], 4))
        return mean_square(lax.scan(step, (zeros, zeros), xs)[1]), ()

    return loss, ({"x": array(3, 16), "h": array(4, 16), "b": array(16)}, array(6, 2, 3))


TOKENS = np.arange(12).reshape(2, 6)
OFTEN = {
    "convnet": lambda: linen(ConvNet(), jax.random.normal(KEY, (4, 16, 16, 3))),
    "transformer": lambda: linen(Transformer(), TOKENS, cross_entropy),
    "recurrent": lambda: linen(Recurrent(), TOKENS, cross_entropy),
}
NETWORKS = OFTEN | {
    "scanned transformer": lambda: linen(ScannedTransformer(), jnp.arange(8).reshape(2, 4)),
    "unet": lambda: linen(UNet(), array(1, 6, 6, 2)),
    "vae": lambda: linen(VariationalAutoencoder(), array(3, 6)),
    "experts": lambda: linen(Experts(), array(6, 4)),
    "classifier": classifier,
    "haiku": haiku,
    "lstm": lstm,
}


@functools.cache
def in_float32(name):
    """Returns a loss, its arguments, a transformation, and what this gives."""
    loss, args = NETWORKS[name]()
    moving = [
        i for i, x in enumerate(args) if jnp.issubdtype(jax.tree.leaves(x)[0].dtype, jnp.floating)
    ]
    with_gradients = functools.partial(jax.value_and_grad, argnums=moving, has_aux=True)
    return loss, args, with_gradients, jax.jit(with_gradients(loss))(*args)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", EPS)
@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS],
)
def test_a_network_is_itself_within_rounding(name, policy):
    loss, args, with_gradients, ((want, want_new), want_grads) = in_float32(name)
    step = jax.jit(with_gradients(autocast(loss, policy)))
    (value, new), grads = step(*args)
    assert distance(value, want) < 4 * EPS[policy]
    assert not new or distance(new, want_new) < 4 * EPS[policy]
    assert distance(grads, want_grads) < 16 * EPS[policy]
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", EPS)
def test_equinox_module(policy):
    model = eqx.nn.MLP(4, 2, 8, 2, key=KEY)
    x = jax.random.normal(KEY, (6, 4))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    value, grads = eqx.filter_value_and_grad(autocast(loss, policy))(model, x)
    want, want_grads = eqx.filter_value_and_grad(loss)(model, x)
    assert distance(value, want) < 4 * EPS[policy]
    got, want = (eqx.filter(g, eqx.is_array) for g in (grads, want_grads))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert {g.dtype for g in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert distance(got, want) < 16 * EPS[policy]
    assert autocast(model, policy)(x[0]).dtype == jnp.float32


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
    assert 0 < distance(got, want) < 4 * EPS["bf16-mixed"]
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
