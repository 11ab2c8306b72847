"""How Sphinx builds these pages; `make docs` writes them into site/, a warning is an error."""

import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref

import mpjax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import inventory  # noqa: E402
import operations  # noqa: E402

project = "mpjax"
release = mpjax.__version__
copyright = "Apache-2.0"
html_title = f"mpjax {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # [source] beside each entry of the reference
    "sphinx_copybutton",
]
exclude_patterns = ["*.py"]

# -- pages: Markdown that reads well as a file too -------------------------------------------------

myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

copybutton_prompt_text = r">>> |\.\.\. |\$ "  # prompts are not copied, nor what a command prints
copybutton_prompt_is_regexp = True

# -- reference: the docstrings ---------------------------------------------------------------------

autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True  # `jnp.float32`, not what it prints as
napoleon_custom_sections = ["Dtypes", "Transforms"]
napoleon_use_rtype = False
python_display_short_literal_types = True

# Links to JAX's documentation need no network: inventory.py has the addresses of the names that
# these pages use.
# With MPJAX_DOCS_ONLINE=1 Sphinx reads the inventories of JAX, Flax and optax themselves.
_SITES = {
    "jax": "https://docs.jax.dev/en/latest/",
    "flax": "https://flax.readthedocs.io/en/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
}
if os.environ.get("MPJAX_DOCS_ONLINE"):
    intersphinx_mapping = {name: (site, None) for name, site in _SITES.items()}
else:
    intersphinx_mapping = {
        name: (_SITES[name], str(path))
        for name, path in inventory.write(HERE / "_inventories").items()
    }


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


def write_operations(app: Any) -> None:
    """Writes the page of all operations, if autocast's table has changed."""
    if not operations.PAGE.exists() or operations.PAGE.read_text() != operations.page():
        operations.PAGE.write_text(operations.page())


_NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)
# Bare names: those of `mpjax` itself, then those that one module alone has.
_BARE = {name: f"mpjax.{name}" for name in mpjax.__all__}
for _name in ("numerics", "optim", "pods", "testing", "linen", "nnx"):
    for _public in importlib.import_module(f"mpjax.{_name}").__all__:
        _BARE.setdefault(_public, f"mpjax.{_name}.{_public}")
_SHORT = {"jnp": "jax.numpy", "lax": "jax.lax", "numerics": "mpjax.numerics", "nnx": "flax.nnx"}


def link_names(app: Any, doctree: nodes.document) -> None:
    """Makes `mpjax.autocast(fun)` in a text a link to the reference, and `jax.jit` one to JAX's."""
    for literal in list(doctree.findall(nodes.literal)):
        name = _full_name(literal.astext())
        if name is None or _is_inside(literal, (nodes.title, nodes.reference, pending_xref)):
            continue
        link = pending_xref(
            "", refdomain="py", reftype="obj", reftarget=name, refexplicit=True, refwarn=False
        )
        literal.replace_self(link)
        link += literal


def _full_name(text: str) -> str | None:
    """Returns 'mpjax.autocast' of 'autocast(fun, policy)'; None of what names nothing public."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = match[1]
    first, _, rest = name.partition(".")
    if rest and first in _SHORT:
        return f"{_SHORT[first]}.{rest}"
    if not rest:
        return _BARE.get(name)
    return name if first in ("mpjax", *_SITES) else None


def _is_inside(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def defining_module(app: Any, module: str, name: str) -> str | None:
    """Returns the module whose file has a public class; its `__module__` is what users import.

    None for all else: Sphinx knows it by `__module__`.
    """
    cls = getattr(importlib.import_module(module), name.partition(".")[0], None)
    if not isinstance(cls, type) or not cls.__module__.startswith("mpjax"):
        return None
    statement = re.compile(rf"^class {cls.__name__}\b", re.MULTILINE)
    for known in [cls.__module__, *sorted(n for n in sys.modules if n.startswith("mpjax."))]:
        loaded = sys.modules[known]
        is_in = getattr(loaded, cls.__name__, None) is cls and loaded.__file__ is not None
        if is_in and statement.search(Path(str(loaded.__file__)).read_text()):
            return known
    return None


def repair_back_links(app: Any, env: Any) -> None:
    """Lets [docs] beside a source lead to the page that has the name which Sphinx looks for."""
    objects = env.get_domain("py").objects
    for entry in getattr(env, "_viewcode_modules", {}).values():
        for name in entry[2] if entry else ():
            target = objects.get(f"{entry[3]}.{name}")
            if target is not None:
                entry[2][name] = target.docname


_NAMES = re.compile(r"'32-true'( \| '[^']*')*")


def shorten_policies(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returned: Any
) -> tuple[Any, Any]:
    """Writes `str` in signatures, in place of the twenty names that an editor completes."""
    return signature and _NAMES.sub("str", signature), returned


_TABLE = re.compile(r"\[(`benchmarks/results/[^`]+`)\]\([^)]+\)")


def unlink_tables(_app: Any, _name: str, source: list[str]) -> None:
    """Leaves the name of a table's file without its link: the built page has the table itself."""
    source[0] = _TABLE.sub(r"\1", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", unlink_tables)
    app.connect("viewcode-follow-imported", defining_module)
    app.connect("env-updated", repair_back_links)
    app.connect("autodoc-process-signature", shorten_policies)
    app.connect("builder-inited", write_operations)
    app.connect("doctree-read", link_names)
    app.connect("autodoc-skip-member", skip_field_numbers)
    app.connect("builder-inited", write_module_pages)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon
