"""A decoder for pods: scanned, rematerialised layers under `shard_map`, parameters sharded (FSDP).

Each device holds 1/n of every parameter and of the optimizer's state, and n-th part of the batch.
A layer's weights are gathered in the compute dtype when the layer runs, and again when its backward
pass does; their gradients are reduced in float32 (`mpjax.pods.gather`). The default size has 872
million parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
import mpjax.pods

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder, and what to compute it in."""

    width: int = 2048
    layers: int = 16
    heads: int = 16
    hidden: int = 8192
    vocabulary: int = 32000
    time: int = 2048
    policy: str = "bf16-mixed"
    axis: str = "fsdp"
    param_dtype: str = "float32"

    @property
    def shapes(self) -> PyTree:
        """Specs of the parameters: one stacked array for all layers' weights of a kind."""
        n, d, f = self.layers, self.width, self.hidden
        sizes = {
            "table": (self.vocabulary, d),
            "layers": {
                "norm1": (n, d),
                "qkv": (n, d, 3 * d),
                "out": (n, d, d),
                "norm2": (n, d),
                "up": (n, d, f),
                "down": (n, f, d),
            },
            "norm": (d,),
        }
        is_size = lambda x: isinstance(x, tuple)  # noqa: E731
        spec = lambda s: jax.ShapeDtypeStruct(s, self.param_dtype)  # noqa: E731
        return jax.tree.map(spec, sizes, is_leaf=is_size)

    @property
    def specs(self) -> PyTree:
        """How the parameters are stored: the first axis of each matrix split, norms whole."""

        def spec(path: Any, leaf: Any) -> P:
            stacked = (None,) if path[0].key == "layers" else ()
            return P(*stacked, self.axis) if leaf.ndim - len(stacked) > 1 else P()

        return jax.tree_util.tree_map_with_path(spec, self.shapes)

    def init(self, key: jax.Array) -> PyTree:
        """Returns parameters: normal, by the number of inputs; ones for norms."""
        leaves, structure = jax.tree.flatten(self.shapes)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.shapes)]
        values: list[jax.Array] = []
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            if "norm" in path[-1].key:
                values.append(jnp.ones(leaf.shape))
            else:
                scale = self.width**-0.5 if path[-1].key == "table" else leaf.shape[-2] ** -0.5
                values.append(scale * jax.random.normal(jax.random.fold_in(key, i), leaf.shape))
        return jax.tree.unflatten(structure, [x.astype(self.param_dtype) for x in values])

    def loss(self, shards: PyTree, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of this device's rows; inside `shard_map`."""
        gather = functools.partial(
            mpjax.pods.gather, policy=self.policy, axis_name=self.axis, reduce="mean"
        )
        specs = self.specs
        layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs["layers"])
        table = gather(shards["table"], specs["table"])

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def layer(x: jax.Array, shards: PyTree) -> tuple[jax.Array, None]:
            return self._layer(gather(shards, layer_specs), x), None

        x, _ = jax.lax.scan(layer, table[tokens[:, :-1]], shards["layers"])
        x = normalised(x, gather(shards["norm"], specs["norm"]))
        logits = (x @ table.T).astype(jnp.float32)  # sums of exponentials are float32
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    def _layer(self, w: PyTree, x: jax.Array) -> jax.Array:
        rows, time, width = x.shape
        qkv = (normalised(x, w["norm1"]) @ w["qkv"]).reshape(rows, time, 3, self.heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        attended = causal_attention(rotated(q), rotated(k), v)
        x = x + attended.reshape(rows, time, width) @ w["out"]
        return x + jax.nn.gelu(normalised(x, w["norm2"]) @ w["up"]) @ w["down"]

    def grads(self, mesh: Mesh) -> Callable[[PyTree, jax.Array], tuple[jax.Array, PyTree]]:
        """Returns `(params, tokens) -> (mean loss, mean gradients)`, sharded as `specs` says."""

        def local(shards: PyTree, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
            loss, grads = jax.value_and_grad(self.loss)(shards, tokens)
            return jax.lax.pmean(loss, self.axis), grads

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(self.specs, P(self.axis)),
            out_specs=(P(), self.specs),
            check_vma=False,
        )

    def train_step(self, tx: optax.GradientTransformation, mesh: Mesh) -> Any:
        """Returns the jitted step `(state, tokens) -> (state, metrics)`; it donates its state."""
        grad = self.grads(mesh)
        named = functools.partial(NamedSharding, mesh)
        shardings = jax.tree.map(named, self.state_specs(tx))

        def step(state: PyTree, tokens: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
            # The optimizer stands outside of shard_map: a global norm is then global.
            loss, grads = grad(state["params"], tokens)
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state}, {"loss": loss}

        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def state_shapes(self, tx: optax.GradientTransformation) -> PyTree:
        """Specs of the state of `train_step`."""
        return {"params": self.shapes, "opt_state": jax.eval_shape(tx.init, self.shapes)}

    def state_specs(self, tx: optax.GradientTransformation) -> PyTree:
        """How the state is stored: the optimizer's as the parameters that it belongs to."""
        known = dict(jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=_is_spec))

        def spec(path: Any, _: Any) -> P:
            """Of a leaf below a parameter's path, or of its codes or scales."""
            ends = [path[i:j] for j in (len(path), len(path) - 1) for i in range(j)]
            return next((known[end] for end in ends if end in known), P())

        opt_state = self.state_shapes(tx)["opt_state"]
        opt_specs = jax.tree_util.tree_map_with_path(spec, opt_state)
        return {"params": self.specs, "opt_state": opt_specs}


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x` over its root mean square, which is computed in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns attention over [rows, time, heads, dim], its sums of exponentials in float32.

    Normalised behind the product with the values: XLA then stores the exponentials in 16 bits and
    never the quotients, a third less memory traffic in a whole step on a TPU.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(seen, scores, jnp.asarray(-1e4, scores.dtype))
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))  # cancels out
    weights = jnp.exp((scores - largest).astype(jnp.float32))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v).astype(jnp.float32)
    return (out / jnp.swapaxes(total, 1, 2)).astype(v.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Returns queries or keys with rotary positions."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
