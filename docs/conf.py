"""How Sphinx builds these pages; `make docs` writes them into site/, a warning is an error."""

import pkgutil
import re
from pathlib import Path
from typing import Any

import mpjax

HERE = Path(__file__).parent

project = "mpjax"
release = mpjax.__version__
copyright = "Apache-2.0"
html_title = f"mpjax {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["*.py"]

# -- pages: Markdown that reads well as a file too -------------------------------------------------

myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# -- reference: the docstrings ---------------------------------------------------------------------

autodoc_typehints = "none"  # in words, under Args
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True  # `jnp.float32`, not what it prints as
napoleon_custom_sections = ["Dtypes", "Transforms"]
napoleon_use_rtype = False
python_display_short_literal_types = True


def modules() -> list[str]:
    """Returns the modules that users import by name, without private parts and `__main__`."""
    found = pkgutil.walk_packages(mpjax.__path__, prefix="mpjax.")
    names = [module.name for module in found]
    return [name for name in names if not any(part.startswith("_") for part in name.split("."))]


def write_module_pages(app: Any) -> None:
    """Gives each of them a page; a file that would not change is left alone."""
    folder = HERE / "api" / "modules"
    folder.mkdir(exist_ok=True)
    wanted = {folder / f"{name}.md": module_page(name) for name in modules()}
    for path in set(folder.glob("*.md")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def module_page(name: str) -> str:
    return f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n"


def as_restructured_text(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: Any
) -> None:
    """Docstrings write `code` as Markdown does, plurals (`Array`s) and underscores included."""
    lines[:] = [line if ">>>" in line else _inline(line) for line in lines]


def _inline(line: str) -> str:
    parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
    for i, part in enumerate(parts):
        if i % 2:
            glued = "\\ " if parts[i + 1][:1].isalnum() else ""
            parts[i] = f"``{part.strip('`')}``{glued}"
        else:
            parts[i] = part.replace("*", "\\*")
    return "".join(parts)


def skip_field_numbers(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """A named tuple's fields are in its signature; "Alias for field number 0" says nothing more."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", skip_field_numbers)
    app.connect("builder-inited", write_module_pages)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon
