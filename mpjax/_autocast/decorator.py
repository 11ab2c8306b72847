"""The decorator that `autocast(policy)` returns, and the message for one used in a `with`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from mpjax._base.errors import message
from mpjax._base.foreign_names import DEVICES
from mpjax._base.keywords import mixed_with
from mpjax._policies.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])

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
        named = isinstance(self._policy, Policy)
        return "" if self._policy is None else repr(self._policy.name if named else self._policy)

    def _refuse(self, *_: Any) -> NoReturn:
        policy = self._shown or "'bf16-mixed'"
        got = f"`with autocast({self._shown}):` is no context manager."
        fix = f"Type @mpjax.autocast({policy}) above the function, or mpjax.autocast(fun, {policy})"
        fix += f"(*args); for a whole step mpjax.make_train_step(loss_fn, tx, {policy})."
        island = "Inside of it, `with mpjax.full_precision():` keeps operations in float32."
        raise TypeError(message("autocast", got, _WHY, fix, island))

    __enter__ = __exit__ = __aenter__ = __aexit__ = _refuse


_TORCH = ("device_type", "dtype", "enabled", "cache_enabled")


def refuses_torch(fun: F) -> F:
    """Decorates autocast: `autocast("cuda", dtype=torch.float16)` is answered with what to type."""

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        is_device = isinstance(first, str) and first.partition(":")[0].lower() in DEVICES
        if is_device or isinstance(first, bool) or any(name in kwargs for name in _TORCH):
            raise TypeError(_torch_text(args, kwargs, is_device))
        return fun(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # of the same signature


def _torch_text(args: tuple[Any, ...], kwargs: dict[str, Any], is_device: bool) -> str:
    """Returns the error text for arguments of `torch.autocast`, among them perhaps a device."""
    first = [f"{args[0]!r}, a device" if is_device else repr(args[0])] if args else []
    first = [getattr(args[0], "__name__", "a function")] if callable((*args, 0)[0]) else first
    got = [*first, *(f"{name}=" for name in kwargs)]
    dtype = kwargs.get("dtype", kwargs.get("policy", args[1] if len(args) > 1 else None))
    policy = mixed_with(dtype)
    fix = f"Type @mpjax.autocast({policy!r}) above the function, or "
    fix += f"mpjax.autocast(fun, {policy!r})(*args), instead of torch's arguments."
    is_off = kwargs.get("enabled") is False or args[:1] == (False,)
    off = "Inside of it, `with mpjax.full_precision():` keeps operations in float32."
    if is_off:
        off = "To switch it off, type policy='32-true' for a function, or for a block "
        off += "`with mpjax.full_precision():`."
    return message(
        "autocast",
        f"got {', '.join(got)}: these are arguments of torch.autocast.",
        "Allowed: autocast(policy), autocast(fun, policy); JAX computes where the arrays are.",
        f"It is no context manager. {_WHY}",
        fix,
        off,
    )
