"""Prints the modules that a user imports by name: those without a leading underscore."""

import pkgutil

import mpjax


def public_modules() -> list[str]:
    """Returns the dotted names, the package first, without private parts and `__main__`."""
    found = pkgutil.walk_packages(mpjax.__path__, prefix="mpjax.")
    names = [module.name for module in found]
    return ["mpjax", *(n for n in names if not any(p.startswith("_") for p in n.split(".")))]


if __name__ == "__main__":
    print("\n".join(public_modules()))
