"""Finds the line of the user's own code that raised an error: the last outside of libraries."""

import sysconfig
import traceback
from pathlib import Path

import jax

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of JAX where a function that it traces asks for the value of an array."""
_INSTALLED = ("stdlib", "purelib", "platlib")


def users_line(error: BaseException, file: str = "") -> list[str]:
    """Returns the last line of the user's own code in a traceback, as a line of a message.

    Args:
      error: the exception.
      file: the file to look in first; without it, all files that are in no installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return [f"At {Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"]
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(__file__).parents[1]), "<frozen", *map(sysconfig.get_path, _INSTALLED))
    own = [f for f in frames if f.filename == file]
    own = own or [f for f in frames if not f.filename.startswith(libraries)]
    return [f"At {Path(f.filename).name}:{f.lineno}: {f.line}" for f in own[-1:]]
