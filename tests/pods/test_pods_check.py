"""The check of a whole step: it finds each planted mistake, names the culprit, and nothing else.

On virtual CPU devices, and for TPUs and GPUs; more of these in test_pods_targets.py.
"""

import dataclasses
import functools
import io
import json

import _pods_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
import mpjax.pods
from mpjax.pods import CHECKS, check, get_topology, with_sharding
from mpjax.pods._findings import Memory
from mpjax.pods._report import _parts

HERE = ("late_cast", "low_reduction", "wide_activations", "replicated_state", "no_donation")
EARLY = ("callback", "other_program")  # found without compiling

pytestmark = pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces")


@pytest.fixture(scope="module")
def right():
    """The report on the right program."""
    with jax.numpy_dtype_promotion("standard"):  # optax's own, when it is traced
        return _pods_step.check("cpu:8")


def test_the_right_program_has_no_findings(right):
    assert right.findings == ()
    assert (right.ok, right.exit_code) == (True, 0)
    assert right.mesh == {"fsdp": 4, "tensor": 2}
    assert right.compute_dtype == "bf16"
    assert set(right.sent("weights")) == {"bf16"}
    assert set(right.sent("gradients")) == {"f32"}
    assert set(right.sent("activations")) == {"bf16"}


def test_every_weight_is_gathered_and_every_gradient_reduced(right):
    paths = {f"state/params/{p}" for p in ("table", "head", "layers/up", "layers/down")}
    for role in ("weights", "gradients"):
        assert paths <= {c.path for c in right.collectives if c.role == role}
    up = [c for c in right.collectives if c.path.endswith("/up") and c.role == "weights"]
    # Each layer's weights once forward and once for the backward pass, which recomputes.
    assert sum(c.count for c in up) == 2 * _pods_step.LAYERS
    width, hidden = _pods_step.WIDTH, _pods_step.HIDDEN
    assert {c.bytes for c in up} == {width * hidden // 2 * 2}  # half of the columns, 2 bytes each
    assert {c.axes for c in up} == {("fsdp",)}
    assert all("_pods_step.py" in c.source for c in up)


def test_flops_are_those_of_the_model(right):
    layers, width, hidden = _pods_step.LAYERS, _pods_step.WIDTH, _pods_step.HIDDEN
    tokens = 2 * _pods_step.TIME
    layer = 2 * tokens * width * (hidden // 2)  # one of the two products of a layer, on one device
    head = 2 * tokens * width * _pods_step.VOCAB
    # Forward, backward twice; of the recomputed ones only the first is needed again.
    expected = layers * (2 * 3 + 1) * layer + 3 * head
    # On the floor XLA:CPU widens the products too.
    low = "bf16" if jax.__version_info__ >= (0, 11) else "f32"
    assert right.flops == {low: expected}


FAST = [
    pytest.param("v5e-8", marks=pytest.mark.tpu_compiler),
    pytest.param("h100-8", marks=[pytest.mark.gpu_compiler, pytest.mark.slow]),
]


@pytest.mark.standard_promotion("adamw divides an int32 count into a float")
@pytest.mark.parametrize(
    ("topology", "mistake"),
    [
        *(("cpu:8", mistake) for mistake in (*HERE, *EARLY)),
        *(pytest.param(*t.values, m, marks=t.marks) for t in FAST for m in _pods_step.CULPRITS),
    ],
)
def test_each_planted_mistake_is_found_and_its_culprit_named(topology, mistake):
    report = _pods_step.check(topology, mistake)
    expected, culprit = _pods_step.CULPRITS[mistake]
    assert {finding.check for finding in report.findings} == {expected}
    assert any(culprit in finding.culprit for finding in report.findings), str(report)
    assert (report.ok, report.exit_code) == (False, 2)


def test_report_prints_and_is_json(right):
    text = str(right)
    assert text.startswith("cpu:8 (virtual CPU devices 1x8: 8 devices, 1 host): nothing wrong\n")
    assert "  ok weights are gathered in the compute dtype" in text
    assert "  -- the step fits" in text  # nothing is known of a CPU's memory
    assert max(map(len, text.splitlines())) < 200
    values = json.loads(right.to_json())
    assert (values["ok"], values["exit_code"], values["mesh"]["fsdp"]) == (True, 0, 4)
    assert {c["role"] for c in values["collectives"]} == {c.role for c in right.collectives}
    assert values["memory"]["headroom"] is None


def test_report_is_a_table_to_rich(right):
    console = rich.console.Console(width=140, record=True, file=io.StringIO())
    console.print(right)
    text = console.export_text()
    assert "reduce-scatter" in text
    assert "nothing wrong" in text


@pytest.mark.standard_promotion("adamw divides an int32 count into a float")
def test_findings_stand_in_the_text():
    text = str(_pods_step.check("cpu:8", "callback"))
    assert ": 1 error\n" in text
    assert "  !! nothing in the step waits for the host" in text
    assert "  -- the state is donated" in text
    assert "makes every device wait for its host" in text
    assert "Return the value with the metrics" in text


@pytest.mark.standard_promotion("adamw divides an int32 count into a float")
def test_equal_programs_have_equal_fingerprints(right):
    again = _pods_step.check("cpu:8")
    other = _pods_step.check("cpu:8", "no_donation")
    assert right.fingerprint == again.fingerprint != other.fingerprint


# -- the step and its arguments --------------------------------------------------------------------


def sgd(state, x):
    grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": jnp.mean(x)}


SPECS = ({"w": P()}, P("data"))
SGD_ARGS = ({"w": jnp.ones((64, 64))}, jnp.ones((16, 64)))


def on_mesh(mesh):
    return with_sharding(SGD_ARGS, SPECS, mesh)


def test_shardings_on_another_mesh_are_carried_over_by_name():
    abstract = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    args = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(abstract, spec)
        ),
        SGD_ARGS,
        SPECS,
    )
    report = check(jax.jit(sgd, donate_argnums=0), args, "cpu:8")
    assert report.mesh == {"data": 8}
    assert {(c.role, c.path, c.dtype) for c in report.collectives if c.role == "gradients"} == {
        ("gradients", "state/w", "f32")
    }
    assert report.ok


def test_a_step_may_read_the_mesh_from_its_context():
    def step(state, x):
        return jax.shard_map(
            lambda w, x: {"w": w["w"] + jax.lax.psum(jnp.mean(x), "data")},
            in_specs=SPECS,
            out_specs=P(),
            check_vma=False,
        )(state, x)

    report = check(
        jax.jit(step, donate_argnums=0),
        on_mesh(get_topology("cpu:8").make_mesh({"data": 8})),
        "cpu:8",
    )
    assert report.ok


@pytest.mark.parametrize("donated", [(0,), ()])
def test_metrics_are_no_state_however_large(donated):
    """A counter's memory may go to a metric of its shape; what the old state had is what counts."""

    def step(state, x):
        state, loss = {"w": state["w"] - 0.1 * x, "count": state["count"] + 1.0}, jnp.mean(x)
        return state, {f"loss {i}": loss * i for i in range(8)} | {"x": x, "first": x + 1.0}

    state = {"w": jnp.ones((4, 4)), "count": jnp.zeros(())}
    report = check(jax.jit(step, donate_argnums=donated), (state, jnp.ones((4, 4))), "cpu:1")
    assert [finding.culprit for finding in report.findings] == ([] if donated else ["state/w"])


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_what_changes_its_dtype_is_not_donated():
    """There is no result of the old dtype whose memory it could be; the rest is in place."""

    def step(state, x):
        return {"w": state["w"] - x, "low": state["low"].astype(jnp.float32) - x}

    state = {"w": jnp.ones((8, 8)), "low": jnp.ones((8, 8), jnp.bfloat16)}
    report = check(jax.jit(step, donate_argnums=0), (state, jnp.ones((8, 8))), "cpu:1")
    assert [finding.culprit for finding in report.findings] == ["state/low"]


def test_one_device_needs_no_shardings():
    report = check(sgd, SGD_ARGS, "cpu:1")
    assert [finding.check for finding in report.findings] == ["donation"]
    assert report.mesh == {}
    assert report.collectives == ()


def test_random_constants_are_programs_that_processes_do_not_share():
    def step(state, x):
        noise = np.random.default_rng().normal(size=(64, 64)).astype(np.float32)
        return {"w": state["w"] + noise}, jnp.mean(x)

    report = check(jax.jit(step, donate_argnums=0), SGD_ARGS, "cpu:1")
    assert [finding.check for finding in report.findings] == ["agreement"]
    assert "test_pods_check.py" in report.findings[0].culprit


def test_keys_are_arguments_like_any_other():
    def step(state, x):
        key, use = jax.random.split(state["key"])
        return {"w": state["w"] + jax.random.normal(use, (64, 64)) * jnp.mean(x), "key": key}

    state = {"w": jnp.ones((64, 64)), "key": jax.random.key(0)}
    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    args = with_sharding((state, SGD_ARGS[1]), (P(), P("data")), mesh)
    assert check(jax.jit(step, donate_argnums=0), args, "cpu:8").ok


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda self, state, *batch: None, id="state, *batch"),
        pytest.param(lambda self, s, x: None, id="s, x"),
        pytest.param(lambda self, *args: None, id="*args"),
    ],
)
def test_a_batch_is_judged_whatever_the_step_calls_its_arguments(call):
    """A step that leaves out an argument, as `make_train_step` does, has fewer than it is given."""

    @functools.partial(jax.jit, donate_argnums=0)
    def jitted(state, batch):
        return {"w": sgd({"w": state["w"]}, batch)[0]["w"], "unused": jnp.zeros(3)}

    step = type("Step", (), {"__call__": call, "lower": staticmethod(jitted.lower)})()
    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    args = ({"w": jnp.ones((64, 64)), "unused": jnp.ones(3)}, SGD_ARGS[1])
    report = check(step, with_sharding(args, (P(), P()), mesh), "cpu:8")
    assert [finding.check for finding in report.findings] == ["batch"]
    assert check(step, with_sharding(args, (P(), P("data")), mesh), "cpu:8").ok


def test_lines_are_those_of_now_where_a_cache_on_disk_has_the_program_of_an_earlier_edit(tmp_path):
    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    args = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    args = with_sharding(args, (P(), P("data")), mesh)

    def summed_at(line):
        text = "\n" * (line - 1) + "def step(w, x): return w * lax.psum(x, 'data').sum()"
        scope = {"lax": jax.lax}
        exec(compile(text, str(tmp_path / "train.py"), "exec"), scope)
        report = check(jax.jit(jax.shard_map(scope["step"], mesh=mesh, **specs)), args, "cpu:8")
        return [c.source.partition(" ")[0] for c in report.collectives]

    before = jax.config.jax_compilation_cache_include_metadata_in_key
    for line in (3, 8):
        assert summed_at(line) == [f"{tmp_path / 'train.py'}:{line}"]
    assert jax.config.jax_compilation_cache_include_metadata_in_key == before


def test_process_index_answers_truly_afterwards():
    check(jax.jit(sgd, donate_argnums=0), SGD_ARGS, "cpu:1")
    assert (jax.process_index(), jax.process_count()) == (0, 1)


def test_policy_decides_what_is_low():
    """Products in bfloat16 by hand; the policy says float32, so that a wide gather is meant."""
    with jax.numpy_dtype_promotion("standard"):
        report = _pods_step.check("cpu:8", "late_cast", policy="32-true")
    assert report.ok
    assert report.compute_dtype == "f32"


def test_a_job_is_built_for_the_topology_that_is_asked_for():
    def build(topology):
        return jax.jit(sgd, donate_argnums=0), on_mesh(topology.make_mesh({"data": -1}))

    report = mpjax.pods.check_job(build, "cpu:4")
    assert (report.ok, report.mesh) == (True, {"data": 4})
    with pytest.raises(
        TypeError, match=r"check_job\(build\): must return \(step, args\).*got tuple"
    ):
        mpjax.pods.check_job(lambda topology: (sgd, [1]), "cpu:1")


# -- what is wrong before anything is compiled -----------------------------------------------------


@pytest.mark.parametrize(
    ("args", "topology", "error", "said"),
    [
        (SGD_ARGS, "v5e-7", ValueError, r"no slice of v5e has 7 chips"),
        (SGD_ARGS, "cpu:8", ValueError, r"no argument says how it is laid out on the 8 devices"),
        ([*SGD_ARGS], "cpu:1", TypeError, r"check\(args\): must be a tuple.*got list"),
        ((SGD_ARGS[0], "train"), "cpu:1", TypeError, r"at '1': must be arrays, .*; got str"),
    ],
)
def test_wrong_arguments_are_errors(args, topology, error, said):
    with pytest.raises(error, match=said):
        check(sgd, args, topology)


def test_a_batch_that_does_not_divide_is_an_error():
    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    args = ({"w": jnp.ones((64, 64))}, jnp.ones((12, 64)))
    with pytest.raises(
        ValueError, match=r"at '1': f32\[12,64\] does not divide axis 0 by 8 \(data=8\)"
    ):
        with_sharding(args, SPECS, mesh)
    placed = jax.ShapeDtypeStruct((12, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"check\(args\) at '1': f32\[12,64\] does not divide"):
        check(sgd, (args[0], placed), "cpu:8")


def test_a_spec_that_does_not_fit_is_an_error():
    mesh = get_topology("cpu:8").make_mesh({"data": 8})
    with pytest.raises(
        ValueError, match=r"names 'model', which is no axis of the mesh.*\n.*'data'"
    ):
        with_sharding(jnp.ones(8), P("model"), mesh)
    with pytest.raises(ValueError, match=r"f32\[8\] has no axis 1"):
        with_sharding(jnp.ones(8), P("data", None), mesh)
    with pytest.raises(TypeError, match=r"with_sharding\(specs\): must be .*; got str"):
        with_sharding(jnp.ones(8), "data", mesh)


def test_two_meshes_are_an_error():
    topology = get_topology("cpu:8")
    one, two = topology.make_mesh({"data": 8}), topology.make_mesh({"data": 4, "x": 2})
    args = (with_sharding(SGD_ARGS[0], P(), one), with_sharding(SGD_ARGS[1], P("data"), two))
    with pytest.raises(ValueError, match=r"on several meshes: .*data=8"):
        check(sgd, args, topology)


def test_a_mesh_of_another_size_is_an_error():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"a mesh of data=4 does not have the 8 devices"):
        check(sgd, (SGD_ARGS[0], x), "cpu:8")


def test_checks_are_documented():
    assert set(CHECKS) >= {check for check, _ in _pods_step.CULPRITS.values()}


def test_the_parts_of_a_peak_are_no_more_than_the_whole():
    memory = Memory(
        peak=2_900_000_000, arguments=610_000_000, outputs=0, aliased=0,
        temporaries=3_830_000_000, limit=0,
    )  # fmt: skip
    assert _parts(memory) == "arguments 0.61 GB, all else 2.29 GB"
    assert "some of which" in _parts(dataclasses.replace(memory, peak=1))
