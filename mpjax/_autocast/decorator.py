"""The decorator that `autocast(policy)` returns, and the message for one used in a `with`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpjax._base.errors import message
from mpjax._base.foreign_names import DEVICES

_WHY = (
    "A block cannot reach what jax.jit has traced already, nor a function that comes from a cache "
    "in it: half of a step would be in low precision, without a word."
)


class Decorator:
    """Maps a function to the same function under autocast, as `@autocast(policy)` does."""

    def __init__(self, decorate: Callable[[Any], Any], policy: Any) -> None:
        self._decorate = decorate
        self._policy = policy

    def __call__(self, fun: Any) -> Any:
        """Returns `fun` under autocast."""
        return self._decorate(fun)

    def __repr__(self) -> str:
        return f"<mpjax.autocast({self._shown}), a decorator>"

    @property
    def _shown(self) -> str:
        return "" if self._policy is None else repr(getattr(self._policy, "name", "bf16-mixed"))

    def _refuse(self, *_: Any) -> NoReturn:
        policy = self._shown or "'bf16-mixed'"
        got = f"`with autocast({self._shown}):` is no context manager."
        fix = f"Type @mpjax.autocast({policy}) above the function, or mpjax.autocast(fun, {policy})"
        fix += f"(*args); for a whole step mpjax.make_train_step(loss_fn, tx, {policy})."
        island = "Inside of it, `with mpjax.full_precision():` keeps operations in float32."
        raise TypeError(message("autocast", got, _WHY, fix, island))

    __enter__ = __exit__ = __aenter__ = __aexit__ = _refuse


def refuse_device(first: Any, policy: Any) -> None:
    """Raises TypeError for a device as the first argument: `autocast("cuda")`, as in PyTorch."""
    if not (isinstance(first, str) and first.partition(":")[0].lower() in DEVICES):
        return
    name = getattr(policy, "__name__", None) or getattr(policy, "name", None) or str(policy)
    meant = "16-mixed" if name.rpartition(".")[2] in ("float16", "half") else "bf16-mixed"
    got = f"got {first!r}, a device, where the policy is named: JAX puts a computation where its "
    got += "arrays are."
    fix = f"Type @mpjax.autocast({meant!r}) above the function, or mpjax.autocast(fun, {meant!r})."
    raise TypeError(
        message("autocast", got, "Allowed: autocast(policy), autocast(fun, policy).", fix)
    )
