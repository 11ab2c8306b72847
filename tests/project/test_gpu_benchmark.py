"""`benchmarks/gpu.py`: what it does without a GPU, when something fails, and when time is short."""

import dataclasses
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from _places import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The modules of the benchmark, imported as its script imports them."""
    monkeypatch.syspath_prepend(FOLDER)
    used = ("clock", "device", "jobs", "kernels", "plans", "programs", "right", "tables")
    found = {name: importlib.import_module(f"gpu_cards.{name}") for name in (*used, "worker")}
    found["store"] = importlib.import_module("measure.store").Store
    found["networks"] = importlib.import_module("networks").NETWORKS
    return SimpleNamespace(**found)


def command(*words, out):
    script = [sys.executable, str(FOLDER / "gpu.py"), "--out", str(out), *words]
    return subprocess.run(script, capture_output=True, text=True, check=False)


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.ci
def test_without_a_gpu_it_ends_with_2_and_says_what_to_type(tmp_path):
    done = command(out=tmp_path)
    assert done.returncode == 2
    for text in ("no GPU that JAX can use", "pip install 'jax[cuda13]==", "--device cpu --size"):
        assert text in done.stderr
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cards", "1,9"), ["unknown card: 9", "2  the step", "Type e.g. --cards 0,1,2"]),
        (("--cards", "two"), ["unknown card: two", "Type e.g. --cards 0,1,2"]),
        (("--device", "cpu"), ["measures no GPU", "--device cpu --size tiny --out DIR"]),
        (("--minutes", "0"), ["'0': give 0.5 or more"]),
        (("--minutes", "soon"), ["'soon': give 0.5 or more"]),
    ],
)
def test_a_wrong_argument_ends_with_2_and_says_what_to_type(words, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", "nowhere", *words])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("gpu").main()
    printed = capsys.readouterr().err
    for text in said:
        assert text in printed


@pytest.mark.slow
def test_every_card_runs_on_a_cpu_and_a_second_run_measures_nothing(tmp_path):
    words = ("--device", "cpu", "--size", "tiny")
    before = _processor_seconds()
    done = command(*words, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _processor_seconds() - before < 240  # of two cores: whatever else they do meanwhile
    written = json.loads((tmp_path / "gpu.json").read_text())
    (run,) = written["runs"]
    assert run["left"] == []
    assert {row["part"] for row in written["rows"]} == {f"card {n}" for n in range(8)}
    wrong = [row for row in written["rows"] if "error" in row or row.get("right") is False]
    assert wrong == []
    table = (tmp_path / "gpu.md").read_text()
    assert all(f"### {n}. " in table for n in range(8))
    assert "autocast f16" in table
    absent = {row["part"] for row in written["rows"] if "absent" in row}
    assert absent <= {"card 3"}  # for want of PyTorch, here
    done = command(*words, "--cards", "0,2", out=tmp_path)
    assert "0 rows measured" in done.stdout


def _processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_what_xla_found_while_compiling_is_kept_for_the_next_process(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.device.tempfile, "gettempdir", lambda: str(tmp_path))
    own = "--xla_cpu_enable_fast_math=false"
    monkeypatch.setattr(os, "environ", {**os.environ, "XLA_FLAGS": own})
    for _ in range(2):  # once, although each process of a run starts the device
        gpu.device.start("cpu")
    first, kept = os.environ["XLA_FLAGS"].split()
    folder = Path(kept.removeprefix("--xla_gpu_per_fusion_autotune_cache_dir="))
    assert first == own
    assert folder.is_dir()
    assert (folder.parent, folder.name) == (tmp_path, f"gpu_kernels_{jax.__version__}")
    said = gpu.device.about(jax.devices()[0])["xla_flags"]
    assert said == f"{own} --xla_gpu_per_fusion_autotune_cache_dir=DIR"


# -- time and failures ---------------------------------------------------------------------------


class Fake:
    """A variant whose step takes a known time, or fails."""

    def __init__(self, seconds, fails=None):
        self.seconds, self.fails = seconds, fails
        self.facts, self.multiple = {"peak_bytes": 1}, 1
        self.is_open = False

    def open(self):
        self.is_open = True
        if self.fails and (error := self.fails()):
            raise error

    def run(self, steps):
        return steps * self.seconds

    def close(self):
        self.is_open = False


def test_a_variant_that_fails_is_a_row_and_the_others_are_measured(gpu):
    steps = {
        "good": Fake(0.002),
        "raises": Fake(0.002, lambda: TypeError("no such\nprecision")),
        "not compiled": ValueError("XLA refused"),
    }
    rows = gpu.clock.in_turns(steps, gpu.clock.Patience(sample_s=0.1, samples=3))
    assert list(rows) == list(steps)
    times = dict.fromkeys(("ms", "low", "high"), 2.0)
    assert rows["good"] == times | {"samples": 3, "steps": 50, "peak_bytes": 1}
    assert rows["raises"]["error"] == "TypeError: no such precision"
    assert rows["not compiled"]["error"] == "ValueError: XLA refused"
    assert not any(step.is_open for step in (steps["good"], steps["raises"]))


@pytest.mark.parametrize("fits_alone", [True, False])
def test_what_finds_no_memory_beside_others_is_measured_alone(gpu, fits_alone):
    other = Fake(0.001)

    def short():
        is_short = other.is_open or not fits_alone
        return RuntimeError("RESOURCE_EXHAUSTED: Out of memory") if is_short else None

    rows = gpu.clock.in_turns({"other": other, "large": Fake(0.004, short)}, gpu.clock.Patience())
    assert rows["other"]["ms"] == pytest.approx(1)
    assert rows["large"]["alone"]
    assert ("ms" in rows["large"], "out_of_memory" in rows["large"]) == (fits_alone, not fits_alone)


def test_kernels_of_a_gpus_streams_are_summed_by_kind(gpu):
    def event(tid, name, dur, **args):
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, "dur": dur, "args": args}

    def named(tid, name):
        return {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}

    kernels = [
        event(7, "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", 3e3, hlo_op="dot.1"),
        event(7, "ampere_bf16_gemm_bf16_128x64_tn", 3e3, hlo_op="dot.2"),
        event(7, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", 6e3, hlo_op="call.9"),
        event(7, "loop_add_fusion_12", 3e3, hlo_op="loop_add_fusion.12"),
        event(7, "loop_add_fusion_3", 1.5e3, hlo_op="loop_add_fusion.3"),
        event(8, "loop_add_fusion.12", 9e3, hlo_op="loop_add_fusion.12"),  # the same, by operation
        event(9, "python", 9e3),
    ]
    names = [named(7, "Stream #13(Compute)"), named(8, "XLA Ops"), named(9, "main")]
    found = gpu.kernels.summed(
        [*kernels, *names, {"ph": "M", "pid": 1, "name": "process_name"}, {}]
    )
    assert found == pytest.approx({"products": 2.0, "attention": 2.0, "loop_add_fusion": 1.5})
    on_a_cpu = gpu.kernels.summed([kernels[5], kernels[6]])
    assert on_a_cpu == pytest.approx({"loop_add_fusion": 3.0})
    with pytest.raises(ValueError, match="saw no kernel"):
        gpu.kernels.summed([kernels[6]])


# -- the order of work ---------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """A worker on fake jobs."""

    gpu: SimpleNamespace
    folder: Path
    seconds: float = 60.0

    def run(self, *jobs, id="a run"):
        store = self.gpu.store.read(self.folder / "gpu.json")
        store.begin(id=id, device="here", **dict.fromkeys(_HEAD, ""), driver={}, left=[])
        deadline = time.monotonic() + self.seconds
        worker = self.gpu.worker.Worker(store, self.folder, "here", deadline)
        assert worker.run(list(jobs)) == self.gpu.worker.DONE
        return worker

    def job(self, name, measure, seconds=1.0, code="one", **prepare):
        prepare = prepare or {"only": lambda: 1}
        variants = tuple(prepare)
        return self.gpu.jobs.Job(2, name, "tiny", variants, prepare, measure, code, seconds)


TIME = {"ms": 1.0, "low": 1.0, "high": 1.0}
_HEAD = ("command", "date", "commit", "tree", "versions", "platform_version", "host", "xla_flags")


def test_rows_are_written_job_by_job_and_a_later_run_goes_on(gpu, tmp_path):
    bench, measured = Bench(gpu, tmp_path), []

    def measure(prepared):
        measured.append(json.loads((tmp_path / "in_hand.json").read_text())["network"])
        if "broken" in prepared:
            raise KeyError("a mistake")
        return dict.fromkeys(prepared, TIME)

    def jobs(code="one"):
        return [
            bench.job("first", measure, code=code),
            bench.job("second", measure, broken=lambda: 1),
            bench.job("third", measure),
        ]

    store = bench.run(*jobs()).store
    assert measured == ["first", "second", "third"]
    rows = {row["network"]: row for row in store.part("card 2")}
    assert rows["second"]["error"] == "KeyError: 'a mistake'"
    assert rows["third"]["ms"] == 1
    assert "error: card 2, second, broken: KeyError" in (tmp_path / "gpu.md").read_text()
    measured.clear()
    bench.run(*jobs(), id="again")
    assert measured == ["second"]  # what failed is tried again; the rest stands
    measured.clear()
    bench.run(*jobs("changed"), id="after a change")
    assert measured == ["first", "second"]


def test_what_raises_while_it_is_prepared_reaches_its_own_variant(gpu, tmp_path):
    def broken():
        raise ValueError("does not compile")

    bench = Bench(gpu, tmp_path)
    job = bench.job("net", lambda prepared: prepared | {"good": TIME}, good=dict, bad=broken)
    rows = {row["variant"]: row for row in bench.run(job).store.part("card 2")}
    assert rows["bad"]["error"] == "ValueError: does not compile"
    assert rows["good"]["ms"] == 1


def test_what_has_no_time_is_left_out_and_said(gpu, tmp_path):
    bench = Bench(gpu, tmp_path, seconds=20.0)
    quick = bench.job("quick", lambda _: {"only": TIME})
    worker = bench.run(quick, bench.job("long", lambda _: {}, seconds=50.0))
    assert [row["network"] for row in worker.store.part("card 2")] == ["quick"]
    (line,) = worker.left
    assert line.startswith("card 2: long: ")
    assert line.endswith("one takes about 50 s")


def test_what_is_not_prepared_in_time_is_left_out(gpu, tmp_path):
    bench = Bench(gpu, tmp_path, seconds=gpu.worker.BETWEEN + 0.5)
    slow = bench.job("slow", lambda _: {}, seconds=0.1, only=lambda: time.sleep(3))
    worker = bench.run(slow)
    assert worker.store.part("card 2") == []
    assert worker.left[0].startswith("card 2: slow")


def test_nothing_is_prepared_while_something_is_measured(gpu, tmp_path):
    bench, at_work, overlaps = Bench(gpu, tmp_path), set(), []

    def prepare(name):
        def run():
            at_work.add(name)
            time.sleep(0.05)
            at_work.discard(name)

        return run

    def measure(prepared):
        for _ in range(5):
            overlaps.extend(at_work)
            time.sleep(0.01)
        return dict.fromkeys(prepared, TIME)

    jobs = [
        bench.job(name, measure, **{f"{name}{i}": prepare(f"{name}{i}") for i in range(3)})
        for name in "abcd"
    ]
    bench.run(*jobs)
    assert overlaps == []


def test_a_process_that_breaks_is_a_row_and_another_goes_on(gpu, tmp_path, monkeypatch):
    script = importlib.import_module("gpu")
    codes, started = [-11, gpu.worker.BROKEN, 0], []

    class Process:
        def __init__(self, words):
            started.append(words)
            bench = Bench(gpu, tmp_path)
            worker = bench.run(id="a run")
            if len(started) == 1:
                worker._take_in_hand(bench.job("net", None, one=dict, two=dict))

        def wait(self, seconds):
            return codes.pop(0)

    monkeypatch.setattr(script.subprocess, "Popen", Process)
    options = SimpleNamespace(out=tmp_path, device="gpu", size="full", torch="python")
    assert script.measure(options, [1, 2], "a run", "typed", time.monotonic() + 60) == 0
    assert len(started) == 3
    assert started[0][started[0].index("--cards") + 1] == "1,2"
    rows = gpu.store.read(tmp_path / "gpu.json").part("card 2")
    assert [row["variant"] for row in rows] == ["one", "two"]
    assert all("ended with -11 while this was measured" in row["error"] for row in rows)


def test_a_process_that_is_late_is_ended_and_what_is_left_is_said(
    gpu, tmp_path, monkeypatch, capsys
):
    script, killed = importlib.import_module("gpu"), []

    class Process:
        def __init__(self, words):
            Bench(gpu, tmp_path).run(id="a run").store.write()

        def wait(self, seconds=None):
            if not killed:
                raise subprocess.TimeoutExpired("gpu.py", seconds)
            return -9

        def kill(self):
            killed.append(True)

    monkeypatch.setattr(script.subprocess, "Popen", Process)
    options = SimpleNamespace(out=tmp_path, device="gpu", size="full", torch="python")
    assert script.measure(options, [4, 5], "a run", "typed", time.monotonic() + 60) == 0
    assert killed
    said = "cards 4, 5: the rest was not done when time was over"
    assert said in capsys.readouterr().out
    assert f"Left out: {said}" in (tmp_path / "gpu.md").read_text()


# -- what is said --------------------------------------------------------------------------------


def row(card, network, variant, ms, **more):
    place = {"part": f"card {card}", "network": network, "size": "full", "variant": variant}
    return {**place, "ms": ms, "low": ms * 0.99, "high": ms * 1.01, "peak_bytes": 100, **more}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [row(2, "net", "hand cast bf16", 1.0), row(2, "net", "autocast bf16", 1.1)],
            ["net, full: autocast takes 1.100 of hand cast bf16"],
        ),
        ([row(2, "net", "hand cast bf16", 1.0), row(2, "net", "autocast bf16", 1.015)], []),
        (
            [row(2, "net", "float32 highest", 2.0), row(2, "net", "autocast bf16", 1.0)],
            ["net, full: autocast is 2.00 × as fast as float32, not 2.5"],
        ),
        ([row(2, "net", "float32 highest", 3.0), row(2, "net", "autocast bf16", 1.0)], []),
        (
            [row(2, "n", "autocast bf16", 1.0), row(3, "n", "autocast bf16, compiled", 1.05)],
            ["n, full: 1.05 × as fast as compiled torch.autocast, not 1.1"],
        ),
        (
            [
                *(row(4, n, "all hints", 1.0) for n in ("a", "b")),
                row(4, "a", "without x", 1.2),
                row(4, "b", "without x", 1.0),
                row(4, "a", "without y", 1.2),
                row(4, "b", "without y", 1.0, peak_bytes=110),
            ],
            ["hint x: 1 % of time or 2 % of memory is saved on 1 of 2 networks, not on two"],
        ),
        (  # time in kernels, where it was measured
            [
                *(row(4, n, "all hints", 1.0, busy_ms=0.5) for n in ("a", "b")),
                *(row(4, n, "without x", 1.2, busy_ms=0.5) for n in ("a", "b")),
                *(row(4, n, "without y", 1.0, busy_ms=0.51) for n in ("a", "b")),
            ],
            ["hint x: 1 % of time or 2 % of memory is saved on 0 of 2 networks, not on two"],
        ),
        (
            [{**row(1, "gradients", "bf16", 1.0), "right": False}],
            ["WRONG: card 1, gradients, bf16: right False"],
        ),
    ],
)
def test_what_is_wrong_or_slower_than_expected_is_said(gpu, rows, said):
    assert list(gpu.tables.findings(rows)) == said


def test_products_stand_beside_the_peak_that_was_measured(gpu):
    rows = [
        row(0, "device", "bf16 product", 1.0, tflops=800.0),
        row(2, "net", "autocast bf16", 1.0, tflops=400.0),
        {**row(2, "net", "autocast bf16", 1.0, tflops=400.0), "size": "tiny"},
    ]
    found = gpu.tables.with_shares(rows)
    assert [each.get("share") for each in found] == [None, 0.5, None]


def test_every_network_of_the_plans_has_its_size(gpu):
    for plan in gpu.plans.PLANS.values():
        for chosen in (plan.steps, plan.peers, plan.hints, plan.eight_bits, plan.overheads):
            for name, size in chosen.items():
                assert gpu.networks[name](size).numbers["batch"] > 0


# -- what is counted and judged ------------------------------------------------------------------


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_gradients_of_convolutions_count_what_their_forward_pass_counts(gpu, strides):
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 9, 9, 3), (3, 3, 3, 5)))
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(x, kernel):
        out = jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=numbers)
        return jnp.sum(out**2)

    side = 7 if strides == (1, 1) else 4
    forward = 2 * 2 * side * side * 9 * 3 * 5
    assert gpu.programs.product_flops(loss, x, kernel) == forward
    assert gpu.programs.product_flops(jax.grad(loss, (0, 1)), x, kernel) == 3 * forward


def test_products_in_loops_count_as_often_as_they_run(gpu):
    def loss(w, x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, 6)[0]

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8), (4, 8)))
    assert gpu.programs.product_flops(loss, w, x) == 6 * 2 * 4 * 8 * 8


def test_a_recipe_that_swallows_a_nan_is_wrong(gpu, monkeypatch):
    seen = gpu.right._seen("bf16-mixed")
    assert seen == {"right": True, "clean": True, "missed": ""}
    swallow = lambda params, x: gpu_three(params, jnp.nan_to_num(x, posinf=1.0, neginf=1.0))  # noqa: E731
    gpu_three = gpu.right.three
    monkeypatch.setattr(gpu.right, "three", swallow)
    seen = gpu.right._seen("bf16-mixed")
    assert not seen["right"]
    assert "nan in input" in seen["missed"]
    assert "weight" not in seen["missed"]


@pytest.mark.standard_promotion("optax.apply_updates adds float32 to half parameters")
def test_a_rounding_that_the_compiler_drops_is_wrong(gpu):
    assert gpu.right._rounded(gpu.right.OWNERS["kahan"])["right"]
    nearest = gpu.right._rounded(lambda tx: tx)
    assert not nearest["right"]
    assert nearest["off"] == 1


def test_gradients_further_off_than_a_cast_by_hand_are_wrong(gpu):
    hand, ours = {"errors": [0.01, 0.02]}, {"errors": [0.01, 0.04]}
    gpu.right._judge(ours, hand)
    assert (ours["right"], hand["right"]) == (False, True)
    lost = {"errors": [float("nan"), 0.01]}
    gpu.right._judge(lost, hand)
    assert lost["right"] is False
