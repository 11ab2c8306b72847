"""Every example runs in its short form, as a script, and explains its options."""

import re
import runpy
import sys

import pytest
from _places import ROOT
from _scripts import run

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

TINY_JOB = [
    *("--set", "steps=2", "--set", "sequence_length=8", "--set", "global_batch_size=8"),
    *("--set", "mesh.fsdp=-1", "--set", "model={width: 8, layers: 1, heads: 2, hidden: 16}"),
]

# What makes each example short, and what it must have written under --out.
SHORT = {
    "checkpoint_resume.py": (["--steps", "20"], []),
    "digits.py": (["--steps", "3", "--precision", "bf16-mixed", "--seed", "0"], ["digits.png"]),
    "equinox_mlp.py": (["--steps", "20"], ["equinox_mlp.png"]),
    "flax_linen.py": (["--steps", "20"], []),
    "flax_nnx.py": (["--steps", "10"], []),
    "gan_two_losses.py": (["--steps", "20"], ["gan_two_losses.png"]),
    "gradient_accumulation.py": (["--steps", "2"], []),
    "lm.py": (["--steps", "2", "--precision", "compact"], ["lm.png"]),
    "log_metrics.py": (["--steps", "21"], ["metrics.csv"]),
    "per_layer_policy.py": (["--steps", "3"], []),
    "plain_jax.py": (["--steps", "10"], []),
    "precision_names.py": ([], []),
    "train_pod.py": (
        ["--simulate", "2", *TINY_JOB],
        ["metrics.jsonl"],
    ),
    "underflow.py": (["--steps", "3"], ["underflow.png"]),
}

# What an example is there to show is in its table, also in the short form.
SHOWN = {
    "checkpoint_resume.py": (r"resumed at 10 .* 21 of 21", r"exit status -9"),
    "flax_linen.py": (r"linen's .* finite", r"the state's .* NaN"),
    "lm.py": (r"compact +\d\.\d+ +\d\.\d+ +0 +6\.48 ",),
    "log_metrics.py": (
        r"train/loss +\d",
        r"train/loss_scale +3.277e\+04",
        r"and [1-9]\d* statistics",
    ),
    "per_layer_policy.py": (r"all float16 .* not finite", r"Nearest: 'norm_0'"),
    "precision_names.py": (r"'bf16-mixed' +p=f32,c=bf16,o=f32", r"'bf16' means two things"),
}


def refusal(monkeypatch, name, *arguments):
    """The exit status of an example that stops before it computes: it needs no process of its own.

    A process would take seconds to import what this one has imported.
    """
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return ended.value.code


def test_every_example_has_a_short_form():
    assert sorted(SHORT) == EXAMPLES, "each file of examples/ needs its row in SHORT, and no other"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_short_form_runs_and_writes_what_it_promises(name, tmp_path):
    arguments, written = SHORT[name]
    out = ["--out", str(tmp_path / "out")] if written else []
    done = run(ROOT / "examples" / name, *arguments, *out, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it gained"
    assert [said for said in SHOWN.get(name, ()) if not re.search(said, done.stdout)] == []
    empty = [f for f in written if not (tmp_path / "out" / f).stat().st_size]
    assert empty == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_option_is_refused_and_the_usage_names_those_there_are(name, monkeypatch, capsys):
    assert refusal(monkeypatch, name, "--no-such-option") == 2
    said = capsys.readouterr().err
    assert "--no-such-option" in said
    arguments, written = SHORT[name]
    options = [a for a in arguments if a.startswith("--")] + ["--out"] * bool(written)
    assert [o for o in options if o not in said] == []


def test_help_says_what_an_example_shows(tmp_path):
    done = run(ROOT / "examples" / "plain_jax.py", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "What mixed precision adds to it is five lines" in done.stdout
    assert "--steps" in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("digits.py", ["--precision", "bf16"], "Type 'bf16-mixed'"),
        ("digits.py", ["--precision", "64-true"], "64-bit types are off"),
        ("digits.py", ["--steps", "0"], "got '0'; type a whole number from 1"),
        ("digits.py", ["--seed", "1", "--seeds", "2"], "not allowed with argument --seed"),
        ("underflow.py", ["--seed", "-1"], "got '-1'; type a whole number from 0"),
        ("underflow.py", ["--out", __file__], "is a file; type the name of a folder"),
    ],
)
def test_bad_value_is_refused_before_training(name, arguments, said, monkeypatch, capsys):
    assert refusal(monkeypatch, name, *arguments) == 2
    assert said in capsys.readouterr().err
