"""Finds where inf and NaN come from, where precision is lost, and layers that need float32."""

from typing import TYPE_CHECKING

from mpjax._base.foreign_errors import attributes_of
from mpjax.numerics._compare import Comparison, Errors, compare
from mpjax.numerics._diagnose import diagnose
from mpjax.numerics._exponents import ExponentReport, Spread, exponents
from mpjax.numerics._formats import Histogram, Lost
from mpjax.numerics._losses import lost_updates
from mpjax.numerics._promotions import Promotion, Promotions, find_promotions
from mpjax.numerics._report import Cause, Report, Row
from mpjax.numerics._scalars import to_scalars
from mpjax.numerics._suggest import Suggestion, Tried, suggest

__all__ = [
    "diagnose",
    "exponents",
    "compare",
    "suggest",
    "find_promotions",
    "lost_updates",
    "to_scalars",
    "Report",
    "Cause",
    "Row",
    "ExponentReport",
    "Spread",
    "Histogram",
    "Lost",
    "Comparison",
    "Errors",
    "Suggestion",
    "Tried",
    "Promotions",
    "Promotion",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__)
