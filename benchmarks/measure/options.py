"""What several benchmarks read from the command line."""

import argparse
from collections.abc import Callable
from typing import Any


def words(allowed: Any) -> Callable[[str], list[str]]:
    """Returns a parser of comma-separated words that are all in `allowed`."""

    def parse(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",")]
        if unknown := [word for word in found if word not in allowed]:
            message = f"unknown: {', '.join(unknown)}; there are {', '.join(allowed)}"
            raise argparse.ArgumentTypeError(message)
        return found

    return parse
