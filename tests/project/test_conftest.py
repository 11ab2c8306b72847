"""The climate of conftest.py is real: each check is seen to catch what it is there to catch."""

import argparse
import subprocess
import sys
import types
import warnings

import conftest
import jax
import jax.numpy as jnp
import pytest
from _places import ROOT


def leak_a_tracer():
    leaked = []

    @jax.jit
    def fun(x):
        leaked.append(x)
        return x

    fun(jnp.ones(2))


def test_there_are_eight_cpu_devices(devices):
    assert [d.platform for d in devices] == ["cpu"] * 8
    assert jax.default_backend() == "cpu"


def test_implicit_promotion_raises():
    with pytest.raises(Exception, match="no available implicit dtype promotion path"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


@pytest.mark.standard_promotion("tries the marker itself")
def test_marker_lifts_strict_promotion():
    assert (jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="off on the floor: see conftest")
def test_leaked_tracer_raises(request):
    if request.config.getoption("first_case"):
        pytest.skip("off: see conftest")
    with pytest.raises(Exception, match="Leaked trace"):
        leak_a_tracer()


@pytest.mark.no_leak_check("tries the marker itself")
def test_marker_lifts_leak_check():
    leak_a_tracer()


def test_warning_raises():
    with pytest.raises(UserWarning, match="as an error"):
        warnings.warn("as an error", UserWarning, stacklevel=1)


def pytest_on(source, folder, first="", *options):
    """Runs pytest on one file of `source` under a copy of our conftest.py, `first` before it."""
    ours = (ROOT / "tests" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(first + ours)
    (folder / "test_it.py").write_text("import jax, pytest\n" + source)
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider -rs test_it.py".split()
    return subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )


CHANGES = """
def test_on(): jax.config.update('jax_enable_x64', True)
def test_off(): assert not jax.config.jax_enable_x64
@pytest.mark.tpu_compiler
def test_tpu(): pass
@pytest.mark.gpu_compiler
def test_gpu(): pass
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What is printed by a run that changes a setting, and lacks both compilers."""
    missing = "import sys\nsys.modules |= {'libtpu': None, 'jax_plugins': None}\n"
    run = pytest_on(CHANGES, tmp_path_factory.mktemp("run"), missing)
    assert run.returncode == pytest.ExitCode.OK, run.stdout
    return run.stdout


def test_config_changed_by_one_test_is_put_back_for_the_next(printed):
    assert "2 passed, 2 skipped" in printed


def test_what_lacks_its_compiler_is_skipped_and_says_how_to_get_it(printed):
    assert "libtpu is not installed; it compiles for what is not here: make tpu" in printed
    assert "jax_plugins.xla_cuda12 is not installed; it compiles for what is not" in printed


@pytest.mark.ci
def test_first_case_leaves_out_the_later_cases_of_each_test_and_no_test(tmp_path):
    source = (
        "slow = pytest.param(0, marks=pytest.mark.slow)\n"
        "@pytest.mark.parametrize('n', [slow, 1, 2, 3])\n"
        "def test_cases(n): assert n == 1\n"
        "def test_alone(): pass\n"
    )
    run = pytest_on(source, tmp_path, "", "--first-case", "-m", "not slow")
    assert run.returncode == pytest.ExitCode.OK, run.stdout
    assert "2 passed, 3 deselected" in run.stdout


def test_sampled_leaves_to_ci_all_but_one_case_of_n_of_each_value(tmp_path):
    source = (
        "def write(case, request):\n"
        "    left = request.node.get_closest_marker('ci')\n"
        "    open('log', 'a').write('' if left else case + ' ')\n"
        "@pytest.mark.sampled(3)\n"
        "@pytest.mark.parametrize('n', range(6))\n"
        "def test_table(n, request): write(str(n), request)\n"
        "@pytest.mark.sampled(3)\n"
        "@pytest.mark.parametrize('a', 'xyz')\n"
        "@pytest.mark.parametrize(('b', 'c'), [(2, 3), (2, 4), (5, 3)])\n"
        "def test_product(a, b, c, request): write(f'{a}{b}{c}', request)\n"
    )
    run = pytest_on(source, tmp_path, "", "-m", "not slow")
    assert "15 passed" in run.stdout, run.stdout
    assert sorted((tmp_path / "log").read_text().split()) == ["0", "3", "x23", "y53", "z24"]


@pytest.mark.ci
def test_parts_of_the_sampled_cases_run_each_once_and_what_make_test_runs_always(tmp_path):
    source = (
        "@pytest.mark.sampled(3)\n"
        "@pytest.mark.parametrize('n', range(9))\n"
        "def test_cases(n): open('log', 'a').write(f'{n} ')\n"
        "@pytest.mark.ci\n"
        "def test_other(): open('log', 'a').write('other ')\n"
    )
    for part, passed in (("1/2", 3 + 3 + 1), ("2/2", 3 + 3 + 1)):
        run = pytest_on(source, tmp_path, "", "--cases", part)
        assert f"{passed} passed" in run.stdout, run.stdout
    ran = (tmp_path / "log").read_text().split()
    assert sorted(ran) == sorted([*"012345678", *"036", "other", "other"])


@pytest.mark.ci
def test_parts_run_each_selected_test_once(tmp_path):
    source = (
        "@pytest.mark.parametrize('n', range(5))\n"
        "def test_cases(n): assert not open('log', 'a').write(f'{n} ') == 0\n"
        "def test_other(): assert False\n"
    )
    for part, passed in (("1/2", 3), ("2/2", 2)):
        run = pytest_on(source, tmp_path, "", "--part", part, "-k", "cases")
        assert f"{passed} passed" in run.stdout, run.stdout
    assert sorted((tmp_path / "log").read_text().split()) == [*"01234"]


def test_a_part_that_is_none_is_refused_with_what_to_type(tmp_path):
    said = "got '{}'; type a part of all parts, as 1/4 or 4/4"
    for part in ("0/4", "5/4", "2"):
        with pytest.raises(argparse.ArgumentTypeError, match=said.format(part)):
            conftest._part(part)
    run = pytest_on("", tmp_path, "", "--part", "0/4")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert said.format("0/4") in run.stderr


def test_marker_without_a_reason_is_refused(tmp_path):
    run = pytest_on("@pytest.mark.no_leak_check\ndef test_it(): pass\n", tmp_path)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no_leak_check was given ()" in run.stderr
    assert "Write pytest.mark.no_leak_check('...')" in run.stderr


def test_sampled_without_cases_is_refused():
    item = types.SimpleNamespace(
        nodeid="test_it",
        get_closest_marker=lambda _: pytest.mark.sampled(3).mark,
        iter_markers=lambda _: [],
    )
    said = (
        r"test_it: sampled was given \(3,\) and 0 tables(.|\n)*sampled\(3\) beside a pytest.mark.p"
    )
    with pytest.raises(pytest.UsageError, match=said):
        conftest._leave_to_ci([item])
