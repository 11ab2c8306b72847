"""The benchmark of models that others wrote: its script, its tables, and what pages say of them.

None of those packages is needed here: two models stand in for them.
"""

import importlib
import json
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from _places import ROOT

BENCHMARKS = ROOT / "benchmarks"
SCRIPT = BENCHMARKS / "public_models.py"
RESULTS = BENCHMARKS / "results" / "public_models.json"


@pytest.fixture
def script(monkeypatch):
    """Returns the script as a module, as Python finds it where it lies."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in list(sys.modules):
        if name.split(".")[0] in ("measure", "networks", "public_nets", "public_models"):
            monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("public_models")


# -- what is typed ---------------------------------------------------------------------------------


def typed(*words):
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_help_says_what_there_is():
    done = typed("--help")
    assert done.returncode == 0
    for word in ("-r benchmarks/public_models.txt", "bert", "spline_flow", "Exit codes"):
        assert word in done.stdout


WRONG = {
    "model": (["--models", "bert,resnet51"], r"unknown: resnet51; there are bert, gpt2,"),
    "part": (["--parts", "speed"], r"unknown: speed; there are errors, step, counts"),
    "target": (["--targets", "h200"], r"unknown: h200; there are cpu, h100"),
    "seeds": (["--seeds", "0"], r"'0' measures nothing; give 1 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_there_is_named_beside_what_is(name, script, monkeypatch, capsys):
    words, said = WRONG[name]
    monkeypatch.setattr(sys, "argv", ["public_models.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.arguments()
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_package_that_is_missing_says_what_to_type(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["public_models.py", "--models", "ode,equivariant,bayes"])
    found = {"diffrax": None, "e3nn_jax": None, "numpyro": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    with pytest.raises(SystemExit) as ended:
        script.arguments()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "not installed: diffrax, e3nn-jax." in said
    assert "Type pip install -r benchmarks/public_models.txt, or --models bayes" in said


def test_every_package_is_pinned_and_none_is_in_the_dev_extra(script):
    pinned = re.findall(r"^([\w-]+)==", (BENCHMARKS / "public_models.txt").read_text(), re.M)
    packages = {model.package for model in script.MODELS.values()}
    assert packages <= set(pinned)
    project = (ROOT / "pyproject.toml").read_text()
    ours = {"dm-haiku"}  # of our own tests
    assert {p for p in packages if re.search(rf'"{p}[=<>~"]', project)} <= ours
    for model in script.MODELS.values():
        module = BENCHMARKS / "public_nets" / f"{model.module}.py"
        assert f"\ndef {model.function}(size: str) -> Network:" in module.read_text()


# -- what is measured ------------------------------------------------------------------------------


def linear(script, *, has_switch):
    written = importlib.import_module("public_nets._written")

    def of(dtype):
        def loss(params, batch):
            out = jnp.tanh(batch["x"].astype(dtype) @ params["w"].astype(dtype))
            return written.mean_square(out, batch["y"], dtype)

        return loss

    def init(key):
        return {"w": jax.random.normal(key, (16, 8)) / 4}

    def sample(key):
        k1, k2 = jax.random.split(key)
        return {"x": jax.random.normal(k1, (32, 16)), "y": jax.random.normal(k2, (32, 8))}

    def plain(params, batch):
        return of(params["w"].dtype)(params, batch)

    def make(size):
        if has_switch:
            return written.switched("linear", size, of, init, sample)
        return written.unswitched("linear", size, plain, init, sample)

    return types.SimpleNamespace(
        package="numpy",
        module="_written",
        switch="dtype=" if has_switch else None,
        is_installed=True,
        is_counted=True,
        make=make,
    )


@pytest.mark.standard_promotion("a float64 reference reads float32 batches")
@pytest.mark.ci
def test_a_model_gives_rows_one_that_raises_a_row_with_its_error_and_neither_is_done_twice(
    script, monkeypatch, tmp_path
):
    def broken(size):
        raise TypeError(f"clip() got an unexpected keyword argument\nat size {size}")

    models = {
        "linear": linear(script, has_switch=True),
        "bare": linear(script, has_switch=False),
        "broken": types.SimpleNamespace(
            **{**vars(linear(script, has_switch=True)), "make": broken}
        ),
    }
    for module in (script, script.report):
        monkeypatch.setattr(module, "MODELS", models)
    out = tmp_path / "found.md"
    words = ["public_models.py", "--seeds", "3", "--out", str(out), "--models", ",".join(models)]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 1  # one raised
    text = out.read_text()
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert "TypeError: clip() got an unexpected keyword argument" in rows["broken"]
    assert "failed: broken." in text
    made = json.loads(out.with_suffix(".json").read_text())["rows"]
    errors = {(r["network"], r["variant"]): r for r in made if r["part"] == "errors"}
    assert {key for key in errors if key[0] != "broken"} == {
        ("linear", "own switch"),
        ("linear", "autocast"),
        ("bare", "autocast"),
    }
    for key, row in errors.items():
        if key[0] != "broken":
            assert len(row["gradient_errors"]) == 3
            assert all(1e-4 < e < 0.05 for e in row["gradient_errors"])  # bfloat16's
    steps = {r["network"]: r for r in made if r["part"] == "step"}
    assert (steps["linear"]["skips"], steps["linear"]["scale"]) == (0, 2.0**15)
    counts = {(r["network"], r["variant"]): r for r in made if r["part"] == "counts"}
    assert all(row["temporaries"] > 0 for key, row in counts.items() if key[0] != "broken")
    assert set(counts) == {*errors, ("linear", "f32"), ("bare", "f32"), ("broken", "f32")}
    # A second run measures only what failed.
    again = []
    attempt = script.attempt
    monkeypatch.setattr(script, "attempt", lambda job: again.append("") or attempt(job))
    assert script.main() == 1
    assert len(again) == sum("error" in row for row in made)


# -- what is said of it ----------------------------------------------------------------------------


def test_the_result_file_is_made_of_its_numbers(script):
    store = script.Store.read(RESULTS)
    assert script.report.document(store) == RESULTS.with_suffix(".md").read_text()
    models, packages, failed = script.report.tried(store)
    assert (models, packages) >= (12, 8)
    assert failed == []
    for row in store.part("errors"):
        assert len(row["gradient_errors"]) >= 8


def test_first_pages_say_what_the_table_says(script):
    store = script.Store.read(RESULTS)
    told = script.report.sentence(store)
    text = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert told in re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    models, packages, _ = script.report.tried(store)
    assert f"\n{models} [models of {packages} other packages]" in (ROOT / "README.md").read_text()


def test_the_page_says_of_t5_what_its_table_says(script):
    store, report = script.Store.read(RESULTS), script.report
    size = report.count_ratio(store, "h100", "t5", report.SWITCH, "bytes_accessed")
    text = " ".join((ROOT / "docs" / "results" / "public_models.md").read_text().split())
    assert f"T5 takes {size:.2f} times the bytes of its own switch." in text
    assert f"with `dtype=bfloat16`, {report.gradient_ratio(store, 't5'):.2f} times." in text


def test_what_it_saves_begins_with_models_of_others():
    text = (ROOT / "docs" / "results" / "index.md").read_text()
    assert text.index("results/public_models.md") < text.index("images/saves.txt")
    count = re.search(r"(\d+) models of other packages", text)
    assert count
    assert f"\n- {count[1]} models of " in RESULTS.with_suffix(".md").read_text()
