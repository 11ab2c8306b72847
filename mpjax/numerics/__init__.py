"""Where inf and NaN come from, where precision is lost, and which layers to keep in float32."""

from mpjax.numerics._diagnose import diagnose
from mpjax.numerics._report import Cause, Report, Row

__all__ = ["Cause", "Report", "Row", "diagnose"]


def __dir__() -> list[str]:
    return __all__
