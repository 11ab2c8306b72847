"""The options of a train step, and their defaults: what `make_train_step` takes by name."""

import dataclasses
from typing import Any

from mpjax._base.typing import AxisName
from mpjax._scaling.loss_scale import LossScale


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `mpjax.make_train_step`, whose docstring says what each does."""

    loss_scale: LossScale | float | None = None
    has_aux: bool = False
    accumulate: int = 1
    accumulate_axes: Any = 0
    weighted: bool = False
    max_consecutive_skips: int | None = 50
    axis_name: AxisName = None
    donate: bool = True
    rounding: str | None = None
    watch: int | None = None
    lost_updates: bool = False

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        given = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: value for name, (value, default) in given.items() if value != default}
