"""The pages of `docs/`: their code runs, what they link to exists, their pictures can be drawn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, blocks, local_links, run

import mpjax

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "modules" not in path.parts)
NAMES = [path.relative_to(DOCS).as_posix() for path in PAGES]
WITH_CODE = [n for n, p in zip(NAMES, PAGES, strict=True) if blocks(p.read_text(), "python")]


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_of_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path):
    done = run("\n".join(blocks((DOCS / name).read_text(), "python")), tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_page_that_teaches_shows_code_that_runs():
    teaching = {n for n in NAMES if n.startswith("migrate/")} | {
        *("index.md", "concepts.md", "autocast.md", "recipes.md", "pods.md"),
    }
    assert teaching - set(WITH_CODE) == set()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_links_to_exists(name: str):
    page = DOCS / name
    links = local_links(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_a_table_of_contents():
    listed = re.findall(r"^(\S+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {name.removesuffix(".md") for name in NAMES} - {"index"}
    assert pages - set(listed) == set()


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    found = re.findall(r"^\.\. auto\w+:: mpjax\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(mpjax.__all__)


def test_every_picture_is_used():
    text = "".join(path.read_text() for path in (*PAGES, ROOT / "README.md"))
    pictures = {path.name for path in (DOCS / "images").iterdir()}
    assert {name for name in pictures if f"images/{name}" not in text} == set()
    assert {*re.findall(r"images/([\w.]+)", text)} - pictures == set()


def test_the_pictures_can_be_drawn(tmp_path: Path):
    command = [sys.executable, str(DOCS / "figures.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "block.png",
        "explained.txt",
        "formats.png",
    }
