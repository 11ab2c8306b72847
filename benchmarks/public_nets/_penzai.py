"""penzai's decoder in the form of Mistral: two blocks, local attention, grouped heads."""

from typing import Any

import jax
from networks import Network
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as llamalike

from ._written import cast, cross_entropy, switched


def mistral(size: str) -> Network:
    width, heads, vocab, batch, time = (
        (64, 4, 512, 4, 32) if size == "tiny" else (768, 12, 32000, 8, 512)
    )

    def built(dtype: Any, key: jax.Array | None) -> Any:
        config = llamalike.LlamalikeTransformerConfig(
            num_kv_heads=heads // 2,
            query_head_multiplier=2,
            embedding_dim=width,
            projection_dim=width // heads,
            mlp_hidden_dim=4 * width,
            num_decoder_blocks=2,
            vocab_size=vocab,
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
            attention_type=llamalike.AttentionTypeSlidingWindowCausal(time // 2),
            parameter_dtype=dtype,
            activation_dtype=dtype,
        )
        return llamalike.build_llamalike_transformer(config, init_base_rng=key)

    def init(key: jax.Array) -> Any:
        _, parameters = pz.unbind_params(built("float32", key), freeze=True)
        return {p.label: p.value for p in parameters}

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            # With float32 parameters and 16-bit activations every product of penzai is float32.
            params = cast(params, dtype)
            skeleton = built(dtype, None)
            filled = pz.bind_variables(
                skeleton, [pz.ParameterValue(label=k, value=v) for k, v in params.items()]
            )
            logits = filled(pz.nx.wrap(batch["x"]).tag("batch", "seq"))
            logits = logits.untag("batch", "seq", "vocabulary").unwrap()
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def sample(key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (batch, time + 1), 0, vocab)
        return {"x": tokens[:, :-1], "y": tokens[:, 1:]}

    return switched("penzai", size, written, init, sample)
