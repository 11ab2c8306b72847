"""The README and the pages of `docs/`: their code runs, what they link to exists, their pictures
can be drawn."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tomllib

import jax
import pytest
from _places import ROOT
from _scripts import run as run_script
from PIL import Image

import mpjax
from mpjax.__main__ import COMMANDS, main

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(DOCS))
PATHS = [ROOT / "README.md", *DOCS.rglob("*.md")]
TEXTS = {
    os.path.relpath(path, DOCS): path.read_text()
    for path in sorted(PATHS)
    if "modules" not in path.parts
}
README = "../README.md"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text, language):
    return [body for lang, body in FENCE.findall(text) if lang == language]


STRICT = "import warnings, mpjax; warnings.filterwarnings('error', category=mpjax.PolicyWarning)\n"


def run(code, folder):
    """Runs `code` outside the checkout; a warning of its own lines, or mpjax's, is an error."""
    (folder / "page.py").write_text(STRICT + code)
    return run_script(folder / "page.py", folder=folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n, text in TEXTS.items() if blocks(text, "python")])
def test_the_code_of_a_page_runs_from_top_to_bottom(name, tmp_path):
    """Its blocks share one namespace: a later one may use what an earlier one made."""
    done = run("\n".join(blocks(TEXTS[name], "python")), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_broken_block_would_be_seen(tmp_path):
    text = "```python\nx = 1\n```\ntext\n```bash\nexit 1\n```\n```python\nassert x == 2\n```\n"
    assert blocks(text, "python") == ["x = 1\n", "assert x == 2\n"]
    assert "AssertionError" in run("\n".join(blocks(text, "python")), tmp_path).stderr
    warned = (
        'import mpjax; fast = mpjax.autocast(abs, mpjax.PolicyMap("32-true", {"no": "float16"}))'
    )
    assert "PolicyWarning: " in run(f"{warned}\nfast(1.0)\n", tmp_path).stderr


TEACHING = "index concepts glossary autocast recipes pods attention ../README"


def test_every_page_that_teaches_shows_code_that_runs():
    teaching = {n for n in TEXTS if n.startswith("migrate/")} | {
        f"{n}.md" for n in TEACHING.split()
    }
    assert [name for name in teaching if not blocks(TEXTS[name], "python")] == []


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_page_links_to_exists(name):
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[name])
    links = [link for link in found if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not ((DOCS / name).parent / link).exists()] == []
    # What `make demo` writes is there on the author's machine only.
    assert [link for link in links if link.startswith("outputs/")] == []


def anchors(path):
    """The anchors that GitHub makes of a page's headings, and MyST too, included text and all."""
    text = re.sub(r"^```\w.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    included = re.findall(r"^```{include} (\S+)$", path.read_text(), re.MULTILINE)
    words = (
        re.sub(r"[^\w -]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    own = {heading.strip().replace(" ", "-") for heading in words}
    return own.union(*(anchors(path.parent / name) for name in included))


@pytest.mark.parametrize("name", TEXTS)
def test_a_table_that_a_page_includes_is_linked_for_those_who_read_it_unbuilt(name):
    included = re.findall(r"^```{include} (\S*benchmarks/results/\S+)$", TEXTS[name], re.MULTILINE)
    assert [path for path in included if f"]({path})" not in TEXTS[name]] == []


@pytest.mark.parametrize("name", TEXTS)
def test_the_heading_that_a_link_names_exists(name):
    here = DOCS / name
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", TEXTS[name])
    inside = [(file, anchor) for file, anchor in links if not re.match(r"[a-z]+:", file)]
    asked = [(here.parent / file if file else here, anchor) for file, anchor in inside]
    assert [anchor for path, anchor in asked if anchor not in anchors(path)] == []


def test_the_first_page_says_what_each_extra_is_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = re.findall(r"^\| `(\w+)` \|", TEXTS["index.md"].partition("| extra |")[2], re.MULTILINE)
    assert told == [name for name in extras["optional-dependencies"] if name != "dev"]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)\b", TEXTS[README]))))
def test_every_make_target_of_the_readme_exists(target):
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_container_leaves_the_environment_that_make_looks_for():
    show = ["make", "--silent", "--eval", "stamp: ; @echo $(STAMP)", "stamp"]
    plain = {"PATH": os.environ["PATH"]}  # not what an outer `make test JAX=0.10.0` hands down
    stamp = subprocess.run(show, cwd=ROOT, env=plain, capture_output=True, text=True, check=True)
    text = (ROOT / "Dockerfile").read_text()
    assert f"touch {stamp.stdout.strip()}\n" in text
    assert "python -m venv .venv" in text


def test_every_page_is_in_a_table_of_contents():
    listed = re.findall(r"^(\S+)$", TEXTS["index.md"], re.MULTILINE)
    pages = {name.removesuffix(".md") for name in TEXTS.keys() - {"index.md", README}}
    assert pages - set(listed) == set()


# What each library's own pages on mixed precision show, by the heading that translates it here.
TRANSLATED = {
    "pytorch": "From PyTorch AMP; Gradient accumulation; A gradient penalty; "
    "Several models, losses and optimizers; A region in float32; "
    "Functions with a derivative of their own",
    "lightning": "From Lightning; True half precision, and double; Parameters made in 16 bits; "
    "Fabric: a loop of your own; Casts of your own",
    "keras": "From Keras; The guide, line by line; A custom training loop; Policies by path",
    "apex": "From Apex; BatchNorm in float32; A loss scale for each loss; Gradient accumulation; "
    "Functions of your own; Batches of your own type",
    "jmp": "From jmp; jmp's README, line by line",
    "flax": "From Flax's DynamicScale; A TrainState with BatchNorm",
    "eight_bits": "Transformer Engine; qwix; Keras",
}


@pytest.mark.parametrize("name", TRANSLATED)
def test_what_a_library_documents_stands_beside_what_to_type_here(name):
    text = TEXTS[f"migrate/{name}.md"]
    fenced = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda code: code[0].replace("\n# ", "\n  # "), text)  # comments, no headings
    headings = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(headings[1::2], headings[2::2], strict=True))
    beside = r'<div class="beside">\n\n```py(?:thon)?\n.*?\n```\n\n```python\n.*?\n```\n\n</div>'
    found = {heading for heading, body in sections.items() if re.search(beside, body, re.DOTALL)}
    assert found == set(TRANSLATED[name].split("; "))
    assert "What behaves differently" in sections


def test_two_columns_of_code_are_seen_without_scrolling():
    wide = []
    for name, text in TEXTS.items():
        pairs = re.findall(r'<div class="beside">(.*?)</div>', text, re.DOTALL)
        lines = "\n".join(pairs).splitlines()
        wide += [f"{name}: {line}" for line in lines if len(line) > 64]  # in a window of 1440 px
    assert wide == []


def prose(text):
    """Returns the sentences of a page, without code, tables and pictures."""
    for fenced in (r"^<div.*?^</div>", r"^```.*?^```$", r"^\|.*?$", r"^!?\[.*?\]\([^)]*\)$"):
        text = re.sub(fenced, "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )", text)
    end = re.compile(r"(?<=[.?!])\*{0,2}\s+")
    return [s for p in paragraphs for s in end.split(" ".join(p.split())) if s]


WIDE = 120  # characters
KEPT_WHOLE = re.compile(r"^```.*?^```$|^\|.*?$|^!\[.*?$", re.MULTILINE | re.DOTALL)  # code, tables
GUIDES = {"CONTRIBUTING.md", "CHANGELOG.md", "mpjax/_autocast/README.md"}
LINED = TEXTS | {name: (ROOT / name).read_text() for name in GUIDES}


def wide_lines(text):
    """Returns the lines of prose that a reader of the source would have to scroll."""
    lines = KEPT_WHOLE.sub("", text).splitlines()
    return [line for line in lines if len(line) > WIDE and " " in line.strip()]


@pytest.mark.parametrize("name", sorted(LINED))
def test_lines_of_prose_fit_a_window(name):
    assert wide_lines(LINED[name]) == []


def test_a_wide_line_would_be_seen():
    wide = "word " * 25
    assert wide_lines(f"{wide}\n\n```py\n{wide}\n```\n\n| {wide}|\n\n- {wide}\n") == [
        wide,
        f"- {wide}",
    ]


FIRST_SCREEN, LONGEST = 200, 30  # words


@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"autocast_design.md"}))
def test_sentences_on_the_first_screen_are_short(name):
    seen, long = 0, []
    for sentence in prose(TEXTS[name]):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        seen += len(words)
        long += [sentence] * (len(words) > LONGEST)
        if seen > FIRST_SCREEN:
            break
    assert long == []


def test_a_long_sentence_would_be_seen():
    text = "# Title\n\n```py\n" + "x " * 40 + "\n```\n\nShort. " + "word " * 31 + "end. Short."
    assert [len(s.split()) for s in prose(text)] == [2, 1, 32, 1]


def test_the_glossary_defines_ten_words_with_an_example_each():
    sections = re.split(r"^## ", TEXTS["glossary.md"], flags=re.MULTILINE)[1:-2]  # less two tables
    assert len(sections) == 10
    for section in sections:
        word, _, body = section.partition("\n")
        assert blocks(body, "python"), word
        assert "**" in body, word


def test_the_page_of_operations_is_autocasts_own_table():
    import operations

    assert operations.PAGE.read_text() == operations.page()  # else: python docs/operations.py


def exists(name):
    """Whether 'package.module.name' can be reached by imports and attributes."""
    first, *names = name.split(".")
    value = importlib.import_module(first)
    for part in names:
        first = f"{first}.{part}"
        try:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(first)
        except ModuleNotFoundError:
            return False
    return True


def test_every_class_and_function_of_the_reference_has_a_link_to_its_source():
    pycode = pytest.importorskip("sphinx.pycode")
    import conf

    missing = []
    for module in ["mpjax", *conf.modules()]:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, type) or inspect.isfunction(value):
                where = conf.defining_module(None, module, name) or value.__module__
                source = pycode.ModuleAnalyzer.for_module(where)
                source.find_tags()
                missing += [] if value.__name__ in source.tags else [(module, name, where)]
    assert missing == []


def test_links_to_jax_are_built_without_network_and_name_what_exists(tmp_path):
    sphinx = pytest.importorskip("sphinx.util.inventory")
    from inventory import PAGES as LINKED
    from inventory import write

    for project, path in write(tmp_path).items():
        with path.open("rb") as file:
            read = sphinx.InventoryFile.load(file, "https://x", lambda *parts: "/".join(parts))
        names = read["py:function"] if isinstance(read, dict) else read.data["py:function"]
        assert names.keys() == LINKED[project].keys()
        assert [name for name in names if not exists(name)] == []


def test_every_name_of_mpjax_that_a_page_writes_exists():
    written = r"(?<![\w./-])(mpjax(?:\.[a-zA-Z_]\w*)+)"
    names = {
        (page, name)
        for page in TEXTS.keys() - {"autocast_design.md"}  # which names files
        for name in re.findall(written, TEXTS[page])
    }
    assert len(names) > 100
    assert [(page, name) for page, name in sorted(names) if not exists(name)] == []


def test_the_page_of_numerics_explains_every_kind_of_cause():
    sources = {path.name: path.read_text() for path in (ROOT / "mpjax/numerics").glob("*.py")}
    (told,) = re.findall(r'\n    kind: str\n    """(.*?)"""', sources["_report.py"], re.DOTALL)
    kinds = re.findall(r"'(\w+)'", told)
    assert {*re.findall(r'Cause\("(\w+)"', "".join(sources.values()))} <= {*kinds}
    table = TEXTS["numerics.md"].partition("## Every cause\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == kinds


def test_the_page_of_reasons_explains_every_reason_of_explain():
    modules = [ast.parse((ROOT / "mpjax/_autocast" / path).read_text()) for path in SAY_WHY]
    said = {text for module in modules for text in _reasons(module)}
    never_shown = {"planned inside", "holds no float32", "combines comparisons"}  # have no row
    assert len(said) > 50
    told = TEXTS["api/reasons.md"]
    assert [text for text in sorted(said - never_shown) if text not in told] == []


SAY_WHY = ("decide/reasons.py", "decide/equations.py", "why/provenance.py")


def _reasons(module):
    """Yields the sentences among a module's constants, its `Reason`s and what it returns."""
    for node in ast.walk(module):
        given = None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason":
            given = node.args[0]
        elif isinstance(node, ast.Return) or (node in module.body and isinstance(node, ast.Assign)):
            given = node.value
        if isinstance(given, ast.JoinedStr):
            given = given.values[0]
        if isinstance(given, ast.Constant) and isinstance(given.value, str) and " " in given.value:
            yield given.value.removeprefix("; ").replace("{}", "...").strip()


def test_the_first_step_that_a_newcomer_runs_is_taken(tmp_path):
    for number, name in enumerate(("index.md", README)):
        head = TEXTS[name].partition('metrics["skipped_steps"])\n```')[0]
        code = blocks(f'{head}metrics["skipped_steps"])\n```\n', "python")
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run("\n".join(code), folder)
        assert done.stdout.splitlines()[-1].endswith(" 32768.0 0"), done


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the page shows JAX 0.12's operations")
def test_the_report_on_the_page_of_numerics_is_the_one_that_its_code_prints(tmp_path):
    head, _, rest = TEXTS["numerics.md"].partition("```text\n")
    (tmp_path / "train.py").write_text("\n".join(blocks(head, "python")))
    done = run_script(tmp_path / "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, printed = (
        [re.sub("took .*", "took", line).rstrip() for line in text.strip().splitlines()]
        for text in (rest.partition("```")[0], done.stdout)
    )
    assert shown == printed


def test_the_page_of_names_has_those_of_the_command(capsys):
    assert main(["names", "--json"]) == 0
    keys = ("param_dtype", "compute_dtype", "output_dtype")
    known = {
        row["name"]: (*(row[key] for key in keys), row["from"])
        for row in json.loads(capsys.readouterr().out)
    }
    told = {}
    row = r"^\| (`.*`) \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    for names, *cells in re.findall(row, TEXTS["migrate/index.md"], re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            that = str(mpjax.get_policy(name).param_dtype)
            short = {"that": that, "the machine's": "half"}
            told[name] = tuple(short.get(cell, cell) for cell in cells)
    # `p=f32,c=bf16,o=f32` is no name, but how any policy can be spelled.
    assert {name: row for name, row in told.items() if "=" not in name} == known


def test_the_page_of_jmp_names_all_that_differs():
    jmp = pytest.importorskip("jmp")
    missing = {name for name in dir(jmp) if name[0] != "_"} - {*dir(mpjax)}
    theirs, ours = (
        inspect.signature(module.DynamicLossScale).parameters for module in (jmp, mpjax)
    )
    missing |= theirs.keys() - ours.keys()
    assert missing == {"cast_to_half", "cast_to_full", "period", "factor"}
    first, *others = ours.values()
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert {other.kind for other in others} == {first.KEYWORD_ONLY}
    said, *_ = TEXTS["migrate/jmp.md"].split("<div")
    said = " ".join(said.split())
    assert [name for name in missing if f"`{name}`" not in said] == []
    assert "all but the first argument of `DynamicLossScale` need their names" in said


def test_every_page_of_the_index_is_translated():
    pages = {path.stem for path in (DOCS / "migrate").glob("*.md")} - {"index"}
    assert pages == TRANSLATED.keys()


def test_every_example_is_on_its_page():
    listed = re.findall(r"^\| `(\w+\.py)` \|", TEXTS["examples.md"], re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert 'pip install ".[examples]"' in TEXTS["examples.md"]


def of_the_program(answer):
    """Returns the parts of the doctor's answer that depend on no machine and no compiler."""
    kept = re.findall(r"^  (\S+ +yes +[\d.]+ MB +[\d.]+) ", answer, re.MULTILINE)
    less = re.findall(r"\d+% less kept", answer)
    return kept, less, answer[answer.index("What '") : answer.index("Take '")]


_CLOCK = r"By the clock:\n\n.*\n\npolicy .*"  # the head of what --run prints


def test_what_the_command_line_page_types_can_be_typed(tmp_path, monkeypatch, capsys):
    page = TEXTS["command_line.md"]
    (tmp_path / "train.py").write_text("\n".join(blocks(page, "python")))
    monkeypatch.chdir(tmp_path)
    asked, timed = blocks(page, "console")
    assert main(shlex.split(asked.removeprefix("$ python -m mpjax "))) == 0
    answered, *_ = blocks(page, "text")
    printed = capsys.readouterr().out
    if jax.__version_info__ >= (0, 12):  # an older JAX keeps other values for the backward pass
        assert of_the_program(answered) == of_the_program(printed)
    # Other numbers are those of one machine and compiler; the words are those of the command.
    compiled = r"^(The rest is as compiled for|No accelerator is needed for it|Take ').*\n"
    texts = [re.sub(compiled, "", text, flags=re.MULTILINE) for text in (answered, printed)]
    words = [re.sub(r"[\d.]+ ?(%|[kM]?B)?", "#", text).split() for text in texts]
    assert words[0] == words[1]
    assert main([*shlex.split(timed.removeprefix("$ python -m mpjax ")), "--budget", "1"]) == 0
    shown = re.findall(_CLOCK, page)
    printed = re.findall(_CLOCK, capsys.readouterr().out)
    assert [head.split() for head in shown] == [head.split() for head in printed] != []
    typed = re.findall(r"^\| `python -m mpjax ?([^`]*)`", page, re.MULTILINE)
    known = {command.name for command in COMMANDS}
    assert {line.split()[0] for line in typed if line} == known


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    found = re.findall(r"^\.\. auto\w+:: mpjax\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(mpjax.__all__)


def test_every_picture_is_used():
    text = "".join(TEXTS.values())
    pictures = {path.name for path in (DOCS / "images").iterdir()}
    drawn = (DOCS / "figures.py").read_text()  # what a picture is made from stands beside it
    unused = {n for n in pictures if f"images/{n}" not in text and f'"{n}").read_text' not in drawn}
    assert unused == set()
    assert {*re.findall(r"images/([\w.]+)", text)} - pictures == set()


@pytest.mark.ci
def test_the_pictures_can_be_drawn(tmp_path):
    done = run_script(DOCS / "figures.py", "--out", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " ".join(sorted(path.name for path in tmp_path.iterdir())) == (
        "attention.png beside.png block.png eight_bits.png explained.txt formats.png gpu.png "
        "gpu.txt gpu_shares.txt optimizers.png pod_report.png saves.png saves.txt"
    )
    # The landing page's numbers are those of the tables; where they changed, draw them again.
    for name in ("saves.txt", "gpu.txt", "gpu_shares.txt"):
        assert (tmp_path / name).read_text() == (DOCS / "images" / name).read_text()


@pytest.mark.parametrize("name", ["attention", "saves", "beside", "optimizers", "gpu"])
def test_pictures_show_what_the_tables_say_now(name, monkeypatch):
    """A picture holds the numbers it draws: where tables are renewed, draw it again."""
    monkeypatch.syspath_prepend(DOCS)
    figures = importlib.import_module("figures")
    told = {
        "attention": figures.attention_figure.text,
        "saves": lambda: figures.saves_text(figures.savings()),
        "beside": figures.beside_text,
        "gpu": figures.clocked_figure.text,
        "optimizers": figures.optimizers_text,
    }
    with Image.open(DOCS / "images" / f"{name}.png") as picture:
        assert picture.text["Description"] == told[name]()


@pytest.fixture
def clocked(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("clocked_figure")


def test_first_pages_say_what_the_clock_of_a_gpu_said(clocked):
    assert (DOCS / "images" / "gpu_shares.txt").read_text() == clocked.shares_text()
    assert f"\n\n{clocked.shares_text()}\n" in TEXTS[README]
    assert "```{include} images/gpu_shares.txt\n```" in TEXTS["index.md"]
    # Measured time stands first, counts second.
    text = TEXTS["index.md"]
    assert text.index("/gpu.png") < text.index("/saves.png") < text.index("times its bytes")


def test_the_page_of_a_gpu_names_what_no_run_has_reached(clocked):
    assert f"\n- {clocked.missing()}\n" in TEXTS["results/gpu.md"]


def test_shares_of_the_clock_are_its_tables(clocked):
    rows = json.loads((RESULTS / "gpu.json").read_text())["rows"]
    ms = {(r["network"], r["variant"]): r["ms"] for r in rows if r["part"] == "card 2"}
    told = clocked.shares_text()
    networks = [name for name, variant in ms if variant == "autocast bf16"]
    assert networks
    torch = {r["network"]: r for r in rows if r["part"] == "card 3" and "compiled" in r["variant"]}
    torch = {name: row for name, row in torch.items() if "autocast bf16" in row["variant"]}
    for name in networks:
        ours = ms[name, "autocast bf16"]
        cells = [f"{ours / ms[name, 'hand cast bf16']:.2f}", r"\d\.\d\d"]
        cells.append(f"{ours / torch[name]['ms']:.2f}" if name in torch else "–")
        row = r" \| ".join([clocked.NETWORKS[name], *cells])
        assert re.search(rf"^\| {row} \|$", told, re.MULTILINE)
    # A share of a time that varied by more than a quarter is not told without that.
    for name, row in torch.items():
        wide = row["high"] - row["low"] > row["ms"] / 4
        share = f"{ms[name, 'autocast bf16'] / row['ms']:.2f}"
        assert wide == (f"{clocked.NETWORKS[name]}'s {share} is uncertain" in told)


def test_shares_are_said_to_be_older_than_a_faster_step_until_they_are_measured_again(
    clocked, monkeypatch
):
    assert clocked.OLDER in clocked.sentence()
    monkeypatch.setattr(clocked, "JOINED", "2026-11-26")
    assert clocked.OLDER not in clocked.sentence()


def test_the_readme_says_of_how_many_networks_memory_was_counted():
    told = (DOCS / "images" / "saves.txt").read_text()
    (counted,) = re.findall(r"^\| kept for the backward pass \((\d+) networks\) ", told, re.M)
    assert f"shows what {counted} networks keep for the backward pass, under" in TEXTS[README]


def test_the_landing_pages_means_are_of_all_networks_of_their_table():
    table = (ROOT / "benchmarks" / "results" / "cpu.md").read_text()
    cells = re.findall(r"^\| (\w+) \| ([\w -]+) \| ([\d.]+)", table, re.MULTILINE)
    times = {(network, variant): float(ms) for network, variant, ms in cells}

    def mean(variant, base):
        shares = [times[n, variant] / times[n, base] for n, v in times if v == variant]
        return f"{statistics.geometric_mean(shares):.0%}"

    told = (DOCS / "images" / "saves.txt").read_text()
    hand, ours = mean("hand-cast", "f32"), mean("autocast", "f32")
    timed = len({network for network, variant in times if variant == "autocast"})
    assert f"| time of a step on a CPU ({timed} networks) | **{ours}** | – | {hand} |" in told
    (row,) = re.findall(r"\| the same, beside PyTorch \(2 networks\) \|(.*)", told)
    assert f" {mean('torch autocast bf16', 'torch f32')} " in row  # of its own float32
    for title in ("time of a step on a CPU", "the same, beside PyTorch"):
        (line,) = re.findall(rf"^- {title}: (.*)\.$", told, re.MULTILINE)
        asked = "torch f32" if "PyTorch" in title else "autocast"
        assert set(line.split(", ")) == {n for n, variant in times if variant == asked}


def test_what_the_pages_say_of_tracing_is_what_its_table_says():
    table = (ROOT / "benchmarks" / "results" / "tracing.md").read_text()
    row = re.compile(
        r"^\| (\d+) \| autocast \| .* \| ([\d.]+) \| \d+ \| ([\d.]+) \|$", re.MULTILINE
    )
    found = {int(depth): (both, float(text)) for depth, both, text in row.findall(table)}
    told = [f"{both} for {depth}" for depth, (both, _) in found.items()]
    first = told[0].replace(" for ", " times as long for ") + " unrolled transformer block"
    listed = ", ".join([first, *told[1:-1]]) + f" and {told[-1]}"
    assert listed in " ".join(TEXTS["faq.md"].split())
    assert {1, 10, 100} <= found.keys()
    assert all(text <= 1.3 for depth, (_, text) in found.items() if depth >= 10)


def test_what_the_page_says_of_eight_bits_is_what_its_tables_say():
    page, known = TEXTS["eight_bits.md"], json.loads((RESULTS / "eight_bits.json").read_text())
    weights, timings = known["weights"], known["timings"]
    layers = weights["layers"].values()
    whole = weights["bytes"]["float32"]
    assert f"| float32 | {whole:,} | {weights['score']['float32']:.5f} | |" in page
    for form in ("int8", "float8"):
        size, errors = weights["bytes"][form], sorted(layer[form] for layer in layers)
        row = f"| {form} | {size:,} ({whole / size:.2f} times less) | {weights['score'][form]:.5f} "
        assert f"{row}| {100 * errors[0]:.2f} to {100 * errors[-1]:.2f} % |" in page
    kept = {"all": "everywhere", "all but the head (the default)": "but for the head"}
    for told, name in (kept | {"the head alone": "in the head alone"}).items():
        rows = [weights["maps"]["forms"][f"{form} {name}"] for form in ("float8", "int8")]
        cells = [f"{1e3 * row['off']:.2f} ± {1e3 * row['error']:.2f}" for row in rows]
        assert f"| {told} | {' | '.join(cells)} |".replace("-", "−") in page
    names = {"bf16": "bfloat16", "int8": "int8, weights quantised each time"}
    for form, seconds in timings.items():
        assert f"| {names.get(form, form)} | {1e3 * seconds:.1f} |" in page


def test_what_the_pages_say_of_a_newcomers_minutes_is_what_the_table_says():
    (seconds,) = re.findall(r"all of it \| (\d+) \|", (RESULTS / "newcomer.md").read_text())
    words = {1: "About a minute", 2: "About two minutes", 3: "About three minutes"}
    assert words[round(int(seconds) / 60)] in TEXTS["results/starting.md"]


@pytest.mark.parametrize("name", [README, "faq.md"])
def test_what_a_step_reads_more_is_what_the_table_says(name):
    table = (RESULTS / "loss_scale.md").read_text()
    row = r"^\| \S+ \| mpjax\.(\w+) \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+) \|"
    rows = [(step, float(reads)) for step, reads in re.findall(row, table, re.MULTILINE)]
    assert {step for step, _ in rows} == {"make_train_step", "with_loss_scale"}
    assert all(0.8 < reads < 1.2 for step, reads in rows if step == "make_train_step")
    assert all(reads < 1.2 for _, reads in rows)
    assert "reads the gradients about once more" in " ".join(TEXTS[name].split())


@pytest.mark.slow
def test_the_pictures_of_the_numerics_page_are_drawn_from_what_its_code_finds(tmp_path):
    done = run_script(DOCS / "figures.py", "--page", "--out", str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"{image} images/(\S+)", TEXTS["numerics.md"])
    assert len(shown) == 4
    assert {path.name for path in tmp_path.iterdir()} == {*shown}
