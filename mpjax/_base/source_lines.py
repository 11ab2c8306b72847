"""Finds the user's own source line of an operation, behind the frames of JAX and of libraries."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

JAX = tuple(str(Path(m.__file__ or "").parent) for m in (jax, np))
OURS = str(Path(__file__).parents[1])  # the package
# The file in which mpjax calls a layer of Flax: the user's line is behind it.
WRAPPED = tuple(
    str(Path(OURS, *name.split("/")))
    for name in (
        "_autocast/arguments/nnx_names.py",
        "_flax/linen_modules.py",
        "_flax/nnx_modules.py",
    )
)
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class Line(NamedTuple):
    """A line of a file, or of a cell of a notebook."""

    file: str  # its path; 'In[3]' of a cell
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} ({self.function})"

    @property
    def short(self) -> str:
        """'file.py:12'."""
        return f"{Path(self.file).name}:{self.number}"


class Lines(NamedTuple):
    """The source lines of an operation; None for one that the traceback does not have."""

    user: Line | None  # the innermost that is in no installed package
    library: Line | None  # that of the library that it called, if it called one


@functools.lru_cache(maxsize=8192)
def of(traceback: Any) -> Lines:
    """Returns the user's line of a traceback of JAX, and that of the library that it called.

    A library's line stands for the user's if the traceback has none behind it, as when the
    library's function itself was given to mpjax.
    """
    library: Line | None = None
    for frame in getattr(traceback, "frames", None) or []:
        if is_jax(frame.file_name) or frame.file_name.startswith(WRAPPED):
            continue
        if frame.file_name.startswith(OURS):
            break  # the code that called mpjax did not write the operation
        line = Line(cell(frame.file_name), frame.line_num, frame.function_name)
        if not frame.file_name.startswith(INSTALLED):
            return Lines(line, library)
        library = library or line
    return Lines(library, library)


def is_jax(file: str) -> bool:
    """Whether a file is JAX's, NumPy's or of the interpreter itself."""
    return file.startswith(JAX) or file.startswith("<frozen")


def cell(file: str) -> str:
    """Returns 'In[3]' of the name that IPython gives the code of a cell; any other name itself."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return named[1] if named else file
