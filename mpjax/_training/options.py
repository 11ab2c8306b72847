"""The options of a train step, and their defaults: what `make_train_step` takes by name."""

import dataclasses
from typing import Any

from mpjax._base.typing import AxisName
from mpjax._scaling.loss_scale import LossScale


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of `mpjax.make_train_step`, whose docstring says what each does."""

    loss_scale: LossScale | float | None = None  # None: that of the policy
    has_aux: bool = False  # whether the loss function returns more than the loss
    accumulate: int = 1  # micro-batches to a step
    accumulate_axes: Any = 0  # of the leaves of the batch, along which it is cut into these
    weighted: bool = False  # whether the loss function returns the weight of its mean, too
    max_consecutive_skips: int | None = 50  # after which the run counts as diverged
    axis_name: AxisName = None  # the axes over which gradients are averaged
    donate: bool = True  # whether a step takes the memory of the state that it is given
    rounding: str | None = None  # how 16-bit parameters are rounded
    watch: int | None = None  # every how many steps statistics are taken
    lost_updates: bool = False  # whether to count updates that rounding loses

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        given = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: value for name, (value, default) in given.items() if value != default}
