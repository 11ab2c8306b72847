"""The command line: what it prints, as text and as JSON, and its exit codes."""

import json
import os
import subprocess
import sys

import jax
import pytest

import mpjax
from mpjax import __main__ as command_line
from mpjax import get_policy
from mpjax.__main__ import COMMANDS, main
from mpjax._hardware import SUPPORT, find_accelerator
from mpjax._policies.policy import POLICY_NAMES
from mpjax._policies.quantized_policy import NAMES


def run(capsys, *argv):
    """Returns the exit code and what was printed; nothing may go to stderr."""
    code = main(argv)
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, printed.out


def test_without_a_command_it_tells_of_this_machine(capsys):
    row = find_accelerator()
    code, out = run(capsys)
    assert code == 0
    assert f"mpjax {mpjax.__version__}, JAX {jax.__version__}" in out
    assert f"This machine: {len(jax.devices())} x {row.name} ({row.key})" in out
    assert f"Pick: {row.policy!r}, as in mpjax.get_policy({row.policy!r})." in out
    assert all(key in out for key in SUPPORT)


def test_it_runs_as_a_module_and_prints_plain_text_into_a_pipe():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mpjax", "check", "16-mixed", "--device", "v5e"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        "'16-mixed' on TPU v5e: slow\n"
        "  param, output float32 is native: stored and added, not multiplied\n"
        "  compute float16 is slow: the matrix unit takes bfloat16; no faster than that, "
        "and needs loss scaling\n"
        "  Type 'bf16-mixed' instead.\n"
    )


def test_a_reader_that_stops_reading_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mpjax", "names"], stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")  # what a shell gives for SIGPIPE


@pytest.mark.parametrize("argv", [["--json"], ["--json", "names"], ["names", "--json"]])
def test_json_may_stand_before_the_command_or_after_it(capsys, argv):
    code, out = run(capsys, *argv)
    assert code == 0
    assert json.loads(out)


def test_machine_as_json(capsys):
    _, out = run(capsys, "--json")
    told = json.loads(out)
    assert told["versions"] == {"mpjax": mpjax.__version__, "jax": jax.__version__}
    assert told["machine"]["platform"] == "cpu"
    assert told["machine"]["device_count"] == len(jax.devices())
    assert told["machine"]["name"] == find_accelerator().key
    assert [row["name"] for row in told["table"]] == list(SUPPORT)


def test_table_has_a_line_for_each_accelerator(capsys):
    code, out = run(capsys, "table")
    words = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  ")}
    assert code == 0
    assert set(SUPPORT) <= set(words)
    v5e, turing = (" ".join(words[name][-8:]) for name in ("v5e", "sm_75"))
    assert v5e == "yes yes slow slow slow yes yes bf16-mixed"
    assert turing == "yes slow yes slow slow slow yes 16-mixed"


def test_table_gives_the_reasons_for_those_that_are_named(capsys):
    code, out = run(capsys, "table", "v5litepod-16", "T4")
    assert code == 0
    assert "TPU v5e (v5e): pick 'bf16-mixed'" in out
    assert "NVIDIA Turing (T4, RTX 20) (sm_75): pick '16-mixed'" in out
    assert "emulated with pairs of float32" in out


def test_table_as_json(capsys):
    _, out = run(capsys, "table", "h100", "--json")
    (row,) = json.loads(out)
    assert (row["name"], row["pick"]) == ("sm_90", "bf16-mixed")
    assert row["dtypes"]["float8_e5m2"]["status"] == "native"


def test_names_lists_every_name_with_what_it_means(capsys):
    code, out = run(capsys, "names", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == [*(row.name for row in POLICY_NAMES), *NAMES]
    for row in rows:
        assert row["from"]
        fields = [field for field in row if field not in ("name", "from")]
        assert fields[:3] == ["param_dtype", "compute_dtype", "output_dtype"]
        assert get_policy(row["name"]).to_dict() == {field: row[field] for field in fields}
    _, text = run(capsys, "names")
    assert all(row["name"] in text for row in rows)
    assert "Int8CurrentScaling()" in text
    assert "'bf16' alone is refused" in text


@pytest.mark.parametrize(
    ("policy", "device", "code"),
    [
        ("bf16-mixed", "v5e", 0),
        ("p=f32,c=bf16,o=f32", "h100", 0),
        ("16-mixed", "t4", 0),
        ("16-mixed", "tpu7x-16", 1),
        ("bf16-mixed", "t4", 1),
        ("bf16-mixed", "cpu-plain", 1),
        ("64-true", "a100", 2),
    ],
)
def test_check_answers_with_its_exit_code(capsys, policy, device, code):
    got, out = run(capsys, "check", policy, "--device", device)
    assert got == code
    assert out.startswith(f"'{policy}' on {find_accelerator(device).name}: ")
    got, out = run(capsys, "check", policy, "--device", device, "--json")
    assert (got, json.loads(out)["ok"]) == (code, code == 0)


def test_check_without_a_device_asks_this_machine(capsys):
    code, out = run(capsys, "check", "32-true")
    assert code == 0
    assert find_accelerator().name in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["check", "bf16-mixd"], "Did you mean bf16-mixed?"),
        (["doctor", "a.py:f", "--policy", "bf17"], "Did you mean --policy bf16-mixed?"),
        (["doctor", "a.py:f", "--policy", "zzz"], "E.g. --policy bf16-mixed."),
        (["check", "bf16"], "Type 'bf16-mixed'"),
        (["check", "int8"], "get_policy: int8 is no dtype to compute in."),
        (["check", "32-true", "--device", "h10"], "mpjax check: unknown device 'h10'."),
        (["table", "v5f"], "mpjax table: unknown device 'v5f'."),
    ],
)
def test_a_wrong_name_is_answered_on_stderr(capsys, argv, said):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_a_backend_that_does_not_start_is_told(capsys, monkeypatch):
    def no_devices():
        raise RuntimeError("Unknown backend: 'nosuch'")

    monkeypatch.setattr(jax, "devices", no_devices)
    assert main([]) == 2
    assert "JAX starts no backend: Unknown backend" in capsys.readouterr().err
    assert main(["table"]) == 0  # needs none


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nosuch"], "'nosuch'"),
        (["check"], "required: POLICY\n"),
        (["table", "--nosuch"], "--nosuch"),
        (["doctor"], "required: FILE:FUNCTION\n"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, argv, said):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    printed = capsys.readouterr().err
    assert "usage: python -m mpjax" in printed
    assert said in printed


@pytest.mark.parametrize("argv", [[], *([command.name] for command in COMMANDS)], ids=str)
def test_help_everywhere(capsys, argv):
    with pytest.raises(SystemExit, match="0"):
        main([*argv, "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m mpjax")
    assert "--json" in out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mpjax {mpjax.__version__}\n"


def test_a_terminal_gets_a_table_by_rich_in_which_names_stay_whole(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out = run(capsys, "table")
    assert code == 0
    assert "───" in out
    words = set(out.split())
    assert set(SUPPORT) <= words
    assert {row.policy for row in SUPPORT.values()} <= words


def test_a_terminal_without_rich_gets_plain_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    _, out = run(capsys, "table", "v5e")
    assert "  dtype          fast  why" in out


@pytest.mark.parametrize(
    ("policy", "device"),
    [("bf16-mixed", "v100"), ("16-mixed", "v5e"), ("float8_from_mixed_bfloat16", "a100")],
)
def test_json_of_a_check_holds_names_that_can_be_used_as_they_are(capsys, policy, device):
    _, out = run(capsys, "check", policy, "--device", device, "--json")
    told = json.loads(out)
    assert mpjax.get_policy(told["policy"]) == mpjax.get_policy(policy)
    names = [name for finding in told["findings"] for name in finding["instead"]]
    assert names
    for name in names:
        mpjax.get_policy(name)
    assert "'" not in out
