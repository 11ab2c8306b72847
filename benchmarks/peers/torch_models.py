"""Training steps of models that others wrote, in PyTorch, run in an interpreter that has it.

    python torch_models.py transformer '{"batch": 8, ...}' cuda

reads lines `prepare VARIANT`, `run VARIANT STEPS`, `peak VARIANT` from standard input, and answers
each with a line of JSON. The models are those of transformers, timm and torchvision, at the sizes
of the networks beside them in `networks/`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# What a library prints is no answer: only `answer` writes to the real standard output.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

Size = dict[str, Any]
Loss = Callable[[], Any]


def answer(**fields: Any) -> None:
    ANSWERS.write(json.dumps(fields) + "\n")


try:
    import torch
except ImportError as error:
    answer(absent=str(error))
    sys.exit(0)

# The dtype of autocast, whether float32 products may be TF32, and whether it is compiled.
VARIANTS: dict[str, tuple[Any, bool, bool]] = {
    "float32": (None, False, False),
    "float32, TF32": (None, True, False),
    "autocast bf16": (torch.bfloat16, True, False),
    "autocast f16": (torch.float16, True, False),
    "float32, TF32, compiled": (None, True, True),
    "autocast bf16, compiled": (torch.bfloat16, True, True),
}


def tokens(size: Size, device: str) -> Any:
    return torch.randint(0, size["vocab"], (size["batch"], size["time"]), device=device)


def transformer(size: Size, device: str) -> tuple[Any, Any]:
    """Returns GPT-2 of transformers, without dropout, and what gives its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size["vocab"],
        n_positions=size["time"],
        n_embd=size["width"],
        n_layer=size["layers"],
        n_head=size["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    x = tokens(size, device)
    return GPT2LMHeadModel(config), lambda model: model(input_ids=x, labels=x).loss


def llama(size: Size, device: str) -> tuple[Any, Any]:
    """Returns Llama of transformers: a quarter of the heads have keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        intermediate_size=3 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 4,
        max_position_embeddings=size["time"],
        use_cache=False,
    )
    x = tokens(size, device)
    return LlamaForCausalLM(config), lambda model: model(input_ids=x, labels=x).loss


def bert(size: Size, device: str) -> tuple[Any, Any]:
    """Returns BERT of transformers on padded sentences, with a sixth of the tokens masked."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=4 * size["width"],
        max_position_embeddings=size["time"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    x, time_ = tokens(size, device), size["time"]
    lengths = torch.randint(time_ // 2, time_, (size["batch"], 1), device=device)
    index = torch.arange(time_, device=device)[None]
    labels = torch.where((index % 6 == 0) & (index < lengths), x, -100)
    given = {
        "attention_mask": (index < lengths).long(),
        "token_type_ids": (index > lengths // 2).long(),
        "labels": labels,
    }
    return BertForMaskedLM(config), lambda model: model(input_ids=x, **given).loss


def images(size: Size, device: str) -> tuple[Any, Any]:
    shape = (size["batch"], 3, size["pixels"], size["pixels"])
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    return x, torch.randint(0, size["classes"], shape[:1], device=device)


def vit(size: Size, device: str) -> tuple[Any, Any]:
    """Returns the vision transformer of timm that takes the mean of all places."""
    from timm.models.vision_transformer import VisionTransformer

    width = size["width"]
    model = VisionTransformer(
        img_size=size["pixels"],
        patch_size=size["patch"],
        num_classes=size["classes"],
        embed_dim=width,
        depth=size["layers"],
        num_heads=width // (64 if width >= 256 else 16),
        class_token=False,
        global_pool="avg",
    )
    x, labels = images(size, device)
    return model, lambda model: torch.nn.functional.cross_entropy(model(x), labels)


def resnet50(size: Size, device: str) -> tuple[Any, Any]:
    """Returns ResNet-50 of torchvision, or one with its blocks, channels last."""
    from torchvision.models.resnet import Bottleneck, ResNet

    model = ResNet(
        Bottleneck,
        list(size["blocks"]),
        num_classes=size["classes"],
        width_per_group=64,
    )
    x, labels = images(size, device)
    model = model.to(memory_format=torch.channels_last)
    return model, lambda model: torch.nn.functional.cross_entropy(model(x), labels)


MODELS = {f.__name__: f for f in (transformer, llama, bert, vit, resnet50)}


class Steps:
    """The steps of one model: all variants train the same weights."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        model, self.loss = MODELS[name](size, device)
        self.model = model.to(device).train()
        self.compiled = torch.compile(self.model)
        fused = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.scaler = torch.amp.GradScaler(device)

    def step(self, variant: str) -> None:
        """Enqueues one step."""
        dtype, _, is_compiled = VARIANTS[variant]
        model = self.compiled if is_compiled else self.model
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=dtype, enabled=dtype is not None):
            loss = self.loss(model)
        if dtype is torch.float16:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()

    def run(self, variant: str, steps: int) -> float:
        """Runs steps and returns their seconds, the wait for the last one included."""
        tf32 = VARIANTS[variant][1]
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(variant)
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self, variant: str) -> int | None:
        """Returns the most bytes that were allocated at a time in one step."""
        if self.device != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.run(variant, 1)
        return torch.cuda.max_memory_allocated()

    def free(self) -> None:
        """Gives back what no tensor holds."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.empty_cache()


def answered(steps: Steps, words: list[str]) -> dict[str, Any]:
    """Returns the answer to one line."""
    verb, variant = words[0], words[1]
    if verb == "prepare":
        return {"compile_s": steps.run(variant, 1)}
    if verb == "run":
        return {"seconds": steps.run(variant, int(words[2]))}
    return {"peak_bytes": steps.peak(variant)}


def main() -> None:
    name, size, device = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    if device == "cuda" and not torch.cuda.is_available():
        answer(absent=f"PyTorch {torch.__version__} sees no GPU")
        return
    try:
        steps = Steps(name, size, device)
    except ImportError as error:
        answer(absent=str(error))
        return
    answer(version=torch.__version__, variants=list(VARIANTS))
    for line in sys.stdin:
        try:
            answer(**answered(steps, line.strip().split("\t")))
        except Exception as error:  # noqa: BLE001 - a variant that fails is a row over there
            answer(error=f"{type(error).__name__}: {error}"[:400])
            steps.scaler = torch.amp.GradScaler(device)
        steps.free()


if __name__ == "__main__":
    main()
