"""Ten small models of linen, NNX, Equinox, Haiku and plain JAX, and ways to break each of them.

Every model has a `first` layer, a `mid` one behind it with no norm between the two, and a `head`;
what an injury does to them is the same everywhere, and so is what a diagnosis has to say of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import mpjax

WIDTH, ROWS, LAYERS = 8, 8, 4


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of (params, batch), and where its layers are: paths of kernels, names of modules."""

    make: Callable[[], tuple[Callable[..., Any], Any]]
    kernels: Mapping[str, str]  # layer → end of its kernel's path
    modules: Mapping[str, str]  # layer → end of its module's name
    image: bool = False
    stacked: bool = False  # whether `mid` is a stack of layers, in a scan
    # The iteration that rounds what layer 2 makes: the one behind it, where the product stays f32.
    rounds: int = 3
    normed: bool = False  # whether a norm takes large inputs away
    operation: str = "dot_general"


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def batch_of(model):
    shape = (ROWS, 4, 4, WIDTH) if model.image else (ROWS, WIDTH)
    return {"x": np.array(array(*shape)), "y": np.array(array(ROWS, 2, seed=1)), "hot": False}


def _error(out, batch):
    return jnp.mean(jnp.square(out.astype(jnp.float32) - batch["y"]))


def _gate(hot, h):
    """Returns h; the branch that is not meant to be taken returns NaN where h is not 0.

    Behind an exponential or a factor of 3e38, taken or not, autocast leaves a product in float32.
    """
    return lax.cond(hot, lambda h: jnp.sqrt(-jnp.abs(h)), lambda h: h, h)


# -- linen -----------------------------------------------------------------------------------------


class _LinenGate(nn.Module):
    @nn.compact
    def __call__(self, hot, h):
        return _gate(hot, h)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x, hot):
        h = nn.LayerNorm()(nn.Dense(WIDTH, name="enter")(x))
        h = nn.gelu(nn.Dense(WIDTH, name="first")(h))
        h = nn.gelu(nn.Dense(WIDTH, name="mid")(h))
        return nn.Dense(2, name="head")(_LinenGate(name="gate")(hot, h))


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x))
        h = nn.relu(nn.Conv(4, (3, 3), name="first")(h))
        h = nn.relu(nn.Conv(4, (3, 3), name="mid")(h))
        return nn.Dense(2, name="head")(jnp.mean(h, (1, 2)))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        h = h + nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(h))
        return h + nn.gelu(nn.Dense(WIDTH, name="mid")(h)), None


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH, name="first")(jnp.stack([x, x + 1], 1))
        axes = {"params": 0}
        stack = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes=axes,
            split_rngs={"params": True},
            length=LAYERS,
        )
        h, _ = stack(name="blocks")(h, None)
        return nn.Dense(2, name="head")(h[:, 0])


def _linen(module, *, image=False, hot=False):
    x = jnp.ones((2, 4, 4, WIDTH) if image else (2, WIDTH))
    extra = (False,) if hot else ()
    variables = module.init(jax.random.key(0), x, *extra)

    def loss(params, batch):
        given = variables | {"params": params}
        more = (batch["hot"],) if hot else ()
        out, _ = module.apply(given, batch["x"], *more, mutable=["batch_stats"])
        return _error(out, batch)

    return loss, variables["params"]


# -- NNX -------------------------------------------------------------------------------------------


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mid = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, x, hot):
        h = nnx.gelu(self.mid(nnx.gelu(self.first(self.norm(x)))))
        with jax.named_scope("gate"):
            h = _gate(hot, h)
        return self.head(h)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.mid = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        return h + nnx.silu(self.mid(h))


class NNXStack(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return NNXBlock(rngs)

        self.blocks = blocks(rngs)

    def __call__(self, x, hot):
        del hot

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(h, block):
            return block(h)

        return self.head(run(self.first(x), self.blocks))


def _nnx(kind):
    graphdef, params, rest = nnx.split(kind(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch):
        model = mpjax.nnx.name_operations(nnx.merge(graphdef, params, rest, copy=True))
        return _error(model(batch["x"], batch["hot"]), batch)

    return loss, params


# -- Equinox ---------------------------------------------------------------------------------------


class EquinoxMLP(eqx.Module):
    first: eqx.nn.Linear
    mid: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
        self.mid = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, 2, key=keys[2])

    def __call__(self, x, hot):
        with jax.named_scope("first"):
            h = jax.nn.gelu(self.first(x))
        with jax.named_scope("mid"):
            h = jax.nn.gelu(self.mid(h))
        with jax.named_scope("gate"):
            h = _gate(hot, h)
        with jax.named_scope("head"):
            return self.head(h)


def _equinox(kind):
    params, static = eqx.partition(kind(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch):
        model = eqx.combine(params, static)
        return _error(jax.vmap(model, (0, None))(batch["x"], batch["hot"]), batch)

    return loss, params


# -- Haiku -----------------------------------------------------------------------------------------


def _haiku_mlp(x, hot):
    h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    h = jax.nn.relu(hk.Linear(WIDTH, name="first")(h))
    h = jax.nn.relu(hk.Linear(WIDTH, name="mid")(h))
    with jax.named_scope("gate"):
        h = _gate(hot, h)
    return hk.Linear(2, name="head")(h)


def _haiku_stack(x, hot):
    del hot

    def block(h):
        return h + jax.nn.silu(hk.Linear(WIDTH, name="mid")(h))

    h = hk.Linear(WIDTH, name="first")(x)
    return hk.Linear(2, name="head")(hk.experimental.layer_stack(LAYERS)(block)(h))


def _haiku(forward):
    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), jnp.ones((2, WIDTH)), False)

    def loss(params, batch):
        return _error(model.apply(params, batch["x"], batch["hot"]), batch)

    return loss, params


# -- plain JAX -------------------------------------------------------------------------------------


def _plain(run, *, stacked):
    mid = (LAYERS, WIDTH, WIDTH) if stacked else (WIDTH, WIDTH)
    params = {"first": array(WIDTH, WIDTH) * 0.4, "mid": array(*mid) * 0.3}
    params["head"] = array(WIDTH, 2) * 0.4

    def loss(params, batch):
        with jax.named_scope("first"):
            h = jax.nn.relu(batch["x"] @ params["first"])
        h = run(params["mid"], h, batch["hot"])
        with jax.named_scope("head"):
            return _error(h @ params["head"], batch)

    return loss, params


def _one_layer(w, h, hot):
    with jax.named_scope("mid"):
        h = jax.checkpoint(lambda w, h: jax.nn.silu(h @ w))(w, h)
    with jax.named_scope("gate"):
        return _gate(hot, h)


def _a_scan(ws, h, hot):
    del hot

    def layer(h, w):
        with jax.named_scope("mid"):
            return h + jax.nn.silu(h @ w), None

    return lax.scan(layer, h, ws, reverse=True)[0]


# -- the table -------------------------------------------------------------------------------------


def _names(*names, kernel="{}/kernel"):
    layers = dict(zip(("first", "mid", "head"), names, strict=True))
    return {"kernels": {k: kernel.format(v) for k, v in layers.items()}, "modules": layers}


_PLAIN = _names("first", "mid", "head")
_BARE = _names("first", "mid", "head", kernel="{}")
_WEIGHT = _names("first", "mid", "head", kernel="{}/weight")
_W = _names("first", "mid", "head", kernel="{}/w")
_CONV = {"image": True, "operation": "conv_general_dilated"}

MODELS: dict[str, Model] = {
    "linen-mlp": Model(partial(_linen, LinenMLP(), hot=True), **_PLAIN, normed=True),
    "linen-cnn": Model(partial(_linen, LinenCNN(), image=True), **_PLAIN, **_CONV),
    "linen-transformer": Model(
        partial(_linen, LinenTransformer()), **_PLAIN, stacked=True, rounds=2
    ),
    "nnx-mlp": Model(partial(_nnx, NNXMLP), **_PLAIN, normed=True),
    "nnx-stack": Model(partial(_nnx, NNXStack), **_PLAIN, stacked=True),
    "equinox-mlp": Model(partial(_equinox, EquinoxMLP), **_WEIGHT),
    "haiku-mlp": Model(partial(_haiku, _haiku_mlp), **_W, normed=True),
    "haiku-stack": Model(partial(_haiku, _haiku_stack), **_W, stacked=True),
    "plain": Model(partial(_plain, _one_layer, stacked=False), **_BARE),
    "plain-scan": Model(partial(_plain, _a_scan, stacked=True), **_BARE, stacked=True, rounds=1),
}


@functools.cache
def made(name):
    """Returns a model's loss and its parameters."""
    return MODELS[name].make()


def sharded(loss):
    """Returns the mean of a loss over eight shards of the batch."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:ROWS]), "shards")
    rows = {"x": P("shards"), "y": P("shards"), "hot": P()}

    def each(params, batch):
        return lax.pmean(loss(params, batch), "shards")

    return jax.shard_map(each, mesh=mesh, in_specs=(P(), rows), out_specs=P())
