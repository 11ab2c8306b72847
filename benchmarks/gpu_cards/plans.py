"""Which networks at which sizes the cards measure, and which cards there are."""

import dataclasses

from .clock import Patience

CARDS = {
    0: "ceilings: copies and large products",
    1: "right: gradients, skips, roundings, 8-bit products on the device",
    2: "the step: float32, cast by hand, autocast",
    3: "beside PyTorch: models that others wrote",
    4: "hints by the clock",
    5: "8 bits: float8 and int8 beside bfloat16",
    6: "optimizers: the update's time",
    7: "overheads: loss scale, watching, diagnosing",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `--size` chooses."""

    size: str
    steps: dict[str, str]  # card 2: network and its size
    peers: dict[str, str]  # card 3
    right: tuple[str, ...]  # card 1: networks, all tiny: their gradients are compared with float64
    seeds: int
    hints: dict[str, str]  # card 4: all on against all off
    hint_size: str  # of one at a time
    single_hints: tuple[str, ...] | None  # which one at a time; None for all
    eight_bits: dict[str, str]  # card 5
    optimizer_shape: tuple[int, ...]  # card 6: of the matrices that are updated
    most_forms: int | None
    overheads: dict[str, str]  # card 7
    copy_bytes: int  # card 0
    product: int
    patience: Patience
    first_s: float  # about what the first job of a card takes


_GPU_STEPS = {
    "transformer": "large",
    "llama": "large",
    "bert": "large",
    "vit": "large",
    "resnet50": "large",
    "unet": "full",
    "lstm": "full",
    "mlp": "full",
}
PLANS = {
    "full": Plan(
        size="full",
        steps=_GPU_STEPS,
        peers={n: s for n, s in _GPU_STEPS.items() if n not in ("unet", "lstm", "mlp")},
        right=tuple(_GPU_STEPS),
        seeds=4,
        hints={**_GPU_STEPS, "transformer": "full", "bert": "full"},
        hint_size="medium",
        single_hints=None,
        eight_bits={"transformer": "wide", "llama": "large"},
        optimizer_shape=(16, 4096, 4096),
        most_forms=None,
        overheads={"transformer": "full", "mlp": "full"},
        copy_bytes=2**31,
        product=8192,
        patience=Patience(),
        first_s=45.0,
    ),
    "tiny": Plan(
        size="tiny",
        steps={"transformer": "tiny", "mlp": "tiny"},
        peers={"transformer": "tiny"},
        right=("transformer", "mlp"),
        seeds=2,
        hints={"mlp": "tiny"},
        hint_size="tiny",
        single_hints=("merged",),
        eight_bits={"mlp": "tiny"},
        optimizer_shape=(2, 128, 128),
        most_forms=3,
        overheads={"mlp": "tiny"},
        copy_bytes=2**22,
        product=256,
        patience=Patience(sample_s=0.01, samples=3),
        first_s=10.0,
    ),
}
