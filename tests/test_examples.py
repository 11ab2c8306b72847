"""Every example runs in its short form, as a script, and explains its options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

# What makes each example short, and what it must have written under --out.
SHORT = {
    "digits.py": (["--steps", "3", "--precision", "bf16-mixed", "--seed", "0"], ["digits.png"]),
    "lm.py": (["--steps", "2", "--precision", "bf16-mixed"], ["lm.png"]),
    "underflow.py": (["--steps", "3"], ["underflow.png"]),
}


def run(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs an example as a user would: JAX's own defaults; its own warnings are errors."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-W", "error:::__main__", str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_every_example_has_a_short_form():
    assert sorted(SHORT) == EXAMPLES, "each file of examples/ needs its row in SHORT, and no other"


@pytest.mark.parametrize("name", EXAMPLES)
def test_short_form_runs_and_writes_what_it_promises(name: str, tmp_path: Path):
    arguments, written = SHORT[name]
    done = run(name, *arguments, "--out", str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it gained"
    empty = [f for f in written if not (tmp_path / "out" / f).stat().st_size]
    assert empty == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_names_the_options(name: str, tmp_path: Path):
    done = run(name, "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    options = [a for a in SHORT[name][0] if a.startswith("--")]
    assert [o for o in (*options, "--out") if o not in done.stdout] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_option_is_refused(name: str, tmp_path: Path):
    done = run(name, "--no-such-option", folder=tmp_path)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("digits.py", ["--precision", "bf16"], "Type 'bf16-mixed'"),
        ("digits.py", ["--precision", "64-true"], "64-bit types are off"),
        ("digits.py", ["--steps", "0"], "got '0'; type a whole number from 1"),
        ("digits.py", ["--seed", "1", "--seeds", "2"], "not allowed with argument --seed"),
        ("lm.py", ["--precision", "bf16"], "Type 'bf16-mixed'"),
        ("lm.py", ["--seed", "x"], "got 'x'; type a whole number from 0"),
        ("underflow.py", ["--seed", "-1"], "got '-1'; type a whole number from 0"),
        ("underflow.py", ["--out", __file__], "is a file; type the name of a folder"),
    ],
)
def test_bad_value_is_refused_before_training(
    name: str, arguments: list[str], said: str, tmp_path: Path
):
    done = run(name, *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
