"""The climate that tests run in: CPU, eight devices, strict promotion, leak check, no warnings.

The environment is set before JAX is imported; what can be lifted for one test is set per test, and
lifted by a marker that gives its reason:

    @pytest.mark.standard_promotion("orbax compares int32 with a Python-typed int64")
    @pytest.mark.no_leak_check("flax keeps the module's scope, tracers included, on the exception")

A law of many like cases is marked `sampled(n)`: `make test` runs one case of n. CI runs these and
an eighth of the others, another one each day (`--cases`). A test that `make test` leaves to CI
alone is marked `ci`.

What compiles for an accelerator is marked `tpu_compiler` or `gpu_compiler`, and is skipped, saying
how to get the compiler, where it is not installed.
"""

import argparse
import collections
import gc
import importlib.metadata
import importlib.util
import os
import re
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

HOST_DEVICES = 8
# XLA's newer CPU code generator takes three quarters of a program's compile time; the XLA of these
# versions has the older one still, and calls the flag unknown after them.
HAS_OLDER_EMITTERS = importlib.metadata.version("jaxlib").startswith("0.10.")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        # Eight devices on two busy cores may wait longer for each other than XLA has patience.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        # Most programs run once: making them fast costs more than they ever take. What is set
        # outside wins; CI's stage `fuzz` tests bits as a user's compiler makes them.
        "--xla_backend_optimization_level=0",
        *(["--xla_cpu_use_fusion_emitters=false"] if HAS_OLDER_EMITTERS else []),
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f),
        f"--xla_force_host_platform_device_count={HOST_DEVICES}",
    ]
)

# Programs that an earlier run compiled, or the other process of this one, are read from a file: a
# third of the time where all are there. JAX's key is the program, the flags and the versions.
COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
CACHING = {
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
for _name, _value in CACHING.items():
    os.environ.setdefault(_name, _value)

import hypothesis  # noqa: E402 - the variables above are read when JAX is first imported
import jax  # noqa: E402
import pytest  # noqa: E402

# Compiling under load takes as long as it takes: a deadline would only measure the machine.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True, **_PATIENT)
hypothesis.settings.register_profile("dev", **_PATIENT)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)

# Until JAX 0.11 the check turned trace caches off, which made tracing several times slower. On 0.12
# it costs nothing that two runs of test_grad.py and test_autocast_picks.py could show (97 s of
# processor time with it, 99 s without). `--first-case` looks for what another JAX changes, and goes
# without.
CHECK_LEAKS = jax.__version_info__ >= (0, 11)

_LIFTED_BY = {
    "standard_promotion": ("numpy_dtype_promotion", "standard"),
    "no_leak_check": ("check_tracer_leaks", False),
}
_COMPILERS = {
    "tpu_compiler": ("libtpu", "make tpu"),
    "gpu_compiler": (
        "jax_plugins.xla_cuda12",
        "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, at JAX's version",
    ),
}


def _installed(module: str) -> bool:
    parent = module.partition(".")[0]
    return bool(importlib.util.find_spec(parent) and importlib.util.find_spec(module))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what CI's stages `floor` and `fuzz` ask for."""
    what = "of a parametrised test run the first case only: another JAX breaks seams, not cases"
    parser.addoption("--first-case", action="store_true", help=what)
    what = "run one part of the tests, as 3/4: the third test of each four. All parts run them all"
    parser.addoption("--part", metavar="N/OF", type=_part, help=what)
    what = "of the cases that `sampled` leaves out run one part, as 3/4. All parts run them all"
    parser.addoption("--cases", metavar="N/OF", type=_part, help=what)


def pytest_sessionstart() -> None:
    """Forgets programs that were compiled more than a week ago."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for path in COMPILED.glob("*"):
            if path.stat().st_mtime < time.time() - 7 * 86400:
                path.unlink()


def _part(text: str) -> tuple[int, int]:
    """Returns the number of a part, from 0, and how many there are."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}; type a part of all parts, as 1/4 or 4/4")
    return int(match[1]) - 1, int(match[2])


def _keep_part(config: pytest.Config, items: list[pytest.Item], number: int, of: int) -> None:
    """Leaves out all tests but those of one part, from what `-m` and `-k` have selected."""
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % of != number])
    items[:] = items[number::of]


def _keep_cases(config: pytest.Config, items: list[pytest.Item], number: int, of: int) -> None:
    """Leaves out, of the cases that `sampled` leaves to CI, all but those of one part."""
    counts: collections.Counter[str] = collections.Counter()
    kept, dropped = [], []
    for item in items:
        if not (item.get_closest_marker("sampled") and item.get_closest_marker("ci")):
            kept.append(item)
            continue
        name = item.nodeid.partition("[")[0]
        place = zlib.crc32(name.encode()) + counts[name]  # of few cases not always the first part
        counts[name] += 1
        (kept if place % of == number else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def _keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out all cases of a parametrised test but the first that runs by default."""
    seen = set()
    kept, dropped = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (dropped if name in seen else kept).append(item)
        if not (item.get_closest_marker("slow") or item.get_closest_marker("ci")):
            seen.add(name)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Selects what the options ask for: cases before `-m` and `-k` do, a part after them."""
    _mark(items)
    _leave_to_ci(items)
    if config.getoption("first_case"):
        _keep_first_cases(config, items)
    if cases := config.getoption("cases"):
        _keep_cases(config, items, *cases)
    yield
    if part := config.getoption("part"):
        _keep_part(config, items, *part)


def _mark(items: list[pytest.Item]) -> None:
    """Refuses a marker that lifts a check and does not say why; skips what lacks its compiler."""
    missing = {
        name: f"{module} is not installed; it compiles for what is not here: {install}"
        for name, (module, install) in _COMPILERS.items()
        if not _installed(module)
    }
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
        for name in _LIFTED_BY:
            for mark in item.iter_markers(name):
                if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0]):
                    raise pytest.UsageError(
                        f"{item.nodeid}: the marker {name} was given {mark.args}.\n"
                        f"  It takes one string, the reason. Write pytest.mark.{name}('...')."
                    )


def _leave_to_ci(items: list[pytest.Item]) -> None:
    """Marks as left to CI what `sampled(n)` leaves out: all but each n-th case of a law.

    A case is one of them if the places of its values, each in its own `parametrize`, add up to a
    multiple of n. So two values of a product of parameters meet as often as any other two.
    """
    places: dict[Any, dict[Any, int]] = collections.defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        tables = [table.args[0] for table in item.iter_markers("parametrize")]
        if not (tables and len(mark.args) == 1 and isinstance(mark.args[0], int)):
            raise pytest.UsageError(
                f"{item.nodeid}: sampled was given {mark.args} and {len(tables)} tables.\n"
                "  Write pytest.mark.sampled(3) beside a pytest.mark.parametrize: one case of 3."
            )
        total, given = 0, item.callspec.params
        for table in tables:
            names = table.replace(",", " ").split() if isinstance(table, str) else table
            values = tuple(_known_again(given[name]) for name in names)
            known = places[item.nodeid.partition("[")[0], tuple(names)]
            total += known.setdefault(values, len(known))
        if total % mark.args[0]:
            item.add_marker("ci")


def _known_again(value: Any) -> Any:
    """Returns what tells the same value in another case: itself, or which object it is."""
    return value if isinstance(value, str | int | float | None) else id(value)


@pytest.fixture(autouse=True)
def _strict_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets what a test can lift, and puts back whatever the test itself changed."""
    settings = {"numpy_dtype_promotion": "strict", "debug_nans": False}
    settings["check_tracer_leaks"] = CHECK_LEAKS and not request.config.getoption("first_case")
    for marker, (name, value) in _LIFTED_BY.items():
        if request.node.get_closest_marker(marker):
            settings[name] = value
    if settings["check_tracer_leaks"]:
        gc.freeze()  # the check collects garbage after each trace: let it look at this test alone
    before = {
        f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in (*settings, "enable_x64")
    }
    for name, value in settings.items():
        jax.config.update(f"jax_{name}", value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def devices() -> list[jax.Device]:
    """The eight virtual CPU devices."""
    return jax.devices("cpu")[:HOST_DEVICES]
