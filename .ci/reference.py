"""Builds the API reference from the docstrings into a folder; a warning is an error."""

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import mpjax


def public_modules() -> list[str]:
    """Returns the modules that a user imports by name, without private parts and `__main__`."""
    found = pkgutil.walk_packages(mpjax.__path__, prefix="mpjax.")
    names = [module.name for module in found]
    return ["mpjax", *(n for n in names if not any(p.startswith("_") for p in n.split(".")))]


def main(folder: Path) -> None:
    """Writes one page a module, and an index of all words, into `folder`."""
    warnings.simplefilter("error")
    # pdoc reads a module's dictionary: names that are imported at their first use must be in it.
    for name in mpjax.__all__:
        setattr(mpjax, name, getattr(mpjax, name))
    pdoc.render.configure(docformat="google")
    modules = public_modules()
    pdoc.pdoc(*modules, output_directory=folder)
    print(f"{len(modules)} modules in {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
