"""The examples in the docstrings run, and every public name has one."""

import ast
import doctest
import importlib
import inspect
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

PACKAGE = Path(mpjax.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in sorted(PACKAGE.rglob("*.py"))]
POD_JOB = PACKAGE.parent / "examples" / "pod_job"
MODULES += [f"pod_job.{path.stem}" for path in sorted(POD_JOB.glob("*.py"))]


def failures(module):
    """Runs a module's docstring examples; returns how many were tried, and a report of failures.

    An example may use `jax`, `jnp`, `np`, `optax` and `mpjax` without importing them, as text does.
    """
    import optax

    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "mpjax": mpjax}
    report = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    tried = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
        tried += runner.run(test, out=report.append).attempted
    return tried, "".join(report)


@pytest.mark.standard_promotion("users paste examples into a session with JAX's defaults")
@pytest.mark.no_leak_check("optax's and flax's own code runs in some examples")
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    _, report = failures(importlib.import_module(name))
    assert report == ""


def test_a_wrong_example_would_be_seen():
    module = types.ModuleType("wrong")
    module.__doc__ = ">>> jnp.ones(2).dtype\ndtype('float32')\n>>> 1 + 1\n3\n"
    tried, report = failures(module)
    assert tried == 2
    assert "Expected:\n    3\nGot:\n    2\n" in report


PUBLIC_CALLABLES = [name for name in mpjax.__all__ if callable(getattr(mpjax, name))]


@pytest.mark.parametrize("name", PUBLIC_CALLABLES)
def test_public_name_says_what_comes_back(name):
    doc = inspect.getdoc(getattr(mpjax, name))
    assert doc
    first = doc.splitlines()[0]
    assert first.endswith((".", ":")), f"the first line of {name} is a whole sentence: {first!r}"


@pytest.mark.parametrize("name", PUBLIC_CALLABLES)
def test_public_name_has_an_example(name):
    public = getattr(mpjax, name)
    if isinstance(public, type) and issubclass(public, Exception | Warning):
        return
    assert ">>> " in (inspect.getdoc(public) or ""), f"{name} has no example"


def public_functions():
    """Returns the public functions and classes that public modules define, as `module:name`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = module_name(path)
        if any(part.startswith("_") for part in name.split(".")):
            continue
        body = ast.parse(path.read_text()).body
        defined = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        found += [f"{name}:{n}" for n in defined if not n.startswith("_")]
    return found


@pytest.mark.parametrize("where", public_functions())
def test_public_module_documents_what_it_defines(where):
    module, _, name = where.partition(":")
    assert inspect.getdoc(getattr(importlib.import_module(module), name))
