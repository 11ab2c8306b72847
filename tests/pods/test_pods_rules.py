"""The rules of the check: programs of different make, right and with one mistake each.

`PYTEST -m ''` with the compilers installed tries all of them on H100 and v5e too.
"""

import dataclasses

import _pods_programs
import jax
import jax.numpy as jnp
import pytest
from _hlo_text import encoded, parsed
from _pods_programs import PROGRAMS, spec
from jax.sharding import PartitionSpec as P

from mpjax.pods import (
    CHECKS,
    _collectives,
    _copies,
    _hlo,
    _loops,
    _read,
    check,
    get_topology,
    with_sharding,
)
from mpjax.pods._proto import Message

pytestmark = [
    pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces"),
    pytest.mark.standard_promotion("optax and flax mix dtypes when they are traced"),
]

# Program, mistake, the check that finds it, whether it is an error, part of the culprit.
MISTAKES = [
    ("cnn", "never reduced", "copies", True, "state/0/convolutions/1"),
    ("cnn", "one is never reduced", "copies", True, "state/0/dense"),
    ("cnn", "a local decision", "copies", True, "state/0/"),
    ("cnn", "reduced in bf16", "gradients", True, "state/0/convolutions/0"),
    ("cnn", "reduced in each micro-batch", "gradients", False, "state/0/"),
    ("cnn", "whole batch", "batch", False, "images"),
    ("cnn_jit", "whole batch", "batch", False, "batch"),
    ("transformer", "never reduced", "copies", True, "params/"),
    ("transformer", "activations in f32", "activations", True, "_pods_programs.py"),
    ("transformer", "activations gathered whole", "activations", False, "_pods_programs.py"),
    ("fsdp", "momentum in a list, whole", "replication", True, "state/1/0"),
    ("laid_out", "momentum on fewer axes", "replication", True, "state/trace/split/kernel"),
    ("laid_out", "momentum turned", "replication", False, "state/trace/split/kernel"),
    ("fsdp", "not donated", "donation", True, "state/1/0"),
    ("fsdp", "whole batch", "batch", False, "x"),
    ("dropout", "own key is kept", "copies", True, "state/1"),
    ("pipeline", "never reduced", "copies", True, "w"),
    ("pipeline", "activations in f32", "activations", True, "_pods_programs.py"),
    ("experts", "router is never reduced", "copies", True, "params/router"),
    ("experts", "rows are sent in f32", "activations", True, "_pods_programs.py"),
    ("context", "reduced over one axis", "copies", True, "params/0"),
    ("context", "keys are gathered in f32", "activations", True, "_pods_programs.py"),
]
RIGHT = [name for name in PROGRAMS if name not in ("cnn_jit", "micro_batches")]
QUICK = {"dropout", "fsdp", "laid_out", "context", "pipeline", "transformer"}
THERE = {
    "v5e-8": [pytest.mark.tpu_compiler, pytest.mark.slow],
    "h100-8": [pytest.mark.gpu_compiler, pytest.mark.slow],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", ["cpu:8", *(pytest.param(t, marks=THERE[t]) for t in THERE)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_has_no_findings(name, topology):
    report = _pods_programs.check(name, topology)
    assert report.findings == (), str(report)


def marks_of(topology, name, mistake, *_):
    quick = name in QUICK or (name, mistake) == ("cnn", "never reduced")
    return THERE.get(topology, [] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    ("topology", "name", "mistake", "expected", "error", "culprit"),
    [
        pytest.param(topology, *row, marks=marks_of(topology, *row))
        for topology in ("cpu:8", *THERE)
        for row in MISTAKES
    ],
)
def test_a_mistake_is_found(topology, name, mistake, expected, error, culprit):
    report = _pods_programs.check(name, topology, mistake)
    found = report.found(expected)
    assert any(culprit in finding.culprit for finding in found), str(report)
    assert {finding.severity for finding in found} == {"error" if error else "warning"}
    assert report.exit_code >= (2 if error else 1)


# -- convolutions under jit ------------------------------------------------------------------------


def test_what_a_gpu_adds_in_16_bits_behind_a_convolution_is_said_on_virtual_devices():
    report = _pods_programs.check("cnn_jit", "cpu:8")
    kernels = [finding.culprit for finding in report.findings]
    assert kernels == [f"state/params/convolutions/{i}" for i in (0, 1)]
    assert {f.severity for f in report.findings} == {"warning"}
    assert all("on a GPU" in f.what and "inside shard_map" in f.fix for f in report.findings)


@pytest.mark.gpu_compiler
@pytest.mark.slow
def test_a_gpu_adds_each_kernels_gradient_in_16_bits():
    report = _pods_programs.check("cnn_jit", "h100-8")
    kernels = [finding.culprit for finding in report.found("gradients")]
    assert kernels == [f"state/params/convolutions/{i}" for i in (0, 1)]
    assert all("inside shard_map" in finding.fix for finding in report.findings)
    assert report.exit_code == 2


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_a_tpu_adds_each_kernels_gradient_in_float32():
    assert _pods_programs.check("cnn_jit", "v5e-8").findings == ()


def test_an_argument_that_is_gathered_is_named_where_no_line_is():
    report = _pods_programs.check("micro_batches", "cpu:8", "split along the loop")
    (finding,) = report.found("activations")
    named = finding.culprit == "images" and "Split images along another axis" in finding.fix
    assert named or "_pods_programs.py:" in finding.culprit  # before JAX 0.12 XLA keeps the loop's


# -- what was not judged ---------------------------------------------------------------------------


def marks(report):
    lines = (line for line in str(report).splitlines() if line[2:4] in ("ok", "--", "!!", "??"))
    by_text = {line[5:]: line[2:4] for line in lines}
    return {key: by_text[text] for key, text in CHECKS.items()}


def test_what_nothing_was_seen_of_is_not_ok():
    report = _pods_programs.check("cnn", "cpu:8", "whole batch")
    said = marks(report)
    assert (said["weights"], said["activations"], said["replication"]) == ("--", "--", "--")
    assert said["batch"] == "??"
    alone = check(lambda w, x: w - x, (jnp.ones(64), jnp.ones(64)), "cpu:1")
    said = marks(alone)
    nothing = ("batch", "copies", "weights", "gradients", "activations", "unknown", "replication")
    assert {said[key] for key in nothing} == {"--"}
    assert alone.to_dict()["unjudged"] == list(alone.unjudged)


def test_a_loop_of_unknown_trips_is_said():
    def step(w, x):
        grow = jax.lax.while_loop(lambda y: jnp.sum(y) < 9.0, lambda y: jax.lax.psum(y, "data"), x)
        return w - 0.1 * jax.lax.pmean(jnp.mean(grow, 0), "data")

    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    specs = (P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    args = with_sharding((spec(64), spec(16, 64)), specs, mesh)
    report = check(jax.jit(mapped, donate_argnums=0), args, "cpu:8")
    assert any("test_pods_rules.py" in line for line in report.open_loops)
    assert "a loop of unknown trips counts once" in str(report)
    assert any(c.at_least for c in report.collectives)
    assert ">= 1" in str(report)


# -- what the check does not know ------------------------------------------------------------------

STRANGE = """HloModule m

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64] parameter(0)
  ROOT %b = f32[64] all-reduce(%a), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}
""".replace(
    "ENTRY",
    "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
    "  %y = f32[] parameter(1)\n  ROOT %s = f32[] add(%x, %y)\n}\n\nENTRY",
)


def strange(opcode, fields=None):
    """Returns a program with an operation of that name that says who takes part in it."""
    module = parsed(STRANGE)
    root = module.entry.root
    fields = {3: [root.proto.data(3)]} | (fields or {87: [root.proto.data(87)]})
    proto = Message(encoded(fields))
    changed = dataclasses.replace(root, opcode=opcode, called=(), proto=proto)
    inside = {**module.entry.instructions, root.name: changed}
    entry = dataclasses.replace(module.entry, instructions=inside, root=changed)
    computations = {**module.computations, entry.name: entry}
    return dataclasses.replace(module, computations=computations, entry=entry)


@pytest.mark.parametrize(
    ("opcode", "unknown"),
    [("all-reduce", False), ("ragged-all-to-all", False), ("collective-dance", True)],
)
def test_a_collective_that_the_check_does_not_know_is_said(opcode, unknown):
    module = strange(opcode)
    found = _collectives.find_unknown(module, _loops.run_counts(module), _read.user_source)
    assert found == ([(opcode, "")] if unknown else [])


def test_a_kernel_that_sends_by_itself_is_said():
    noted = b'{"custom_call_config": {"has_communication": true}}'
    module = strange("custom-call", {28: [b"tpu_custom_call"], 43: [noted]})
    found = _collectives.find_unknown(module, _loops.run_counts(module), _read.user_source)
    assert found == [("tpu_custom_call", "")]


# -- which copies differ ---------------------------------------------------------------------------


def differing(fun, specs, out, *shapes):
    """Returns along which axes each result of a function under shard_map differs."""
    mesh = get_topology("cpu:8").make_mesh({"data": 2, "model": 4})
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    args = with_sharding(tuple(shapes), specs, mesh)
    module = _hlo.read_module(jax.jit(mapped).lower(*args).compile())
    axes = {n: frozenset(a for a in spec if a) for n, spec in enumerate(specs)}
    found = _copies.outputs_that_differ(module, axes, dict(mesh.shape), ())
    return [(set(value.axes), set(value.unsure)) for value in found]


def test_what_differs_between_devices_is_followed_through_a_program():
    def fun(w, x):
        summed = jax.lax.psum(x, "data")
        looped = jax.lax.scan(lambda c, _: (jnp.tanh(c + x), None), w, length=3)[0]
        chosen = jax.lax.cond(jnp.sum(x) > 0, lambda: w, lambda: w * 2)
        passed = jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])
        gathered = jax.lax.all_gather(x, ("data", "model")).sum((0, 1))
        scattered = jax.lax.psum_scatter(x, "model", tiled=True)
        return w * 2, summed, looped, chosen, passed, gathered, scattered

    found = differing(fun, (P(), P("data", "model")), P(), spec(4, 8), spec(8, 32))
    both = {"data", "model"}
    assert found == [
        (set(), set()),
        ({"model"}, set()),
        (both, set()),
        (both, set()),
        (both, {"model"}),
        (set(), set()),
        (both, set()),
    ]


def test_what_is_made_of_a_devices_own_number_differs_along_the_axis_that_was_asked_for():
    def fun(w, key):
        data, model = (jax.lax.axis_index(axis) for axis in ("data", "model"))
        folded = jax.random.key_data(jax.random.fold_in(key, model))
        looped = jax.lax.fori_loop(0, 3, lambda _, w: jnp.tanh(w + data), w)
        both = w * jax.lax.axis_index(("data", "model"))
        own = jnp.where(model == 0, w, 2 * w)
        summed = jax.lax.psum(jnp.where(model == 0, w, 0.0), "model")
        cut = jax.lax.dynamic_slice_in_dim(w, data, 2)  # whole again, perhaps, behind a ring
        return folded, looped, both, own, summed, jax.lax.psum(both, "data"), cut

    key = jax.eval_shape(lambda: jax.random.key(0))
    assert differing(fun, (P(), P()), P(), spec(4, 8), key) == [
        ({"model"}, set()),
        ({"data"}, set()),
        ({"data", "model"}, set()),
        ({"model"}, set()),
        (set(), set()),
        ({"model"}, set()),
        ({"data"}, {"data"}),
    ]


def test_a_loop_that_devices_leave_at_different_turns_makes_them_differ():
    def fun(w, x):
        return jax.lax.while_loop(lambda s: s[1] < jnp.sum(x), lambda s: (s[0] * 2, s[1] + 1), w)

    def whole(w, x):
        return fun((w, jnp.zeros(())), x)

    assert differing(whole, (P(), P("data")), P(), spec(4), spec(8)) == [({"data"}, set())] * 2
    joined = differing(
        lambda w, x: whole(w, jax.lax.psum(x, "data")), (P(), P("data")), P(), spec(4), spec(8)
    )
    assert joined == [(set(), set())] * 2


def test_values_end_to_end_keep_what_is_known_of_each():
    text = (
        STRANGE.replace(
            "ROOT %b = f32[64] all-reduce(%a)",
            "%w = f32[64] parameter(1)\n  %flat = f32[128] concatenate(%a, %w), dimensions={0}\n"
            "  %b = f32[128] all-reduce(%flat)",
        )
        .replace(
            "to_apply=%add\n}",
            "to_apply=%add\n  %two = f32[128] add(%b, %b)\n"
            "  %first = f32[64] slice(%two), slice={[0:64]}\n"
            "  %second = f32[64] slice(%two), slice={[64:128]}\n"
            "  %over = f32[64] slice(%two), slice={[32:96]}\n"
            "  ROOT %all = (f32[64], f32[64], f32[64]) tuple(%first, %second, %over)\n}",
        )
        .replace(
            "(a: f32[64]) -> f32[64]", "(a: f32[64], w: f32[64]) -> (f32[64], f32[64], f32[64])"
        )
    )
    mesh = {"model": 4, "data": 2}
    inputs = {0: frozenset({"data"}), 1: frozenset({"data", "model"})}
    found = _copies.outputs_that_differ(parsed(text), inputs, mesh, ())
    assert [set(value.axes) for value in found] == [set(), {"model"}, {"model"}]


def test_of_arrays_scattered_together_each_keeps_what_is_known_of_it():
    pair, along = "(f32[32], f32[32])", "dimensions={0}"
    text = STRANGE.replace(
        "ROOT %b = f32[64] all-reduce(%a)",
        f"%w = f32[64] parameter(1)\n  ROOT %both = {pair} reduce-scatter(%a, %w), {along}",
    ).replace("(a: f32[64]) -> f32[64]", f"(a: f32[64], w: f32[64]) -> {pair}")
    inputs = {0: frozenset({"data"}), 1: frozenset({"model"})}
    found = _copies.outputs_that_differ(parsed(text), inputs, {"model": 4, "data": 2}, ())
    assert [set(value.axes) for value in found] == [{"data"}, {"data", "model"}]
