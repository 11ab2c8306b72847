"""The wheel holds the package and nothing else, and works away from the checkout."""

import email
import email.message
import os
import subprocess
import sys
import zipfile

import pytest
from _places import ROOT

import mpjax


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if ".dist-info/" not in n}
    tracked = [p for p in (ROOT / "mpjax").rglob("*") if p.is_file()]
    wanted = {p.relative_to(ROOT).as_posix() for p in tracked if p.suffix != ".pyc"}
    assert inside == wanted
    assert "mpjax/py.typed" in inside


def test_wheel_carries_the_licence(wheel, metadata):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"


def test_there_is_one_version(wheel, metadata):
    assert metadata["Version"] == mpjax.__version__
    assert wheel.name == f"mpjax-{mpjax.__version__}-py3-none-any.whl"
    assert f"## {mpjax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_core_needs_jax_and_numpy_only(metadata):
    core = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(core) == ["jax>=0.10", "numpy>=2.0"]
    assert metadata["Requires-Python"] == ">=3.11"


def test_wheel_installs_a_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/entry_points.txt")]
        points = archive.read(name).decode()
    assert points.split("\n")[:2] == ["[console_scripts]", "mpjax = mpjax.__main__:run_as_program"]


def test_extras(metadata):
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"dev", "examples", "flax", "optax", "plots", "rich", "tpu"} <= extras


def test_wheel_works_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import mpjax; print(mpjax.__file__, mpjax.get_policy('bf16-mixed'))"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path / "site"))


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
