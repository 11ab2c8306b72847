"""diffusers' Flax models, with random weights: Stable Diffusion's U-Net and autoencoder."""

from typing import Any

import diffusers
import jax
import jax.numpy as jnp
from networks import Network

from ._written import mean_square, removed_arguments, switched


def unet(size: str) -> Network:
    is_tiny = size == "tiny"
    widths, pixels, words, batch = ((32, 64), 16, 32, 2) if is_tiny else ((320, 640), 64, 768, 4)

    def model(dtype: Any) -> Any:
        return diffusers.FlaxUNet2DConditionModel(
            sample_size=pixels,
            block_out_channels=widths,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            attention_head_dim=4 if is_tiny else 8,
            cross_attention_dim=words,
            dtype=dtype,
        )

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            inputs = (batch["noisy"], batch["time"], batch["text"])
            with removed_arguments():
                out = model(dtype).apply({"params": params}, *inputs).sample
            return mean_square(out, batch["noise"], dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        shape = (batch, 4, pixels, pixels)
        return {
            "noisy": jax.random.normal(k1, shape),
            "noise": jax.random.normal(k2, shape),
            "time": jax.random.randint(k3, (batch,), 0, 1000),
            "text": jax.random.normal(k4, (batch, 77, words)),
        }

    return switched("unet", size, written, model(jnp.float32).init_weights, sample)


def vae(size: str) -> Network:
    widths, pixels, batch = ((32, 64), 32, 2) if size == "tiny" else ((128, 256), 256, 4)

    def model(dtype: Any) -> Any:
        return diffusers.FlaxAutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=widths,
            layers_per_block=1,
            norm_num_groups=16,
            sample_size=pixels,
            dtype=dtype,
        )

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            with removed_arguments():
                out = model(dtype).apply({"params": params}, batch["x"]).sample
            return mean_square(out, batch["x"], dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        return {"x": jax.random.normal(key, (batch, 3, pixels, pixels))}

    def init(key: jax.Array) -> Any:
        return model(jnp.float32).init_weights(key)

    return switched("vae", size, written, init, sample)
