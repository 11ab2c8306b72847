"""Counts the values that a dtype of few bits would round to 0 or inf, from their exponents."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mpjax._base.errors import message
from mpjax.numerics._histogram import BINS, HIGHEST, INF, LOWEST, NAN, ZERO


@dataclasses.dataclass(frozen=True)
class Format:
    """The range of a dtype, as exponents of two."""

    name: str
    smallest: int  # of its smallest subnormal number; less than half of it becomes 0
    normal: int  # of its smallest normal number
    largest: int  # of its largest number; 2**(largest + 1) does not fit

    @property
    def zero_below(self) -> int:
        """The exponent below which all becomes 0."""
        return self.smallest - 1


FORMATS = {
    "float16": Format("float16", -24, -14, 15),
    "bfloat16": Format("bfloat16", -133, -126, 127),
    "float8_e4m3fn": Format("float8_e4m3fn", -9, -6, 8),
    "float8_e5m2": Format("float8_e5m2", -16, -14, 15),
}

EXPONENTS = np.arange(LOWEST, HIGHEST + 1)


def format_of(dtype: str, where: str) -> Format:
    """Returns the format of that name.

    Raises:
      ValueError: there is none.
    """
    if dtype in FORMATS:
        return FORMATS[dtype]
    allowed = f"Allowed: {', '.join(map(repr, FORMATS))}."
    raise ValueError(message(where, f"no format {dtype!r}.", allowed))


@dataclasses.dataclass(frozen=True)
class Lost:
    """Shares of the non-zero finite values, under a scale; names as Transformer Engine has them."""

    dtype: str
    scale: float
    underflows: float  # become 0, in percent
    subnormals: float  # lose bits, in percent
    overflows: float  # become inf, or NaN in a dtype without, in percent


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The number of elements of each exponent of two, in an array or several."""

    counts: Any  # i64[277], by exponent from -149
    zeros: int
    inf: int
    nan: int

    @classmethod
    def of_row(cls, row: Any) -> Histogram:
        """Returns the histogram that a row of the instrument holds."""
        whole = np.asarray(np.rint(row), np.int64)
        return cls(whole[:BINS], int(whole[ZERO]), int(whole[INF]), int(whole[NAN]))

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.counts.sum()) + self.zeros + self.inf + self.nan

    @property
    def lowest(self) -> int | None:
        """The exponent of the smallest non-zero magnitude; None where there is none."""
        occupied = np.flatnonzero(self.counts)
        return int(EXPONENTS[occupied[0]]) if occupied.size else None

    @property
    def highest(self) -> int | None:
        """The exponent of the largest finite magnitude; None where all are zero."""
        occupied = np.flatnonzero(self.counts)
        return int(EXPONENTS[occupied[-1]]) if occupied.size else None

    @property
    def dynamic_range(self) -> float:
        """The bits between the largest and the smallest magnitude, to the whole bit."""
        return 0.0 if self.highest is None or self.lowest is None else self.highest - self.lowest

    def lost(self, dtype: str, scale: float = 1.0) -> Lost:
        """Returns the losses of a dtype, of these values, times a scale.

        Exponents decide: values one exponent below the smallest number, at least half of it, round
        up to it, and are counted as kept.

        Args:
          dtype: 'float16', 'bfloat16', 'float8_e4m3fn' or 'float8_e5m2'.
          scale: a factor of the values; taken as a power of two.

        Raises:
          ValueError: there is no such format.
        """
        form = format_of(dtype, "Histogram.lost(dtype)")
        exponents = EXPONENTS + round(np.log2(scale))
        total = max(int(self.counts.sum()), 1)

        def share(which: Any) -> float:
            return 100.0 * float(self.counts[which].sum()) / total

        return Lost(
            form.name,
            float(scale),
            share(exponents < form.zero_below),
            share((exponents >= form.zero_below) & (exponents < form.normal)),
            share(exponents > form.largest),
        )

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.inf + other.inf,
            self.nan + other.nan,
        )
