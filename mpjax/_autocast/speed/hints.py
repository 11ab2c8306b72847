"""The table of hints, which exist for speed alone: each row can be deleted.

A row says of which kind it is, for which platforms, and how much it saves there. The kinds:

- cut: a low value is stored, and so rounded, where it is read. The decided dtypes do not change.
- mark: a backend is told where to store a value, and in which dtype. On a CPU no bit changes.
- way: the same value, or its derivative, is computed by other operations.
- around: the operands of a product are prepared otherwise where it is lowered.

`tests/autocast/speed/test_autocast_modes.py` tests each kind's sentence, and runs autocast without
any row.
`benchmarks/ablation.py` leaves out one row at a time and writes the loss; a hint that saves less
than 2 % on two networks is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Hint:
    """A row of the table."""

    name: str
    kind: str
    platforms: str
    measured: str  # jaxlib version and date: each row works around one compiler
    gain: str  # bytes accessed, or temporaries, as a fraction of those without the hint


_ROWS = """
read_twice            | cut    | gpu, tpu | 0.12.0.1 2026-11-26 |
    unet .81, densenet .88, vgg .93; temporaries unet .78, vgg .94
read_exactly          | cut    | all      | 0.12.0.1 2026-11-26 |
    graph .92, conformer .93; temporaries mlp .70, graph .85
picked                | way    | all      | 0.12.0.1 2026-11-26 |
    gemma .89, transformer .90, llama .92; temporaries gru .50
merged                | cut    | all      | 0.12.0.1 2026-11-26 |
    gru .89; temporaries lstm .75, gru .94
summed_apart          | mark   | gpu, tpu | 0.12.0.1 2026-11-26 |
    unet .96, ddpm .96
added_to_convolutions | mark   | gpu      | 0.12.0.1 2026-11-26 |
    unet .87, ddpm .93, vgg .98; temporaries unet .84, ddpm .85
held_low              | mark   | gpu      | 0.12.0.1 2026-11-26 |
    efficientnet .94, resnet50 .97, gemma .99
activated             | mark   | gpu, tpu | 0.12.0.1 2026-11-26 |
    critic .90, unet3d .95; temporaries .86, resnet50 .92
stored_cotangent      | mark   | gpu, tpu | 0.12.0.1 2026-11-26 |
    as activated; pixelcnn .85, wavenet .87, densenet .89, dit .91
moved_low             | way    | tpu      | 0.12.0.1 2026-11-26 |
    lstm .87, scanned_transformer .98; temporaries 1.13
copied_last           | cut    | tpu      | 0.12.0.1 2026-11-26 |
    unet .93, ddpm .98; temporaries unet .85
moved_again           | way    | tpu      | 0.12.0.1 2026-11-26 |
    ddpm .64, unet .66; temporaries unet .35, ddpm .51
read_in_parts         | way    | tpu      | 0.12.0.1 2026-11-26 |
    wavenet .57, pixelcnn .62; temporaries .37, .06
chosen_wide           | way    | tpu      | 0.12.0.1 2026-11-26 |
    graph .80, messages .85; temporaries .82, .84
recomputed            | mark   | all      | 0.12.0.1 2026-11-26 |
    lstm .56, mamba .56, gru .90; temporaries lstm .42, mlp 1.11
centred               | way    | all      | 0.12.0.1 2026-11-26 |
    unet .96, resnet50 .97, vgg .97, ddpm .97; temporaries unet .96
shifted_apart         | way    | gpu      | 0.12.0.1 2026-11-26 |
    ddpm .90, unet .92, efficientnet .95; temporaries ddpm .90
read_low              | around | gpu      | 0.12.0.1 2026-11-26 |
    in float8 vit .97, transformer .98; temporaries vit .84
spread_scales         | around | gpu      | 0.12.0.1 2026-11-26 |
    in int8 gated .83, vit .86, transformer .91; temporaries vit .88
multiplied_alone      | around | gpu      | 0.12.0.1 2026-11-26 |
    in float8 llama .90, gemma .92, vit .93; temporaries llama .89
pooled                | way    | gpu      | 0.12.0.1 2026-11-26 |
    vgg .67, resnet50 .95; temporaries vgg .82, resnet50 1.01
kept_apart            | mark   | all      | 0.12.0.1 2026-11-26 |
    vit .94, gated .94; temporaries vit .76, gemma .94
curves_apart          | way    | gpu      | 0.12.0.1 2026-11-26 |
    pixelcnn .90, wavenet .91, dit .94; temporaries critic .75
smaller_first         | around | gpu      | 0.12.0.1 2026-11-26 |
    temporaries graph .92, wavenet .94, resnet50 .94; its bytes 1.02
attended              | way    | gpu, tpu | 0.12.0.1 2026-11-26 |
    llama .59, transformer .74, bert .75; temporaries .68, .65, .59
rows_apart            | mark   | gpu      | 0.12.0.1 2026-11-26 |
    bert .98, transformer .98, vit .99; of size full .97, .96, .98
passes_apart          | mark   | gpu      | 0.12.0.1 2026-11-26 |
    gemma .92, as Flax writes it .87; temporaries .90, .67
"""
HINTS = {
    row.partition(" ")[0]: Hint(*map(str.strip, row.split("|")))
    for row in re.split(r"\n(?=\w)", _ROWS.strip())
}
FUNCTIONS: dict[str, Callable[..., object]] = {}
"""The functions of the rows, by name."""

_left_out: set[str] = set()


def hint(name: str, otherwise: Callable[..., object]) -> Callable[[Function], Function]:
    """Returns a decorator for a row's function; where the row is left out, `otherwise` runs."""

    def decorate(fun: Function) -> Function:
        FUNCTIONS[HINTS[name].name] = fun

        @functools.wraps(fun)
        def run(*args: object, **kwargs: object) -> object:
            return (otherwise if name in _left_out else fun)(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def without(*names: str) -> Generator[None]:
    """Leaves out hints, to measure them, from programs traced and lowered in the block."""
    added = {HINTS[name].name for name in names} - _left_out
    _left_out.update(added)
    try:
        yield
    finally:
        _left_out.difference_update(added)
