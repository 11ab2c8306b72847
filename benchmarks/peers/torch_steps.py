"""Gradient steps of PyTorch, run in an interpreter that has it, one at a time and on request.

    python torch_steps.py transformer '{"batch": 4, ...}'

reads names of variants from standard input, runs one step of that variant, answers its seconds.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    """Pre-normalised attention and gelu layers, as in `networks/_transformer.py`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream behind this block."""
        y = self.norm1(x)

        def project(layer: nn.Linear) -> torch.Tensor:
            return layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = project(self.query), project(self.key), project(self.value)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(y)


class Decoder(nn.Module):
    """Learned positions, blocks, the embedding table as the output layer."""

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        width = size["width"]
        self.table = nn.Embedding(size["vocab"], width)
        self.places = nn.Parameter(0.02 * torch.randn(size["time"], width))
        nn.init.normal_(self.table.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, size["heads"]) for _ in range(size["layers"])))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        x = self.blocks(self.table(tokens) + self.places)
        return nn.functional.linear(self.norm(x), self.table.weight)


def transformer(size: dict[str, int]) -> Step:
    """Returns a step of the decoder's loss and gradients."""
    model = Decoder(size)
    tokens = torch.randint(0, size["vocab"], (size["batch"], size["time"] + 1))
    return step(model, tokens[:, :-1], tokens[:, 1:])


def mlp(size: dict[str, int]) -> Step:
    """Returns a step of the perceptron's loss and gradients."""
    widths = [size["inputs"], *[size["width"]] * size["depth"]]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], size["classes"]))
    x = torch.randn(size["batch"], size["inputs"])
    return step(model, x, torch.randint(0, size["classes"], (size["batch"],)))


def step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Step:
    """Returns a function that computes the loss, and gradients from nothing."""

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        logits = model(x).flatten(0, -2)
        loss = nn.functional.cross_entropy(logits, labels.flatten())
        loss.backward()
        return loss

    return run


def low(run: Step, dtype: torch.dtype) -> Step:
    """Returns the step with its forward pass under autocast; backward follows its dtypes."""

    def cast() -> torch.Tensor:
        # Backward inside, too: it runs in the dtypes that forward chose either way.
        with torch.autocast("cpu", dtype=dtype):
            return run()

    return cast


def main() -> None:
    network, size = sys.argv[1], json.loads(sys.argv[2])
    run = {"mlp": mlp, "transformer": transformer}[network](size)
    variants = {
        "torch f32": run,
        "torch autocast bf16": low(run, torch.bfloat16),
        "torch autocast f16": low(run, torch.float16),
    }
    print(torch.__version__, torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        variants[line.strip()]()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
