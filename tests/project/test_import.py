"""`import mpjax` is cheap and touches nothing: no backend, no array, no optional library."""

import ast
import os
import pkgutil
import subprocess
import sys

import pytest
from _places import ROOT

import mpjax

OPTIONAL = ("flax", "optax", "rich", "matplotlib", "orbax", "jmp", "haiku", "equinox", "chex")
MAX_NAMES = 45
MAX_RATIO = 1.06


def fresh(code, **environment):
    """Runs `code` in a new interpreter that knows nothing of this process's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | environment,
        check=False,
    )


def loaded_by(statement):
    run = fresh(f"import sys\n{statement}\nprint(*{{m.split('.')[0] for m in sys.modules}})")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_loads_no_optional_library():
    loaded = loaded_by("import mpjax")
    assert {"jax", "mpjax"} <= loaded
    assert loaded.isdisjoint(OPTIONAL)


def test_an_optional_library_would_be_seen_where_a_module_first_uses_it():
    touch = "import mpjax; mpjax.linen.with_policy, mpjax.nnx.set_policy"
    assert {"flax", "optax"} <= loaded_by(touch)


def test_import_starts_no_backend_and_makes_no_array():
    """No platform of that name exists, so that the first array, or look at a device, raises."""
    run = fresh("import mpjax; mpjax.__all__", JAX_PLATFORMS="no_such_platform")
    assert run.returncode == 0, run.stderr


def test_a_started_backend_would_be_seen():
    touch = """
import mpjax, jax
for look in (jax.devices, lambda: jax.numpy.zeros(()), lambda: jax.random.key(0)):
    try:
        look()
    except RuntimeError as error:
        print(error)
"""
    run = fresh(touch, JAX_PLATFORMS="no_such_platform")
    assert run.stdout.count("no_such_platform") >= 3, run.stderr


def import_ratio(module):
    """Returns how many functions `import jax, module` calls, by how many `import jax` does.

    Calls are the same in every run, and take their time alike; seconds depend on the machine.
    """
    run = fresh(
        "import sys\n"
        "calls = 0\n"
        "def count(*_):\n"
        "    global calls\n"
        "    calls += 1\n"
        "sys.setprofile(count)\n"
        "import jax\n"
        "before = calls\n"
        f"import {module}\n"
        "sys.setprofile(None)\n"
        "print(calls / before)"
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_import_takes_hardly_longer_than_jax():
    assert import_ratio("mpjax") <= MAX_RATIO  # 1.03


def test_a_slow_import_would_be_seen():
    assert import_ratio("optax") > MAX_RATIO  # 1.11; flax.linen has 1.22


def all_node():
    tree = ast.parse((ROOT / "mpjax" / "__init__.py").read_text())
    found = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]
    ]
    assert len(found) == 1, "mpjax/__init__.py assigns __all__ once, as a literal"
    return found[0]


def test_all_is_a_literal_of_few_names_each_once():
    names = ast.literal_eval(all_node())
    assert list(mpjax.__all__) == list(names)
    assert len(names) == len(set(names))
    assert 0 < len(names) <= MAX_NAMES


def test_every_public_name_is_there_and_listed_by_dir():
    missing = [name for name in mpjax.__all__ if not hasattr(mpjax, name)]
    assert missing == []


MODULES = sorted(m.name for m in pkgutil.iter_modules(mpjax.__path__) if not m.name.startswith("_"))


def test_dir_shows_public_names_and_modules_only():
    names = set(dir(mpjax)) - {"__version__"}
    assert names == {*mpjax.__all__, *MODULES}
    assert [name for name in names if not hasattr(mpjax, name)] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_shows_its_public_names_only(name):
    module = getattr(mpjax, name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)
