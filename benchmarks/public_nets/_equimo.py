"""equimo's vision transformer, in Equinox."""

from typing import Any

import equinox as eqx
import jax
from equimo.vision.models import vit
from networks import Network

from ._written import cross_entropy, unswitched


def dino(size: str) -> Network:
    width, pixels, patch, heads, batch, classes = (
        (64, 32, 8, 4, 4, 10) if size == "tiny" else (384, 224, 16, 6, 32, 1000)
    )

    def model(key: jax.Array) -> Any:
        return vit.VisionTransformer(
            img_size=pixels,
            in_channels=3,
            dim=width,
            patch_size=patch,
            num_heads=[heads],
            depths=[2],
            num_classes=classes,
            key=key,
        )

    def init(key: jax.Array) -> Any:
        return eqx.filter(model(key), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        shapes = eqx.filter_eval_shape(model, jax.random.key(0))
        rest = eqx.filter(shapes, lambda x: not hasattr(x, "dtype"))
        network = eqx.combine(params, rest)
        logits = jax.vmap(lambda x: network(x, key=jax.random.key(0), inference=True))(batch["x"])
        return cross_entropy(logits, batch["y"], logits.dtype)

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, (batch, 3, pixels, pixels))
        return {"x": x, "y": jax.random.randint(k2, (batch,), 0, classes)}

    return unswitched("equimo", size, loss, init, sample)
