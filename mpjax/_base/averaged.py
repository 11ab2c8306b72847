"""The axes over which gradients will be averaged, while the loss function is traced."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator

from mpjax._base import compat
from mpjax._base.typing import AxisName

_axes: contextvars.ContextVar[tuple[tuple[object, ...], str]] = contextvars.ContextVar(
    "axes", default=((), "")
)


@contextlib.contextmanager
def averaged_over(axis_name: AxisName, where: str) -> Generator[None]:
    """Notes the axes, if any, for what is traced inside, and the function that averages."""
    names = compat.axis_names(axis_name)
    token = _axes.set((names, where) if names else _axes.get())
    try:
        yield
    finally:
        _axes.reset(token)


def step_without(axis: object) -> str:
    """Returns what to type where gradients are reduced over an axis already: an own step."""
    return (
        "Take gradients with mpjax.value_and_grad(loss_fn, loss_scale=...), without axis_name, and "
        f"update with mpjax.with_loss_scale(tx, axis_name={axis!r})."
    )


def averaging() -> tuple[tuple[object, ...], str]:
    """Returns the axes over which gradients will be averaged here, and by which function."""
    return _axes.get()
