"""The layers hold: a file imports only from smaller ones, and stays small enough to read."""

import ast
import re
import sys
from pathlib import Path

import _layers
import pytest
from _layers import LAYERS, PACKAGE, ROOMS
from _places import ROOT

LAYER_OF = {name: layer for layer, row in enumerate(LAYERS) for name in row}

# Walls beside the order: what a folder may import of `mpjax`, and through which door.
ONLY_FROM = {
    "_autocast/known": {"_autocast/known", "_base", "_jaxpr", "_policies"},
    "_autocast/decide": {"_autocast/decide", "_autocast/known", "_base", "_jaxpr", "_policies"},
    "pods": {"pods", "_base", "_jaxpr", "_policies", "_hardware", "_scaling", "_low_precision"},
}

# Folders inside a room that may not import another folder, by dotted name.
WALLS = {"mpjax._autocast.decide.must": "mpjax._autocast.decide.may"}

DOORS = {"mpjax._autocast.speed": "_autocast/speed"}
"""Folders that others enter by their `__init__` alone."""

# Who may import what is neither JAX, NumPy nor the standard library.
EVERYWHERE = {"jax", "numpy", "mpjax"}
ONLY_IN = {
    "flax": {"_flax", "linen", "nnx"},
    "optax": {"_low_precision", "_scaling", "_training", "nnx", "optim", "train"},
    "jmp": {"_policies"},
    "qwix": {"_policies"},
    "chex": {"testing"},
    "matplotlib": {"numerics"},
    "rich": {"__main__", "_autocast/why", "_flax", "numerics", "pods"},
}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 45


def unit_of(parts):
    """Returns the row entry of a file or folder: that of its room, where its folder has rooms."""
    if parts[0] in ROOMS:
        return f"{parts[0]}/{parts[1] if len(parts) > 1 else '__init__'}"
    return parts[0]


class Source:
    """One file: its dotted name, its place in the table, its syntax tree."""

    def __init__(self, path, root):
        self.parts = path.relative_to(root.parent).with_suffix("").parts
        self.unit = unit_of(self.parts[1:])
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.name = "/".join(self.parts) + ".py"

    def imports(self):
        """Yields line and dotted name of all that is imported, inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)

    def _base(self, node):
        if not node.level:
            return node.module or ""
        package = self.parts[: len(self.parts) - node.level]
        return ".".join((*package, node.module) if node.module else package)


def sources(root):
    return [Source(path, root) for path in sorted(root.rglob("*.py"))]


def imported_unit(name, root):
    """Returns the row entry that `mpjax.a.b.c` belongs to; `import mpjax` itself is __init__."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    places = [parts[1:2], parts[1:3] if parts[1] in ROOMS else ()]
    known = [p for p in places if p and _exists(root.joinpath(*p))]
    return unit_of(tuple(known[-1])) if known else "__init__"  # `from mpjax import Policy`


def _exists(path):
    return path.is_dir() or path.with_suffix(".py").exists()


def layer_violations(root):
    found = []
    for source in sources(root):
        if source.unit not in LAYER_OF:
            found.append(f"{source.name}: has no row in the table of layers")
            continue
        for line, name in source.imports():
            if name.split(".")[0] != "mpjax":
                continue
            unit = imported_unit(name, root)
            inside = unit == source.unit and len(source.parts) > 2
            found += behind_a_door(source, line, name, root)
            found += [
                f"{source.name}:{line}: imports {name}, which is behind a wall"
                for folder, wall in WALLS.items()
                if ".".join(source.parts).startswith(f"{folder}.") and name.startswith(wall)
            ]
            if unit not in ONLY_FROM.get(source.unit, {unit}):
                found.append(f"{source.name}:{line}: imports {name}, which is behind a wall")
            if not inside and LAYER_OF.get(unit, -1) >= LAYER_OF[source.unit]:
                found.append(f"{source.name}:{line}: imports {name}, which is not below it")
    return found


def behind_a_door(source, line, name, root):
    """Returns what is wrong with an import of a file in a folder that has a door."""
    for door, unit in DOORS.items():
        first = name.removeprefix(f"{door}.").partition(".")[0]
        inner = root.parent.joinpath(*door.split("."), f"{first}.py")
        if name.startswith(f"{door}.") and source.unit != unit and inner.exists():
            return [f"{source.name}:{line}: imports {name}: type `from {door} import`"]
    return []


def foreign_violations(root):
    found = []
    for source in sources(root):
        for line, name in source.imports():
            top = name.split(".")[0]
            if name.startswith(("jax._src", "jaxlib")):
                found.append(f"{source.name}:{line}: imports {name}, which is private to JAX")
            elif top in EVERYWHERE or top in sys.stdlib_module_names:
                continue
            elif source.unit not in ONLY_IN.get(top, ()):
                found.append(f"{source.name}:{line}: {top} is not for this file")
        if "jax._src" in source.text.replace("`jax._src`", ""):
            found.append(f"{source.name}: names jax._src")
    return found


def cycles(root):
    """Returns the folders whose files import each other in a ring, with one ring each."""
    below = {".".join(s.parts): s for s in sources(root)}
    edges = {name: set[str]() for name in below}
    for name, source in below.items():
        for _, imported in source.imports():
            target = next((c for c in (imported, imported.rpartition(".")[0]) if c in below), None)
            if target is not None and target != name:
                edges[name].add(target)
    found, done = [], set[str]()

    def visit(name, path):
        if name in path:
            found.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())
    return found


def size_violations(root):
    found = []
    for source in sources(root):
        lines = len(source.text.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{source.name}: {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = code_lines(node)
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{source.name}:{node.lineno}: {node.name} has {length} lines")
    return found


def code_lines(node):
    """Counts a function's lines without its docstring: a public one describes dtypes at length."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def classes_of_one_name(root):
    """Returns the names that two classes have, at the top of their files."""
    names = [
        node.name
        for source in sources(root)
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name in names if names.count(name) > 1}


def test_a_class_name_stands_for_one_class():
    public = {"Report", "Row"}  # of `numerics` and `pods`, of `numerics` and `explain`
    assert classes_of_one_name(PACKAGE) == public


def unopened(root):
    """Returns the files whose first line does not say what question they answer."""
    return [s.name for s in sources(root) if s.text.strip() and not ast.get_docstring(s.tree)]


def test_the_design_page_shows_this_table():
    assert _layers.PAGE.read_text() == _layers.page(), "type: python tests/project/_layers.py"


def missing_places(text, folder):
    """Returns the files and folders in backquotes, written with a slash, that do not exist."""
    missing = []
    for name in re.findall(r"`([\w./]+/[\w.]*)`", text):
        root = ROOT if name.startswith("tests/") else folder
        path = root / name
        module = path.parent / f"{path.name.partition('.')[0]}.py"
        if (root / name.partition("/")[0]).is_dir() and not (path.exists() or module.exists()):
            missing.append(name)
    return missing


@pytest.mark.parametrize(
    ("page", "folder"),
    [
        (PACKAGE / "_autocast" / "README.md", PACKAGE / "_autocast"),
        (PACKAGE.parent / "docs" / "design.md", PACKAGE),
        (PACKAGE.parent / "CONTRIBUTING.md", PACKAGE.parent),
    ],
)
def test_what_the_tables_of_files_name_exists(page, folder):
    assert missing_places(page.read_text(), folder) == []
    planted = "`decide/nothing.py` `_base/none` `tests/_none.py`"
    assert missing_places(planted, PACKAGE / "_autocast") == ["decide/nothing.py", "tests/_none.py"]


def test_the_rooms_of_autocast_stand_in_the_order_in_which_they_may_import():
    text = (PACKAGE / "_autocast" / "README.md").read_text()
    rooms = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    folders = {path.parent.name for path in (PACKAGE / "_autocast").glob("*/__init__.py")}
    assert {*rooms} == folders
    layers = [LAYER_OF[f"_autocast/{room}"] for room in rooms]
    assert layers == sorted(layers)


def names_in(sources):
    """Returns by module, and by class, the names that it has: `module.NAME`, `Class.field`."""
    found = {}
    for path in sources:
        tree = ast.parse(path.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        module = path.parent.name if path.stem == "__init__" else path.stem
        if path.stem == "__init__":  # what it exports
            imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
            found.setdefault(module, set()).update(a.name for node in imports for a in node.names)
        for owner, body in [(module, tree.body), *((c.name, c.body) for c in classes)]:
            found.setdefault(owner, set()).update(name for node in body for name in named(node))
    return found


def named(node):
    """Returns the names that a statement gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = [name for target in targets if target for name in ast.walk(target)]
    return [name.id for name in names if isinstance(name, ast.Name)]


ELSEWHERE = {"jax", "lax", "jnp", "optax", "mpjax", "policy", "state"}  # libraries, and variables


def missing_members(text, known):
    """Returns what is written as `module.NAME` or `Class.field` and does not exist."""
    written = set(re.findall(r"`(\w+)\.(\w+)[`(]", text))
    pairs = [(owner, name) for owner, name in written if owner not in ELSEWHERE and name != "py"]
    return sorted(f"{o}.{n}" for o, n in pairs if n not in known.get(o, ()))


@pytest.mark.parametrize("page", ["autocast_design.md", "design.md"])
def test_what_the_pages_of_design_name_exists(page):
    text = (ROOT / "docs" / page).read_text()
    known = names_in(PACKAGE.rglob("*.py"))
    assert missing_members(text, known) == []
    assert missing_places(text, PACKAGE / "_autocast") == []
    assert missing_members(
        "`demand.FULL` `_compat.inlined` `read_flags.TESTED` `State.kept`", known
    ) == [
        "_compat.inlined",
        "demand.FULL",
    ]


def test_the_page_of_design_explains_each_flag_of_safety():
    """Those that say what rounding would do to a reader."""
    text = (ROOT / "docs" / "autocast_design.md").read_text()
    source = (PACKAGE / "_autocast/decide/read_flags.py").read_text()
    section = source.split("# -- what rounding would do")[1].split("# -- whose cotangents")[0]
    flags = set(re.findall(r"^([A-Z]+) = ", section, re.MULTILINE))
    assert len(flags) > 8
    assert sorted(f for f in flags if f not in text) == []


def torn_rows(text):
    """Returns the rows of tables that have not as many cells as their first row."""
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    rows = [
        [(row, re.sub(r"`[^`]*`", "", row).count("|")) for row in t.splitlines()] for t in tables
    ]
    return [row for first, *rest in rows for row, cells in rest if cells != first[1]]


@pytest.mark.parametrize("page", ["mpjax/_autocast/README.md", "docs/design.md"])
def test_rows_of_the_tables_of_files_are_whole(page):
    assert torn_rows((ROOT / page).read_text()) == []
    assert torn_rows("| a | b |\n| --- | --- |\n| `c | d` | e |\n| f |\n") == ["| f |"]


def unmirrored(tests):
    """Returns the folders of tests that no part of the package has: `a/b` tests `mpjax/_a/b`."""
    folders = [path.parent.relative_to(tests) for path in sorted(tests.rglob("test_*.py"))]
    others = [Path("project"), *(Path(name.removeprefix("_")) for name in LAYER_OF)]
    return sorted({str(folder) for folder in folders if folder not in others})


def test_the_folders_of_tests_are_those_of_the_package(tmp_path):
    assert unmirrored(ROOT / "tests") == ["autocast"]  # whole programs, through all rooms
    for planted in ("test_alone.py", "autocast/speed/test_a.py", "autocast/slow/test_b.py"):
        (tmp_path / planted).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / planted).touch()
    assert unmirrored(tmp_path) == [".", "autocast/slow"]


def test_files_import_only_from_smaller_layers():
    assert "mpjax/__init__.py" in [source.name for source in sources(PACKAGE)]
    assert layer_violations(PACKAGE) == []


def test_foreign_libraries_stay_in_the_modules_that_exist_for_them():
    assert foreign_violations(PACKAGE) == []


def test_no_file_imports_itself_in_a_ring():
    assert cycles(PACKAGE) == []


def test_files_and_functions_can_be_read_at_once():
    assert size_violations(PACKAGE) == []


def test_every_file_says_what_it_is_for():
    assert unopened(PACKAGE) == []


# Tests of the tests: each planted fault is found, and nothing else.


@pytest.fixture
def planted(tmp_path):
    """A small sound package; a test adds one fault to it."""
    root = tmp_path / "mpjax"
    files = {
        "__init__.py": "from mpjax._base.tree import f\nfrom mpjax import optim\n",
        "_base/dtypes.py": "import jax\n",
        "_base/tree.py": "import enum\nfrom mpjax._base import dtypes\nfrom . import dtypes\n",
        "optim.py": "import optax\nfrom ._base import tree\n",
        "_autocast/__init__.py": "from mpjax._autocast.arrange.plan import p\n",
        "_autocast/speed/marks.py": "import enum\n",
        "_autocast/arrange/plan.py": "from ..._base.tree import f\n",
        "_autocast/run/calls.py": "from mpjax._autocast.arrange import plan\nfrom . import calls\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'"""Says what it is for."""\n{text}')
    return root


def all_violations(root):
    checks = (layer_violations, foreign_violations, cycles, size_violations, unopened)
    return [violation for check in checks for violation in check(root)]


def test_sound_package_passes(planted):
    assert all_violations(planted) == []


# A file, what is written into it, and what is said of that.
PLANTED = """
_base/tree.py | from mpjax._policies.policy import Policy | policies.policy.Policy, which is not
_base/tree.py | def f(): from mpjax import optim | imports mpjax.optim, which is not below it
_base/tree.py | import mpjax | imports mpjax, which is not below it
_base/tree.py | from mpjax import Policy | imports mpjax.Policy, which is not below it
linen.py | from mpjax import nnx | imports mpjax.nnx, which is not below it
_autocast/arrange/plan.py | from mpjax._autocast.run import calls | run.calls, which is not below it
_autocast/decide/states.py | from mpjax._scaling.skip import f | skip.f, which is behind a wall
_autocast/run/calls.py | from mpjax._autocast.speed import marks | marks: type `from mpjax
_autocast/decide/must/carries.py | from mpjax._autocast.decide.may import norms | is behind a wall
_autocast/plan.py | from ..optim import tx | has no row in the table
_helpers.py | x = 1 | has no row in the table
_base/tree.py | import flax.linen | flax is not for this file
_policies/policy.py | def f(): import optax | optax is not for this file
_base/tree.py | import equinox | equinox is not for this file
_base/compat.py | from jax._src import core | private to JAX
_base/compat.py | import importlib; importlib.import_module('jax._src.core') | names jax._s
_base/dtypes.py | from mpjax._base import tree | mpjax._base.dtypes -> mp
"""
FAULTS = [tuple(part.strip() for part in row.split("|")) for row in PLANTED.strip().splitlines()]
FAULTS += [
    ("_base/tree.py", "x = 1\n" * 450, "452 lines, more than 450"),
    ("_base/tree.py", "def f():\n" + "    x = 1\n" * 45, "f has 46 lines"),
]


@pytest.mark.parametrize(("file", "text", "said"), FAULTS)
def test_planted_fault_is_found(planted, file, text, said):
    (planted / file).parent.mkdir(parents=True, exist_ok=True)
    (planted / file).write_text(f'"""Says what it is for."""\n{text}\n')
    found = all_violations(planted)
    assert any(said in violation for violation in found), found


def test_file_without_a_first_line_is_found(planted):
    (planted / "_base" / "tree.py").write_text("import enum\n")
    assert all_violations(planted) == ["mpjax/_base/tree.py"]


def test_docstring_does_not_count_towards_a_function(planted):
    body = '    """Doc.\n' + "\n    Words.\n" * 40 + '    """\n' + "    x = 1\n" * 40
    (planted / "_base" / "tree.py").write_text('"""Says what it is for."""\ndef f():\n' + body)
    assert all_violations(planted) == []
