"""Every Python block of the README runs, top to bottom, as a reader would paste it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _helpers import UNOPTIMISED

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [body for lang, body in FENCE.findall(text) if lang == language]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` outside the checkout; a warning raised by the text's own lines is an error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    (folder / "readme.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-W", "error:::__main__", "readme.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept
        | UNOPTIMISED
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        check=False,
    )


README = (ROOT / "README.md").read_text()


def test_readme_runs(tmp_path: Path):
    """The blocks share one namespace: a later one may use what an earlier one made."""
    code = blocks(README, "python")
    assert code, "the README shows code"
    done = run("\n".join(code), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_broken_block_would_be_seen(tmp_path: Path):
    text = "```python\nx = 1\n```\ntext\n```bash\nexit 1\n```\n```python\nassert x == 2\n```\n"
    assert blocks(text, "python") == ["x = 1\n", "assert x == 2\n"]
    assert "AssertionError" in run("\n".join(blocks(text, "python")), tmp_path).stderr


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", README))))
def test_every_make_target_of_the_readme_exists(target: str):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def local_links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def test_files_that_the_readme_links_to_exist():
    links = local_links(README)
    assert [link for link in links if not (ROOT / link).exists()] == []
    # What `make demo` writes is there on the author's machine only.
    assert [link for link in links if link.startswith("outputs/")] == []


def test_the_container_leaves_the_environment_that_make_looks_for():
    show = ["make", "--silent", "--eval", "stamp: ; @echo $(STAMP)", "stamp"]
    plain = {"PATH": os.environ["PATH"]}  # not what an outer `make test JAX=0.10.0` hands down
    stamp = subprocess.run(show, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    text = (ROOT / "Dockerfile").read_text()
    assert f"touch {stamp.stdout.strip()}\n" in text
    assert "python -m venv .venv" in text
