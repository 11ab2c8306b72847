"""transformers' Flax models, with random weights: BERT, GPT-2, Llama, T5, Whisper, ViT, CLIP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import transformers as hf
from networks import Network

from ._written import cross_entropy, full, removed_arguments, switched

hf.logging.set_verbosity_error()
Objective = Callable[[Any, Any, Any], jax.Array]  # outputs, batch, dtype


def _network(
    name: str, size: str, kind: Any, config: Any, sample: Any, objective: Objective
) -> Network:
    """Returns a Flax model of transformers; all of a batch but `labels` are its arguments."""

    def model(dtype: Any) -> Any:
        with removed_arguments():  # it traces itself at once
            return kind(config, dtype=dtype, _do_init=False)

    def written(dtype: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            inputs = {key: x for key, x in batch.items() if key != "labels"}
            with removed_arguments():
                out = model(dtype)(**inputs, params=params, train=False)
            return objective(out, batch, dtype)

        return loss

    def init(key: jax.Array) -> Any:
        plain = model(jnp.float32)
        with removed_arguments():
            return plain.init_weights(key, plain.input_shape)

    return switched(name, size, written, init, sample)


def _of_tokens(out: Any, batch: Any, dtype: Any) -> jax.Array:
    return cross_entropy(out.logits, batch["labels"], dtype)


def _tokens(batch: int, time: int, vocab: int, inputs: tuple[str, ...]) -> Any:
    def sample(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(inputs) + 1)
        pairs = zip((*inputs, "labels"), keys, strict=True)
        return {name: jax.random.randint(k, (batch, time), 0, vocab) for name, k in pairs}

    return sample


def _images(batch: int, pixels: int, classes: int) -> Any:
    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        images = jax.random.normal(k1, (batch, 3, pixels, pixels))
        return {"pixel_values": images, "labels": jax.random.randint(k2, (batch,), 0, classes)}

    return sample


def _sizes(size: str) -> tuple[int, int, int, int, int]:
    """Returns width, heads, vocabulary, batch and time."""
    return (64, 4, 512, 4, 32) if size == "tiny" else (768, 12, 32000, 8, 512)


def bert(size: str) -> Network:
    width, heads, vocab, batch, time = _sizes(size)
    config = hf.BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    sample = _tokens(batch, time, vocab, ("input_ids",))
    return _network("bert", size, hf.FlaxBertForMaskedLM, config, sample, _of_tokens)


def gpt2(size: str) -> Network:
    width, heads, vocab, batch, time = _sizes(size)
    config = hf.GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=2, n_head=heads, n_positions=2 * time
    )
    sample = _tokens(batch, time, vocab, ("input_ids",))
    return _network("gpt2", size, hf.FlaxGPT2LMHeadModel, config, sample, _of_tokens)


def llama(size: str) -> Network:
    width, heads, vocab, batch, time = _sizes(size)
    config = hf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=8 * width // 3,
        max_position_embeddings=2 * time,
    )
    sample = _tokens(batch, time, vocab, ("input_ids",))
    return _network("llama", size, hf.FlaxLlamaForCausalLM, config, sample, _of_tokens)


def t5(size: str) -> Network:
    width, heads, vocab, batch, time = _sizes(size)
    config = hf.T5Config(
        vocab_size=vocab,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=2,
        num_heads=heads,
        decoder_start_token_id=0,
    )
    sample = _tokens(batch, time, vocab, ("input_ids", "decoder_input_ids"))
    return _network("t5", size, hf.FlaxT5ForConditionalGeneration, config, sample, _of_tokens)


def whisper(size: str) -> Network:
    width, heads, vocab, batch, _ = _sizes(size)
    frames, time, mels = (32, 16, 16) if size == "tiny" else (1500, 128, 80)
    config = hf.WhisperConfig(
        vocab_size=vocab,
        d_model=width,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames,
        max_target_positions=time,
        num_mel_bins=mels,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    tokens = _tokens(batch, time, vocab, ("decoder_input_ids",))

    def sample(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        return {"input_features": jax.random.normal(k1, (batch, mels, 2 * frames)), **tokens(k2)}

    kind = hf.FlaxWhisperForConditionalGeneration
    return _network("whisper", size, kind, config, sample, _of_tokens)


def _vision(size: str) -> dict[str, int]:
    width, heads, *_ = _sizes(size)
    return {
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "image_size": 32 if size == "tiny" else 224,
        "patch_size": 8 if size == "tiny" else 16,
    }


def vit(size: str) -> Network:
    batch, classes = (4, 10) if size == "tiny" else (32, 1000)
    config = hf.ViTConfig(**_vision(size), num_labels=classes)
    sample = _images(batch, config.image_size, classes)
    return _network("vit", size, hf.FlaxViTForImageClassification, config, sample, _of_tokens)


def clip(size: str) -> Network:
    width, _, vocab, _, time = _sizes(size)
    batch = 8 if size == "tiny" else 32
    vision = _vision(size)
    text = {key: value for key, value in vision.items() if key not in ("image_size", "patch_size")}
    text |= {"vocab_size": vocab, "max_position_embeddings": time, "eos_token_id": vocab - 1}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)
    tokens, images = _tokens(batch, time, vocab, ()), _images(batch, vision["image_size"], 2)

    def sample(key: jax.Array) -> Any:
        pixels = images(key)["pixel_values"]
        return {"input_ids": tokens(key)["labels"], "pixel_values": pixels}

    def contrast(out: Any, batch: Any, dtype: Any) -> jax.Array:
        logits = out.logits_per_image.astype(full(dtype))
        diagonal = jnp.arange(len(logits))
        both = (cross_entropy(x, diagonal, dtype) for x in (logits, logits.T))
        return sum(both) / 2

    return _network("clip", size, hf.FlaxCLIPModel, config, sample, contrast)
