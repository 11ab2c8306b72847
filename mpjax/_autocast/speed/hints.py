"""What is done for speed alone: for which platform, and what it saves there. Each can be deleted.

No hint decides what is low, or what is right. `benchmarks/ablation.py` leaves out one at a time and
writes what is lost; a hint that saves less than 2 % on two networks goes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Hint:
    """A row of the table: what a hint is for."""

    name: str
    platforms: str
    gain: str  # bytes accessed, or temporaries, of what they are without it


_ROWS = """
read_twice            | gpu, tpu | unet .81, densenet .88, vgg .93; temporaries unet .78, vgg .94
read_exactly          | all      | graph .92, conformer .93; temporaries mlp .70, graph .85
picked                | all      | transformer .90, gemma .91, llama .92; temporaries gru .50
merged                | all      | gru .89; temporaries lstm .75, gru .94
summed_apart          | gpu, tpu | unet .96, ddpm .96
added_to_convolutions | gpu      | unet .87, ddpm .93, vgg .98; temporaries unet .84, ddpm .85
held_low              | gpu      | efficientnet .94, gemma .96, resnet50 .97; temporaries gemma .86
activated             | gpu, tpu | critic .90, unet3d .95; temporaries .86, resnet50 .92
stored_cotangent      | gpu, tpu | as activated; pixelcnn .85, wavenet .87, densenet .89, dit .91
moved_low             | tpu      | lstm .87, scanned_transformer .98; temporaries 1.13
copied_last           | tpu      | unet .93, ddpm .98; temporaries unet .85
moved_again           | tpu      | ddpm .64, unet .66; temporaries unet .35, ddpm .51
read_in_parts         | tpu      | wavenet .57, pixelcnn .62; temporaries .37, .06
chosen_wide           | tpu      | graph .80, messages .85; temporaries .82, .84
recomputed            | all      | lstm .56, mamba .56, gru .90; temporaries lstm .42, mlp 1.11
centred               | all      | unet .96, resnet50 .97, vgg .97, ddpm .97; temporaries unet .96
shifted_apart         | gpu      | ddpm .90, unet .92, efficientnet .95; temporaries ddpm .90
read_low              | gpu      | in float8 vit .97, transformer .98; temporaries vit .84
spread_scales         | gpu      | in int8 gated .83, vit .86, transformer .91; temporaries vit .88
multiplied_alone      | gpu      | in float8 llama .90, gemma .92, vit .93; temporaries llama .89
pooled                | gpu      | vgg .67, resnet50 .95; temporaries vgg .82, resnet50 1.01
kept_apart            | all      | vit .94, gated .94; temporaries vit .76, gemma .81
curves_apart          | gpu      | pixelcnn .90, wavenet .91, dit .94; temporaries critic .75
smaller_first         | gpu      | temporaries graph .92, wavenet .94, resnet50 .94; its bytes 1.02
attended              | gpu, tpu | llama .59, transformer .74, bert .75; temporaries .68, .65, .59
rows_apart            | gpu      | bert .98, transformer .98, vit .99; of size full .97, .96, .98
"""
HINTS = {
    name: Hint(name, platforms, gain)
    for name, platforms, gain in (map(str.strip, row.split("|")) for row in _ROWS.split("\n")[1:-1])
}
FUNCTIONS: dict[str, Callable[..., object]] = {}
"""Those of the rows, by name."""

_left_out: set[str] = set()


def hint(name: str, otherwise: Callable[..., object]) -> Callable[[Function], Function]:
    """Returns a decorator for the function of a row; without the row `otherwise` is called."""

    def decorate(fun: Function) -> Function:
        FUNCTIONS[HINTS[name].name] = fun

        @functools.wraps(fun)
        def run(*args: object, **kwargs: object) -> object:
            return (otherwise if name in _left_out else fun)(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def without(name: str) -> Generator[None]:
    """Leaves out a hint, to measure it, in what is traced and lowered inside."""
    _left_out.add(HINTS[name].name)
    try:
        yield
    finally:
        _left_out.discard(name)
