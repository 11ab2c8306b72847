"""The doctor: what it measures in a user's file, what it advises, what it says of bad input."""

import json
import re
import textwrap

import jax
import pytest

from mpjax.__main__ import main
from mpjax._doctor.doctor import POLICIES, Measured, _advise, diagnose
from mpjax._hardware import find_accelerator
from mpjax.pods import _one
from mpjax.pods._chips import GPUS, TPUS

MODEL = """
    import jax
    import jax.numpy as jnp

    def params():
        return {"w1": jnp.ones((64, 128)), "w2": jnp.ones((128, 64))}

    batch = {"x": jnp.ones((32, 64)), "train": True}

    def loss_fn(params, batch, scale=1.0):
        hidden = jax.nn.gelu(batch["x"] @ params["w1"])
        return jnp.mean((hidden @ params["w2"]) ** 2) * scale

    def with_aux(params, batch):
        return loss_fn(params, batch), batch["x"]

    def forward(x):
        return jnp.sin(x)

    def needs_values(params, batch):
        if batch["x"][0, 0] > 0:
            return loss_fn(params, batch)
        return 0.0

    def wrong_shapes(params, batch):
        return params["w2"] @ batch["x"]

    def keyword_only(params, *, batch):
        return loss_fn(params, batch)

    def says_more(params, batch):
        return loss_fn(params, batch), {"note": "fine"}

    class Loss:
        def value(self, params, batch):
            return loss_fn(params, batch)

    model = Loss()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "users_model.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def found(path, function, *arguments, device="h100", **options):
    row = find_accelerator(device)
    return diagnose(f"{path}:{function}", arguments, accelerator=row, **options)


def test_what_is_kept_for_the_backward_pass_is_counted_without_arguments(file):
    report = found(file, "loss_fn")  # of what the file calls by the names of its parameters
    assert [row.policy for row in report.rows] == list(POLICIES)
    assert [row.status for row in report.rows] == ["native"] * 3
    # In float32 x @ w1 and two results of gelu's interior, at least; in bfloat16 what gelu reads
    # and the two products' results, each of half the size; inputs and parameters never.
    f32, bf16, f16 = report.rows
    hidden, out = 32 * 128, 32 * 64
    assert 4 * (2 * hidden + out) <= f32.kept <= 4 * (6 * hidden + out)
    assert bf16.kept == f16.kept <= 0.6 * f32.kept
    assert min(row.temporaries for row in (f32, bf16, f16)) > 0


def test_it_advises_by_the_accelerator_and_by_what_is_saved(file):
    on_gpu = found(file, "loss_fn", policies=("32-true", "16-mixed"))
    assert on_gpu.taken == "16-mixed"
    assert "Take '16-mixed': " in on_gpu.advice[0]
    assert "less kept for the backward pass" in on_gpu.advice[0]
    assert "needs a loss scale" in on_gpu.advice[1]
    on_cpu = found(file, "loss_fn", device="cpu-plain", policies=("32-true", "bf16-mixed"))
    assert on_cpu.advice[0] == "Not fast on CPU without bfloat16 units: 'bf16-mixed'."
    assert on_cpu.advice[1] == "For speed take '32-true'."
    assert on_cpu.advice[2].startswith("For memory 'bf16-mixed': ")
    on_tpu = found(file, "loss_fn", device="v5e", policies=("32-true", "16-mixed"))
    assert on_tpu.advice[0] == "Not fast on TPU v5e: '16-mixed'."
    assert on_tpu.advice[1] == "There 'bf16-mixed' is: look at it with --policy bf16-mixed."
    nothing = found(file, "forward", "f32[8]", policies=("32-true", "bf16-mixed"))
    assert "saves no memory here" in nothing.advice[0]
    assert found(file, "loss_fn", policies=("32-true",)).advice[0].startswith("Nothing to compare")


def test_a_method_of_an_object_in_the_file_is_named_with_a_dot(file):
    report = found(file, "model.value", policies=("32-true",))
    assert (report.function, report.what) == ("model.value", "value and gradient")
    with pytest.raises(ValueError, match=r"has no function 'model.valu'\.\n  It has "):
        found(file, "model.valu")


MODELS = """
    import equinox as eqx
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    from flax import nnx

    x = jax.random.normal(jax.random.key(0), (8, 16))
    mlp = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(1))
    net = nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    dense, act = nn.Dense(4), jax.nn.relu

    def made():
        return mlp

    def params():
        return dense.init(jax.random.key(0), x)

    def of_mlp(mlp, x):
        return jnp.mean(jax.vmap(mlp)(x) ** 2)

    def of_made(made, x):
        return of_mlp(made, x)

    def of_net(net, x):
        return jnp.mean(net(x) ** 2)

    def of_dense(params, dense, x, act):
        return jnp.mean(act(dense.apply(params, x)) ** 2)
"""


@pytest.mark.usefixtures("short_samples")
@pytest.mark.parametrize("function", ["of_mlp", "of_made", "of_net", "of_dense"])
def test_models_of_libraries_are_arguments_and_their_arrays_are_differentiated(
    function, tmp_path, capsys
):
    path = tmp_path / "users_models.py"
    path.write_text(textwrap.dedent(MODELS))
    words = ["doctor", f"{path}:{function}", "--policy", "bf16-mixed", "--json"]
    assert main([*words, "--run", "--budget", "60"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["what"] == report["measured"]["what"] == "value and gradient"
    f32, bf16 = report["measured"]["rows"]
    assert f32["gradient_error"] < 2**-20 < bf16["gradient_error"] < 2**-4


def row(policy, kept, temporaries=100, status="native"):
    return Measured(policy, status, kept, None, temporaries, 0.0)


def test_of_what_saves_alike_the_accelerators_choice_is_taken():
    gpu, old_gpu = find_accelerator("h100"), find_accelerator("v100")
    alike = [row("32-true", 100), row("16-mixed", 50), row("bf16-mixed", 51)]
    assert _advise(alike, gpu)[0] == "bf16-mixed"
    assert _advise(alike, old_gpu)[0] == "16-mixed"
    assert _advise([*alike[:2], row("bf16-mixed", 80)], gpu)[0] == "16-mixed"


def test_what_becomes_more_is_said_beside_what_becomes_less():
    rows = [row("32-true", 100), row("bf16-mixed", 50, 130)]
    _, advice = _advise(rows, find_accelerator("h100"))
    less = "50% less kept for the backward pass"
    more = "30% more temporary memory as compiled here"
    assert advice == [f"Take 'bf16-mixed': {less}, but {more}."]


def test_the_counts_are_those_of_the_compiler_that_is_given(file):
    asked = []

    def compiler(fun, args):
        asked.append(jax.tree.map(lambda x: x.shape, jax.eval_shape(fun, args)))
        return 10, 100 - 40 * (len(asked) > 1), 0.5

    report = found(file, "loss_fn", policies=POLICIES[:2], compiler=("an H100", compiler))
    assert [(row.bytes_accessed, row.temporaries) for row in report.rows] == [(10, 100), (10, 60)]
    assert report.to_dict()["compiled_for"] == "an H100"
    assert "40% less temporary memory as compiled for an H100" in report.advice[0]
    assert asked[0] == ((), {"w1": (64, 128), "w2": (128, 64)})  # the loss and its gradients


@pytest.mark.parametrize("key", sorted({chip.key for chip in (GPUS | TPUS).values()}))
def test_a_chip_with_a_compiler_has_a_topology(key):
    assert _one.topology_of(key).chip.key == key
    assert _one.topology_of(key).num_hosts == 1


def test_what_is_missing_for_a_device_is_said_with_what_to_install(file, capsys, monkeypatch):
    def missing(topology):
        raise ModuleNotFoundError("topology '1xh100': its compiler, c, is missing.\n  Type pip c.")

    monkeypatch.setattr(_one, "compiler_for", missing)
    asked = ["doctor", f"{file}:forward", "f32[8]", "--policy", "32-true", "--device"]
    assert main([*asked, "h100"]) == 0
    text = "compiled for cpu: the device's compiler, c, is missing.\nType pip c.\n"
    assert text in capsys.readouterr().out
    assert main([*asked, "v100"]) == 0
    assert "cpu: the compiler for sm_70 runs on such a device only.\n" in capsys.readouterr().out


@pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces")
@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param("h100", "NVIDIA H100 80GB HBM3", marks=pytest.mark.gpu_compiler),
        pytest.param("v5e", "TPU v5e", marks=pytest.mark.tpu_compiler),
    ],
)
def test_an_installed_compiler_counts_for_its_device(file, capsys, device, name):
    asked = ["doctor", f"{file}:loss_fn", "--policy", "bf16-mixed", "--device", device]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["compiled_for"] == name
    f32, bf16 = answer["policies"]
    assert 0 < bf16["temporaries"] <= f32["temporaries"]
    assert bf16["bytes_accessed"] > 0


def test_a_device_without_a_row_gets_no_verdict():
    rows = [row("32-true", 100), row("bf16-mixed", 50, status="unknown")]
    _, advice = _advise(rows, find_accelerator("v5e"))
    assert advice[0] == "Whether 'bf16-mixed' is fast on TPU v5e is not known: time it."


def test_a_loss_with_aux_is_differentiated_and_what_is_no_loss_is_not(file):
    assert found(file, "with_aux", policies=("32-true",)).what == "value and gradient"
    report = found(file, "forward", "f32[8, 4]", policies=("32-true",))
    assert (report.what, report.rows[0].kept) == ("value", 0)


def test_the_command_prints_a_table_and_json(file, capsys):
    argv = ["doctor", f"{file}:loss_fn", "--policy", "bf16-mixed", "--device", "v5e"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "loss_fn: value and gradient" in out
    assert re.search(r"\n  bf16-mixed +yes +[\d.]+ kB +0\.\d\d ", out)
    assert re.search(r"\n  bfloat16 +yes +matrix units take it", out)
    assert "products: 2 bf16" in out
    assert "Take 'bf16-mixed': " in out
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["taken"], report["device"]) == ("bf16-mixed", "v5e")
    assert [row["policy"] for row in report["policies"]] == ["32-true", "bf16-mixed"]


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (
            "needs_values",
            (),
            r"needs_values cannot be jitted: it needs the value of an array .*\n"
            r"  At users_model.py:21: if batch\[\"x\"\]\[0, 0\] > 0:\n  Use jnp.where",
        ),
        (
            "wrong_shapes",
            (),
            r"(?s)wrong_shapes fails on these arguments: Type.*py:26: return",
        ),
        ("los_fn", (), r"has no function 'los_fn'\.\n  It has loss_fn"),
        (
            "loss_fn",
            ("parms", "batch"),
            r"has no 'parms'\.\n  Allowed: .*\n  Did you mean params\?",
        ),
        ("batch", (), r"'batch' in .*users_model.py is a dict, and no function\.\n  It has "),
        ("Loss", (), r"'Loss' in .* is a class, and no function"),
        (
            "loss_fn",
            ("params",),
            r"loss_fn\(params, batch, scale=1.0\) does not take 1 argument: missing .*'batch'",
        ),
        ("forward", ("f32[8]", "f32[8]"), r"does not take 2 arguments: too many .*\n  Allowed: "),
        ("keyword_only", (), r"argument: 'batch'\.\n.*\n.* write a function around"),
        ("says_more", (), r"cannot be jitted: it returns a str at '1/note'\.\n  Return arrays"),
        ("forward", (), r"forward takes x; the file has no x\.\n.*\n.*'f32\[8,128\]'"),
        ("forward", ("g32[8]",), r"'g32\[8\]' has no known dtype\.\n  Allowed: f32, f16"),
    ],
)
def test_bad_input_is_named(file, function, arguments, text):
    with pytest.raises(ValueError, match=text):
        found(file, function, *arguments)


BROKEN = {
    "unfinished.py": "def f(x:\n",
    "lacking.py": "\nimport nothing_here\n",
    "script.py": "import sys\n\nsys.exit(3)\n",
}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("users_mode.py:f", r"there is no file .*users_mode.py\.\n  Did you mean users_model.py"),
        ("no_such_module:f", r"No module named 'no_such_module'"),
        (
            "unfinished.py:f",
            r"cannot be imported: SyntaxError: .*\n  At unfinished.py:1: def f\(x:",
        ),
        ("lacking.py:f", r"No module named 'nothing_here'\n  At lacking.py:2: import nothing_here"),
        ("script.py:f", r"it is a script\.\n  At script.py:3: sys.exit\(3\)\n  Put .* '__main__'"),
        ("users_model.py", r"'.*users_model.py' names no function in a file\.\n  Type FILE.py"),
    ],
)
def test_a_target_that_is_not_there_is_named(file, capsys, target, text):
    for name, text_of_file in BROKEN.items():
        (file.parent / name).write_text(text_of_file)
    is_path = ".py" in target
    code = main(["doctor", f"{file.parent}/{target}" if is_path else target])
    assert code == 2
    with pytest.raises(ValueError, match=text):
        raise ValueError(capsys.readouterr().err)


def test_an_unknown_policy_is_refused_before_anything_is_compiled(file):
    with pytest.raises(ValueError, match="get_policy: unknown policy 'bf15-mixed'"):
        found(file, "loss_fn", policies=("32-true", "bf15-mixed"), track=lambda _: 1 / 0)


ADVISED = {
    "multiply makes f32 of bf16": """
    import jax.numpy as jnp
    import numpy as np
    x = jnp.ones((4, 8), jnp.bfloat16)
    def loss_fn(x):
        y = x * np.float32(2)
        return jnp.sum(jnp.tanh(y))
    """,
    "the function itself asks for bf16": """
    import jax
    import jax.numpy as jnp
    w, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    def loss_fn(w, x):
        p = jax.nn.sigmoid(x @ w).astype(jnp.bfloat16)
        return -jnp.mean(jnp.log1p(-p.astype(jnp.float32)))
    """,
}


@pytest.mark.standard_promotion("promotion is what is looked for")
@pytest.mark.parametrize("said", ADVISED)
def test_promotions_and_roundings_that_no_policy_mends_are_among_the_advice(said, tmp_path):
    path = tmp_path / "users_loss.py"
    path.write_text(textwrap.dedent(ADVISED[said]))
    advice = found(path, "loss_fn").advice
    assert any(line.startswith(f"users_loss.py:6: {said}") for line in advice)


# -- by the clock --------------------------------------------------------------------------------


@pytest.fixture
def short_samples(monkeypatch):
    """A slow machine does not spend the budget, and a quick one is soon done."""
    monkeypatch.setattr("mpjax._doctor.measure.SAMPLE_SECONDS", 0.01)


@pytest.mark.usefixtures("short_samples")
def test_run_measures_each_policy_and_says_which_to_take(file, capsys):
    words = ["doctor", f"{file}:loss_fn", "--run", "--budget", "60", "--policy", "bf16-mixed"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "By the clock:\n\nloss_fn: value and gradient, measured on " in printed
    assert "bf16-mixed  " in printed.partition("By the clock")[2]
    assert main([*words, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert [row["policy"] for row in measured["rows"]] == ["32-true", "bf16-mixed"]
    assert all(row["samples"] for row in measured["rows"])
    assert measured["taken"] in ("32-true", "bf16-mixed")


def test_without_run_nothing_is_measured(file, capsys, monkeypatch):
    monkeypatch.setattr("mpjax.measure", None)
    assert main(["doctor", f"{file}:loss_fn", "--json"]) == 0
    assert "measured" not in json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("short_samples")
def test_a_floating_shape_is_filled_with_numbers(file, capsys):
    words = ["doctor", f"{file}:forward", "f32[8,128]", "--run", "--budget", "60", "--json"]
    assert main(words) == 0
    assert all(row["samples"] for row in json.loads(capsys.readouterr().out)["measured"]["rows"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("forward", "i32[8]"), "forward cannot be run on i32[8]: its numbers matter"),
        (("forward", "f32[8]", "--device", "h100"), "--run measures this machine, not --device"),
        (("forward", "f32[8]", "--budget", "0"), "budget=0.0 leaves no time"),
        (("keyword_only",), "keyword-only"),
    ],
)
def test_what_run_cannot_run_ends_with_2_and_says_why(file, capsys, words, said):
    function, *rest = words
    assert main(["doctor", f"{file}:{function}", *rest, "--run"]) == 2
    assert said in capsys.readouterr().err


TRAINS = {
    "loop": "for step in range(9):\n    print('trained')\n",
    "while": "import time\nwhile True:\n    print('trained')\n",
    "main": "def main():\n    print('trained')\nmain()\n",
    "module's": "import types\nx = types.SimpleNamespace(fit=lambda: print('trained'))\nx.fit()\n",
    "nested": "try:\n    for i in range(3):\n        print('trained')\nfinally:\n    pass\n",
    "else": "if __name__ == '__main__':\n    pass\nelse:\n    while 1:\n        print('trained')",
    "not main": "if __name__ != '__main__':\n    while True:\n        print('trained')\n",
}
LOADS = {
    "guarded": "if __name__ == '__main__':\n    for i in range(3):\n        print('trained')\n",
    "table": "names = []\nfor name in ('a', 'b'):\n    names.append(name)\n",
    "sum": "total = 0\nfor i in range(3):\n    total += i\n",
    "in a function": "def train():\n    for i in range(3):\n        print('trained')\n",
}


@pytest.mark.parametrize("name", [*TRAINS, *LOADS])
def test_a_script_is_refused_before_it_trains(name, tmp_path, capsys):
    path = tmp_path / "users_script.py"
    path.write_text("def forward(x):\n    return x * 2\n\n" + (TRAINS | LOADS)[name])
    code = main(["doctor", f"{path}:forward", "f32[8]"])
    printed = capsys.readouterr()
    assert "trained" not in printed.out
    assert code == (2 if name in TRAINS else 0)
    if name in TRAINS:
        assert "is a script: importing it would run" in printed.err
        assert "Put what it runs under `if __name__ == '__main__':`" in printed.err
