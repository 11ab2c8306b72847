"""Exceptions and warnings of mpjax, and the one layout that their messages share."""

import contextlib
import difflib
import inspect
import os
import re
import warnings
from collections.abc import Generator, Iterable

import jax

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


def warn(text: str, category: type[Warning] = PolicyWarning) -> None:
    """Warns at the user's line: the first one that is neither ours nor JAX's."""
    here = inspect.currentframe()
    frame, level = here and here.f_back, 2
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), jax.__file__)
)


def of_one_width(word: str, known: Iterable[str]) -> list[str]:
    """Returns those of `known` that have the widths of `word`: those with 32 for 'fp32-fast'."""
    widths = _WIDTHS & {*re.findall(r"\d+", word)}
    return [name for name in known if widths <= {*re.findall(r"\d+", name)}]


_WIDTHS = frozenset(("4", "8", "16", "32", "64", "128"))


def misspelt(word: str, known: Iterable[str]) -> list[str]:
    """Returns the name of `known` that `word` is a misspelling of, in a list; an empty one if none.

    Names are compared word by word, as `min_loss_scale` has three: likeness alone would take it for
    `loss_scale`, which means another thing. Neither is `unscale` a misspelt `scale`.
    """
    close = [name for name in known if _is_misspelt(word, name)]
    return nearest(word, close, 1, cutoff=0)


def _is_misspelt(word: str, name: str) -> bool:
    ours, theirs = (_CAPITAL.sub("_", text).lower().split("_") for text in (word, name))
    if len(ours) != len(theirs):  # make_trainstep
        return "".join(ours) == "".join(theirs)
    return all(map(_is_like, ours, theirs))


def _is_like(word: str, name: str) -> bool:
    heads = [_PREFIX.match(text) for text in (word, name)]
    is_same = len({head and head[0] for head in heads}) == 1
    return is_same and difflib.SequenceMatcher(None, word, name).ratio() >= _SAME_WORD


_CAPITAL = re.compile("(?<=[a-z0-9])(?=[A-Z])")  # of the next word, in the name of a class
_PREFIX = re.compile("un|de|re|dis|non")
"""The beginning of a word that gives it another meaning."""
_SAME_WORD = 0.7
"""The share of letters that a word and its misspelling have in common, at least."""
