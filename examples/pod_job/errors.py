"""The layout of every error: where and what was got, what is allowed, what to type."""

import difflib
from collections.abc import Iterable


def message(where: str, got: str, *lines: str) -> str:
    """Returns an error's text: where and what was got, then a line each of what would do."""
    return "\n  ".join((f"{where}: {got}", *lines))


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns up to `count` of `known` that look most like `word`, best first."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.5)
