"""recurrentgemma's Griffin: two recurrent blocks and one of local attention."""

from typing import Any

import jax
import jax.numpy as jnp
from networks import Network
from recurrentgemma import common
from recurrentgemma import jax as recurrentgemma

from ._written import cross_entropy, switched


def griffin(size: str) -> Network:
    width, heads, vocab, batch, time = (
        (64, 4, 512, 4, 32) if size == "tiny" else (1024, 8, 32000, 4, 1024)
    )
    blocks = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=vocab,
        width=width,
        mlp_expanded_width=3 * width,
        num_heads=heads,
        block_types=(blocks.RECURRENT, blocks.RECURRENT, blocks.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=time // 2,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )

    def model(dtype: Any) -> Any:
        return recurrentgemma.Griffin(config, gradient_checkpointing=False, dtype=dtype)

    def places() -> jax.Array:
        return jnp.broadcast_to(jnp.arange(time), (batch, time))

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            variables = {"params": params}
            logits, _ = model(dtype).apply(variables, batch["x"], places(), return_cache=False)
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def init(key: jax.Array) -> Any:
        tokens = jnp.zeros((batch, time), jnp.int32)
        return model(jnp.float32).init(key, tokens, places())["params"]

    def sample(key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (batch, time + 1), 0, vocab)
        return {"x": tokens[:, :-1], "y": tokens[:, 1:]}

    return switched("griffin", size, written, init, sample)
