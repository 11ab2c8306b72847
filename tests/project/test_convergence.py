"""The convergence benchmark: what it calls "within float32's spread", and the files it writes."""

import importlib
import subprocess
import sys

import pytest
from _places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def convergence(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("convergence")


def rows(*losses):
    return [{"loss": loss, "score": 100 - loss, "skipped": 1} for loss in losses]


@pytest.mark.parametrize(
    ("base", "mean", "distance", "within"),
    [
        ((1.0, 2.0, 3.0), 2.5, 0.5, True),
        ((1.0, 2.0, 3.0), 1.0, -1.0, True),
        ((1.0, 2.0, 3.0), 0.5, -1.5, False),  # better is also another end
        ((0.0, 3.0, 3.0, 3.0, 6.0), 5.9, 2.9 / 4.5**0.5, False),  # between the seeds, but far out
        ((0.0, 1.0), 1.1, 0.6 * 2**0.5, False),  # near, but beyond every seed
    ],
)
def test_within_is_one_deviation_and_between_the_seeds(convergence, base, mean, distance, within):
    found = convergence.compared(rows(mean, mean), rows(*base), "loss")
    assert found == (pytest.approx(distance), within)


def test_one_measure_outside_is_a_no(convergence):
    base = rows(1.0, 2.0, 3.0)
    found = rows(2.0, 2.0, 2.0)
    assert convergence.line("16-mixed", found, base, 2)[-2:] == ("yes", "3")
    for row in found:
        row["score"] = 0.0
    assert convergence.line("16-mixed", found, base, 2)[-2:] == ("NO", "3")


def run(*arguments):
    command = [sys.executable, str(FOLDER / "convergence.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_trains_and_a_later_run_keeps_the_other_rows(tmp_path):
    out = tmp_path / "found.md"
    short = ["--tasks", "mlp", "--seeds", "2", "--steps", "3", "--out", str(out)]
    for precision in ("32-true", "bf16-mixed"):
        done = run(*short, "--precisions", precision)
        assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "## mlp, 3 steps" in text
    assert "| 32-true | 2 |" in text
    assert "| bf16-mixed | 2 |" in text
    assert text.count("--precisions") == 2


@pytest.mark.slow
def test_an_unknown_task_is_an_error_that_lists_them():
    done = run("--tasks", "mlp,vgg")
    assert done.returncode == 2
    assert "unknown: vgg; there are mlp, digits, lm" in done.stderr
