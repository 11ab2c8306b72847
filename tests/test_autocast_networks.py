"""Whole networks, unedited, under autocast and JAX's transformations: against float64 and noise."""

from collections.abc import Callable
from typing import Any

import _differential as differential
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import MODES, named
from jax import lax

from mpjax import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
GRAD = MODES[1]

pytestmark = [
    pytest.mark.standard_promotion("linen and haiku promote masks and counts implicitly"),
    pytest.mark.no_leak_check("linen keeps tracers on its scopes until they are collected"),
]


def _array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))), None


class _ScannedTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8)(tokens)
        blocks = nn.scan(
            nn.remat(_Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return nn.Dense(11)(blocks()(x, None)[0])


class _UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        wide = nn.silu(nn.Conv(4, (3, 3))(x))
        deep = nn.silu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), strides=2)(wide)))
        back = nn.ConvTranspose(4, (2, 2), strides=(2, 2))(deep)
        return nn.Conv(1, (1, 1))(jnp.concatenate([wide, back], axis=-1))


class _VariationalAutoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.2, deterministic=False)(nn.tanh(nn.Dense(8)(x)))
        mean, log_variance = nn.Dense(3)(h), nn.Dense(3)(h)
        noise = jax.random.normal(self.make_rng("dropout"), mean.shape)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        kl = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=-1)
        return nn.Dense(6)(nn.tanh(nn.Dense(8)(z))), kl


class _Experts(nn.Module):
    """Rows are gathered by the expert that inputs choose, and scattered back."""

    @nn.compact
    def __call__(self, x):
        weights = self.param("w", nn.initializers.lecun_normal(), (3, x.shape[-1], 5))
        chosen = jnp.argmax(x[:, :3], axis=-1)
        out = jnp.zeros((3, 5)).at[chosen].add(jnp.einsum("bi,bij->bj", x, weights[chosen]))
        return nn.Dense(2)(jnp.tanh(out[chosen]))


def _linen(model, x):
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, x)
    return lambda v, x: model.apply(v, x, rngs={"dropout": jax.random.key(2)}), (variables, x)


def _classifier():
    model, x = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(4)]), _array(5, 6)
    labels = jnp.arange(5, dtype=jnp.int32) % 4

    def loss(variables, x, labels):
        logits = model.apply(variables, x)
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return hard + optax.huber_loss(logits, jnp.zeros_like(logits)).mean()

    return loss, (model.init(jax.random.key(0), x), x, labels)


def _haiku():
    def forward(x):
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(8)(x))
        return hk.nets.MLP([8, 3], activation=jax.nn.gelu)(x)

    model, x = hk.without_apply_rng(hk.transform(forward)), _array(4, 6)
    return model.apply, (model.init(jax.random.PRNGKey(0), x), x)


def _lstm():
    def fun(params, xs):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], 4))
        return lax.scan(step, (zeros, zeros), xs)[1]

    return fun, ({"x": _array(3, 16), "h": _array(4, 16), "b": _array(16)}, _array(6, 2, 3))


TOKENS = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
NETWORKS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "scanned transformer": lambda: _linen(_ScannedTransformer(), TOKENS),
    "unet": lambda: _linen(_UNet(), _array(1, 6, 6, 2)),
    "vae": lambda: _linen(_VariationalAutoencoder(), _array(3, 6)),
    "experts": lambda: _linen(_Experts(), _array(6, 4)),
    "classifier": _classifier,
    "haiku": _haiku,
    "lstm": _lstm,
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_network_to_rounding(name, policy):
    fun, trees = NETWORKS[name]()
    low = POLICIES[policy]
    program = named(name, fun, *trees)
    differential.check_norms(program, GRAD, lambda f: autocast(f, policy), low)


_QUICK = {m.name: m for m in MODES if m.name not in ("grad(autocast(f))", "autocast(f)")}


@pytest.mark.slow
@pytest.mark.parametrize("mode", _QUICK)
def test_every_transformation_of_a_recurrent_network(mode):
    fun, trees = _lstm()
    program = named("lstm", fun, *trees)
    differential.check_norms(
        program, _QUICK[mode], lambda f: autocast(f, "bf16-mixed"), jnp.bfloat16
    )
