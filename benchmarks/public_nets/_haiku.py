"""dm-haiku's ResNet-18, whose switch is a policy for each class of modules."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
from networks import Network

from ._written import cross_entropy, switched


def resnet(size: str) -> Network:
    batch, pixels, classes = (4, 32, 10) if size == "tiny" else (32, 224, 1000)

    def transformed(dtype: Any) -> Any:
        policy = jmp.Policy(jnp.float32, dtype, dtype)
        full = jmp.Policy(jnp.float32, jnp.promote_types(dtype, jnp.float32), dtype)

        def forward(x: jax.Array) -> jax.Array:
            if jnp.dtype(dtype).itemsize == 2:  # as haiku's own ImageNet example sets them
                hk.mixed_precision.set_policy(hk.nets.ResNet18, policy)
                hk.mixed_precision.set_policy(hk.BatchNorm, full)
            try:
                return hk.nets.ResNet18(classes)(x, is_training=True)
            finally:
                hk.mixed_precision.clear_policy(hk.nets.ResNet18)
                hk.mixed_precision.clear_policy(hk.BatchNorm)

        return hk.without_apply_rng(hk.transform_with_state(forward))

    def image() -> jax.Array:
        return jnp.zeros((2, pixels, pixels, 3))

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            net = transformed(dtype)
            _, state = jax.eval_shape(transformed(jnp.float32).init, jax.random.key(0), image())
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
            logits, _ = net.apply(params, state, batch["x"])  # new statistics are dropped
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def init(key: jax.Array) -> Any:
        return transformed(jnp.float32).init(key, image())[0]

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, (batch, pixels, pixels, 3))
        return {"x": x, "y": jax.random.randint(k2, (batch,), 0, classes)}

    return switched("resnet", size, written, init, sample)
