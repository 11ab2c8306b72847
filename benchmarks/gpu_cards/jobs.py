"""The jobs of a card: each is prepared in threads, and measured while nothing else runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
FAILURES = ("error", "absent", "out_of_memory")


@dataclasses.dataclass(frozen=True)
class Job:
    """Rows that are measured together: the variants of one network, in turns."""

    card: int
    network: str
    size: str
    variants: tuple[str, ...]
    # What takes the host: tracing, compiling, starting another interpreter. By name, in threads.
    prepare: dict[str, Callable[[], Any]]
    # What takes the device: gets for each name what was prepared, or the exception it raised.
    measure: Callable[[dict[str, Any]], dict[str, Row]]
    code: str  # a hash of what the rows depend on
    seconds: float  # about how long, to say what no longer fits
    load: int = (
        1  # how many threads' worth each `prepare` is: what takes memory is not prepared early
    )


def attempted(fun: Callable[[], Any]) -> Any:
    """Returns what the function returns, or the exception that it raised: that makes a row."""
    try:
        return fun()
    except Exception as error:  # noqa: BLE001 - whatever one variant raises, the others are measured
        return error


def failed(error: Exception) -> Row:
    """Returns the row of what raised: short memory is a finding, all else is to be mended."""
    text = f"{type(error).__name__}: {error}"
    short = any(words in text.lower() for words in ("resource_exhausted", "out of memory"))
    return {"out_of_memory" if short else "error": " ".join(text.split())[:400]}


def is_settled(row: Row | None, code: str, run: int) -> bool:
    """Returns whether a row stands: measured with this code, or tried in this run already."""
    if row is None or row["code"] != code:
        return False
    return row["run"] == run or not ("error" in row or "absent" in row)
