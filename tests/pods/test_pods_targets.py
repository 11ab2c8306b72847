"""The check on accelerators that are not here: TPU slices and GPUs, compiled ahead of time."""

import _pods_step
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.pods import check, get_topology, with_sharding

NEEDS_TPU = pytest.mark.tpu_compiler
NEEDS_GPU = pytest.mark.gpu_compiler
pytestmark = [
    pytest.mark.standard_promotion("adamw divides an int32 count into a float"),
    pytest.mark.no_leak_check("the check keeps the jaxpr of what it traces"),
]


def targets(*names, slow):
    """Returns the topologies as parameters, with what each needs."""
    marks = {"h": NEEDS_GPU, "a": NEEDS_GPU}
    extra = [pytest.mark.slow] if slow else []
    return [
        pytest.param(name, marks=[marks.get(name[0], NEEDS_TPU), *extra], id=name) for name in names
    ]


FAST = targets("v5e-8", slow=False) + targets("h100-8", slow=True)
SLOW = targets("v4-16", "v5p-16", "v6e-8", "tpu7x-8", "a100-8", slow=True)


@pytest.mark.parametrize("name", FAST + SLOW)
def test_the_right_program_has_no_findings(name):
    report = _pods_step.check(name)
    assert report.findings == (), str(report)
    assert set(report.sent("weights")) == {"bf16"}
    assert set(report.sent("gradients")) == {"f32"}
    assert report.memory.headroom > 0.9
    assert report.times.bound in ("compute", "hbm", "network")
    paths = {f"state/params/{p}" for p in ("table", "head", "layers/up", "layers/down")}
    for role in ("weights", "gradients"):
        assert paths <= {c.path for c in report.collectives if c.role == role}
    assert {c.axes for c in report.collectives if c.role == "weights"} == {("fsdp",)}


@pytest.mark.parametrize("name", FAST)
def test_flops_are_those_counted_on_virtual_devices(name):
    assert _pods_step.check(name).flops == _pods_step.check("cpu:8").flops


def square(name, dtype):
    """Returns the report on a step that multiplies in `dtype` on one device."""

    def step(w, x):
        y = jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)
        return w + jnp.mean(y)

    args = (jnp.zeros((512, 512)), jnp.zeros((512, 512)))
    return check(jax.jit(step, donate_argnums=0), args, name)


@NEEDS_TPU
def test_float16_on_a_tpu_is_a_warning():
    report = square("v5e-1", jnp.float16)
    assert [(f.check, f.severity) for f in report.findings] == [("precision", "warning")]
    assert "gains little or nothing on TPU v5e" in report.findings[0].what
    assert "'bf16-mixed'" in report.findings[0].fix
    assert (report.ok, report.exit_code) == (True, 1)
    assert square("v5e-1", jnp.bfloat16).findings == ()


@NEEDS_GPU
@pytest.mark.slow
def test_float16_on_a_gpu_is_fine():
    report = square("h100", jnp.float16)
    assert report.findings == ()
    assert report.flops == {"f16": 2 * 512**3}


@NEEDS_TPU
def test_a_policy_is_judged_before_products_are():
    args = (jnp.zeros((8, 8)), jnp.zeros((8, 8)))
    step = jax.jit(lambda w, x: w + x, donate_argnums=0)
    report = check(step, args, "v6e-1", policy="16-mixed")
    assert [f.check for f in report.findings] == ["precision"]


@NEEDS_TPU
def test_a_step_that_holds_a_mesh_of_other_devices_is_an_error():
    here = get_topology("cpu:8").make_mesh({"fsdp": 8})
    step = jax.jit(
        jax.shard_map(lambda x: x + 1, mesh=here, in_specs=P("fsdp"), out_specs=P("fsdp"))
    )
    x = with_sharding(jnp.zeros(8), P("fsdp"), get_topology("v5e-8").make_mesh({"fsdp": 8}))
    with pytest.raises(ValueError, match=r"check\(step\): it holds a mesh of other devices"):
        check(step, (x,), "v5e-8")


@NEEDS_TPU
def test_slices_are_told_from_the_fast_network():
    topology = get_topology("v5e-4", num_slices=2)
    mesh = topology.make_mesh({"data": 2, "fsdp": 4})

    def local(w, x):
        return w - jax.lax.psum(jnp.outer(jnp.mean(x, 0), jnp.mean(x, 0)), ("data", "fsdp"))

    specs = (P(), P(("data", "fsdp")))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    args = with_sharding((jnp.zeros((256, 256)), jnp.zeros((16, 256))), specs, mesh)
    report = check(jax.jit(step, donate_argnums=0), args, topology)
    assert report.ok, str(report)
    assert any("data" in c.axes for c in report.collectives)
    slow = sum(c.wire_bytes for c in report.collectives if "data" in c.axes)
    assert report.times.network >= slow / topology.chip.network_bandwidth


@NEEDS_TPU
@pytest.mark.slow
@pytest.mark.parametrize("low", ["autocast", "cast at the top"])
def test_what_goes_round_in_a_ring_beside_a_product_keeps_its_role(low):
    """A TPU's compiler overlaps large products with gathers and reductions, written as loops."""
    rows, width, hidden = 16384, 2048, 8192
    topology = get_topology("v5e-8")
    mesh = topology.make_mesh({"fsdp": 8})

    def wide_loss(params, x):
        y = jax.nn.gelu(x @ params["up"]) @ params["down"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def cast_loss(params, x):
        return wide_loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x)

    loss = mpjax.autocast(wide_loss, "bf16-mixed") if low == "autocast" else cast_loss

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {"up": (width, hidden), "down": (hidden, width)}
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    args = with_sharding((params, x), P("fsdp"), mesh)
    stored = jax.tree.map(lambda w: w.sharding, args[0])
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(stored, None))
    options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1"}
    report = check(jitted, args, topology, compiler_options=options)
    ring = [c for c in report.collectives if c.kind == "collective-permute"]
    dtypes = {(c.role, c.path.split("/")[-1]): c.dtype for c in ring}
    reduced = "f32" if low == "autocast" else "bf16"
    assert dtypes == {
        ("weights", "up"): "bf16",
        ("gradients", "up"): reduced,
        ("gradients", "down"): reduced,
    }
    # Each of eight chunks is sent once at least, by loops of a few steps; and each is computed
    # once: two products forward, two backward, and none for the gradient of `x`.
    assert all(sum(c.count for c in ring if c.role == r) >= 7 for r in ("weights", "gradients"))
    assert report.flops == {"bf16": 5 * 2 * rows // 8 * width * hidden}
    found = {(f.check, f.culprit.split("/")[-1]) for f in report.findings}
    assert found == (set() if reduced == "f32" else {("gradients", "up"), ("gradients", "down")})
