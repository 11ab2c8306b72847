"""Error texts for keywords that a function does not have: they say what to type here."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from mpjax._base.errors import message, misspelt

F = TypeVar("F", bound=Callable[..., Any])
NO_OTHERS: Mapping[str, str] = MappingProxyType({})
"""No keyword of another library stands for one of the function's."""


def names_keywords(
    names: Mapping[str, str] = NO_OTHERS,
    where: str = "",
    behind: str = "",
    order: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Decorates a function: errors for an unknown keyword or too many arguments say what to type.

    Args:
      names: keywords of other libraries, and which one of the function's stands for each; `{}` in
        that is the value. A key 'keyword=VALUE' is of one value.
      where: the function's name as users write it; `__name__` if empty.
      behind: of a function that returns one: the arguments of that, which may have been given here.
      order: of arguments that another library takes without names: its name, then the keywords.
    """

    def decorate(fun: F) -> F:
        known = inspect.signature(fun).parameters
        caller = where or fun.__name__
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        most = sum(parameter.kind in kinds for parameter in known.values())

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            for name, value in kwargs.items():
                if name not in known:
                    raise TypeError(_unknown_keyword(caller, name, value, names, list(known)))
            if len(args) > most:
                more = len(args) - most
                raise TypeError(_too_many(caller, more, list(known), most, behind, order))
            return fun(*args, **kwargs)

        return wrapped  # type: ignore[return-value]  # of the same signature

    return decorate


def _too_many(
    where: str, more: int, known: list[str], most: int, behind: str, order: tuple[str, ...]
) -> str:
    """Returns the error text for arguments that have no place, only a name."""
    placed, named = known[:most], [f"{name}=" for name in known[most:]]
    placed, most = (placed[1:], most - 1) if placed[:1] == ["self"] else (placed, most)
    got = f"takes {', '.join(placed) or 'nothing'} without a name; got {most + more} arguments."
    allowed = [f"Allowed, by name: {', '.join(named)}."] * bool(named)
    fix = f"Type {where}({', '.join((*placed, named[0]))}...)." if named else "Drop the others."
    if behind:
        fix = f"Type {where}({', '.join(placed)}){behind}: the function that it returns takes them."
    elif more < len(order):
        typed = ", ".join((*placed, *order[1 : more + 1]))
        fix = f"For the order of {order[0]}, type {where}({typed})."
    return message(where, got, *allowed, fix)


def _unknown_keyword(
    where: str, name: str, value: Any, names: Mapping[str, str], known: list[str]
) -> str:
    allowed = [parameter for parameter in known if parameter != "self"]
    meant = names.get(name, "".join(misspelt(name, allowed)))
    said = getattr(value, "name", value)  # of an enum; an array would be read from its device
    said = said if isinstance(said, (str, int, float)) else "..."
    meant = names.get(f"{name}={said}", meant)
    is_keyword = meant.replace(" and ", "").isidentifier()
    if is_keyword and not {*meant.split(" and ")} <= {*allowed}:
        meant = ""  # of another function of the table
    if (name == "enabled" and value is True) or meant.startswith("nothing"):
        fix = f"Drop {name}={meant.removeprefix('nothing') * meant.startswith('nothing')}."
    elif meant:
        meant = meant.replace("'bf16-mixed'", repr(mixed_with(value))).replace("{}", str(said))
        typed = f"{meant.replace(' and ', '= and ')}=" if is_keyword else meant
        fix = f"Type {typed} instead of {name}=."
    else:
        fix = f"Drop {name}=."
    return message(
        where, f"unknown keyword {name}=.", f"Allowed: {', '.join(allowed) or 'none'}.", fix
    )


def mixed_with(dtype: Any) -> str:
    """Returns the name of the mixed policy of a dtype: '16-mixed' of `jnp.float16`."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    last = name.rpartition(".")[2].lower()  # torch.float16 prints as its full name
    if last in ("float16", "half", "fp16", "f16", "16-mixed", "mixed_float16"):
        return "16-mixed"
    return "32-true" if last in ("float32", "fp32", "f32") else "bf16-mixed"
