"""Exceptions and warnings of mpjax, and the one layout that their messages share."""

import contextlib
import difflib
from collections.abc import Generator, Iterable

from mpjax._base.public import public


@public
class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a non-finite gradient; raised by `raise_if_diverged`."""


@public
class SupportWarning(UserWarning):
    """A precision works on this accelerator but is slow there, or gains nothing."""


@public
class PolicyWarning(UserWarning):
    """A policy does something that its author probably did not mean, such as matching nothing."""


def message(where: str, got: str, *lines: str) -> str:
    """Returns an error text: where and what was got, then what is allowed and what to type.

    Args:
      where: the function, argument or path at fault, as the user writes it.
      got: the fault, in one sentence.
      *lines: the allowed values, then the code to type; each becomes an indented line.
    """
    return "\n  ".join((f"{where}: {got}", *lines))


@contextlib.contextmanager
def needed_by(module: str) -> Generator[None]:
    """Names the package to install if an import of a module of mpjax fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        got = f"needs {library}, which is not installed."
        fix = f"Type pip install {library}, or in a checkout pip install -e '.[{library}]'."
        raise ModuleNotFoundError(message(module, got, fix), name=error.name) from None


def nearest(word: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Returns up to `count` of `known` that look most like `word`, best first, case ignored.

    The `cutoff` is the share of letters that have to agree, from 0 to 1.
    """
    by_lower: dict[str, str] = {}
    for name in known:
        by_lower.setdefault(name.lower(), name)
    close = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=cutoff)
    return [by_lower[name] for name in close]
