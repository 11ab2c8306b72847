"""The table of layers: `test_layers.py` holds the package to it, `docs/design.md` shows it.

`python tests/project/_layers.py` writes it into that page.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mpjax"
PAGE = PACKAGE.parent / "docs" / "design.md"

# One row a layer; each file or folder stands in one. A file imports only from rows above its own.
LAYERS = (
    ("_base",),
    ("_jaxpr", "_policies"),
    ("_flax", "_hardware", "_scaling"),
    ("_autocast/arguments", "_autocast/decorator", "_autocast/known"),
    ("_autocast/decide",),
    ("_autocast/copies", "_autocast/speed"),
    ("_autocast/arrange", "_autocast/product"),
    ("_autocast/attention", "_autocast/eight_bits"),
    ("_autocast/planning", "_autocast/unused"),
    ("_autocast/run", "_autocast/tracing"),
    ("_autocast/api",),
    ("_autocast/why", "_autocast/with_history"),
    ("_autocast/__init__",),
    ("_low_precision", "_weights"),
    ("_training",),
    ("linen", "numerics", "optim"),
    ("_doctor", "pods", "testing", "train"),
    ("nnx",),
    ("__init__",),
    ("__main__",),  # the command line is a user of the public names
)
ROOMS = {unit.partition("/")[0] for row in LAYERS for unit in row if "/" in unit}
"""Folders whose own files and folders have rows."""


def purpose(unit: str) -> str:
    """Returns the first sentence of the docstring of a file or folder of the package."""
    folder = PACKAGE / unit / "__init__.py"
    text = (folder if folder.exists() else PACKAGE / f"{unit}.py").read_text()
    words = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
    return words.rstrip(".")


def table() -> str:
    """Returns the table in Markdown."""
    rows = [f"| `{unit}` | {purpose(unit)} |" for row in LAYERS for unit in row]
    return "\n".join(["| file or folder | what it is for |", "| --- | --- |", *rows])


def page() -> str:
    """Returns the page with the table as it should stand in it."""
    head, mark, rest = PAGE.read_text().partition("| file or folder | what it is for |\n")
    return head + table() + "\n" + re.sub(r"\A(\|.*\n)+", "", rest) if mark else head


if __name__ == "__main__":
    PAGE.write_text(page())
