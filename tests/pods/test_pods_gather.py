"""Sharded casts: the network carries 16 bits, gradients are summed in float32, values are right."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.pods import gather, gather_constraint
from mpjax.testing import assert_bitwise_equal

SPECS = {"w": P(None, "fsdp"), "b": P()}
BF16 = "bf16-mixed"


@pytest.fixture
def mesh(devices):
    return jax.make_mesh((2, 4), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=devices)


def params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=16), jnp.float32),
    }


def batch():
    # Small whole numbers: sums of products with powers of two are exact in any order.
    return jnp.asarray(np.random.default_rng(1).integers(-4, 5, (16, 8)), jnp.float32)


def mapped(fun, mesh, check_vma, out_specs=None):
    axes = P(("data", "fsdp"))
    out_specs = SPECS if out_specs is None else out_specs
    in_specs = (SPECS, axes)
    shmap = jax.shard_map(
        fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(shmap)


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_come_whole_in_the_compute_dtype(mesh, check_vma):
    def fun(p, _):
        whole = gather(p, SPECS, BF16, axis_name=("data", "fsdp"))
        return jax.tree.map(lambda x: x[None], whole)

    whole = mapped(fun, mesh, check_vma, P(("data", "fsdp")))(params(), batch())
    for name, x in params().items():
        assert whole[name].dtype == jnp.bfloat16
        for copy in whole[name]:
            assert_bitwise_equal(copy, x.astype(jnp.bfloat16))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_sums_or_means_of_all_devices(mesh, check_vma, reduce):
    def loss(p, x):
        whole = gather(p, SPECS, BF16, axis_name=("data", "fsdp"), reduce=reduce)
        y = jnp.dot(x.astype(jnp.bfloat16), whole["w"], preferred_element_type=jnp.float32)
        return jnp.mean(y + whole["b"].astype(jnp.float32))

    grads = mapped(jax.grad(loss), mesh, check_vma)(params(), batch())
    # Each device has 2 rows of 16 columns; its cotangent, 1/32, is a power of two.
    factor = 1 if reduce == "sum" else 1 / 8
    expected = jnp.broadcast_to(batch().sum(0)[:, None] / 32, (8, 16)) * factor
    assert grads["w"].dtype == grads["b"].dtype == jnp.float32
    assert_bitwise_equal(grads["w"], expected)
    assert_bitwise_equal(grads["b"], jnp.full(16, 16 / 32 * factor))
    assert grads["w"].sharding.is_equivalent_to(NamedSharding(mesh, SPECS["w"]), 2)


@pytest.mark.parametrize(("check_vma", "reduce"), [(True, "sum"), (False, "mean")])
def test_gradients_of_a_loss_that_is_a_mean_already(mesh, check_vma, reduce):
    axes = ("data", "fsdp")

    def loss(p, x):
        whole = gather(p, SPECS, BF16, axis_name=axes, reduce=reduce)
        return jax.lax.pmean(jnp.mean(x.astype(jnp.bfloat16) @ whole["w"] + whole["b"]), axes)

    grads = mapped(jax.grad(loss), mesh, check_vma)(params(), batch())
    expected = jnp.broadcast_to(batch().sum(0)[:, None] / 32 / 8, (8, 16))
    assert_bitwise_equal(grads["w"], expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_summed_in_float32(mesh, check_vma):
    """256 from one device and 1 from each of seven: in bfloat16 every addition would lose the 1."""

    def loss(p, x):
        whole = gather(p, SPECS, BF16, axis_name=("data", "fsdp"))
        return (whole["w"][0, 0] * x[0, 0].astype(jnp.bfloat16)).astype(jnp.float32)

    x = jnp.ones((16, 8)).at[0, 0].set(256)
    grads = mapped(jax.grad(loss), mesh, check_vma)(params(), x)
    assert float(grads["w"][0, 0]) == 256 + 7


def test_only_named_axes_are_gathered(mesh):
    spec = P("data", "fsdp")

    def fun(w):
        whole = gather(w, spec, "32-true", axis_name="data")
        return whole[None]

    out = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=P("data", None, "fsdp")))(
        params()["w"]
    )
    for copy in out:
        assert_bitwise_equal(copy, params()["w"])


@pytest.mark.parametrize("spec", [P(None, ("fsdp", "data")), P("data", "fsdp"), P("fsdp", "data")])
def test_axes_split_over_two_mesh_axes_come_back_in_order(mesh, spec):

    def loss(w):
        whole = gather(w, spec, "32-true", axis_name=("data", "fsdp"))
        weights = jnp.arange(128.0).reshape(8, 16)
        return jnp.sum(whole * weights)

    run = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_bitwise_equal(jax.jit(run)(params()["w"]), 8 * jnp.arange(128.0).reshape(8, 16))


def test_paths_choose_dtypes_and_integers_pass(mesh):
    policies = mpjax.PolicyMap(BF16, {"norm/*": "float32"})
    tree = {"norm": {"scale": jnp.ones(8)}, "w": jnp.ones(8), "ids": jnp.arange(8)}

    def fun(tree):
        return gather(tree, P("fsdp"), policies, axis_name="fsdp")

    run = jax.shard_map(fun, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    out = jax.jit(run)(tree)
    assert {k: v.dtype.name for k, v in [("w", out["w"]), ("ids", out["ids"])]} == {
        "w": "bfloat16",
        "ids": "int32",
    }
    assert out["norm"]["scale"].dtype == jnp.float32
    assert_bitwise_equal(out["ids"], jnp.arange(8))


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_scan_and_remat_with_a_loss_scale_all_shards_agree(mesh, check_vma):
    tx = mpjax.with_loss_scale(
        optax.sgd(0.5), mpjax.DynamicLossScale(1024), axis_name=("data", "fsdp")
    )
    stack = jnp.stack([params()["w"]] * 3) / 16
    spec = P(None, None, "fsdp")
    state = tx.init(stack)

    def loss(w, x):
        @jax.checkpoint
        def layer(x, shard):
            whole = gather(
                shard, P(None, "fsdp"), "16-mixed", axis_name=("data", "fsdp"), reduce="mean"
            )
            return x * jnp.float16(0.5) + x @ whole @ whole.T, None

        x, _ = jax.lax.scan(layer, x.astype(jnp.float16), w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(w, state, x):
        scale = mpjax.current_loss_scale(state)
        value, grads = mpjax.value_and_grad(loss, loss_scale=scale)(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, jax.lax.pmean(value, ("data", "fsdp"))

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec, P(), P(("data", "fsdp"))),
            out_specs=(spec, P(), P()),
            check_vma=check_vma,
        )
    )
    x = batch() / 64
    after, state, value = run(stack, state, x)
    assert np.isfinite(float(value))
    assert bool(state.grads_finite)
    assert not np.array_equal(after, stack)
    # An overflow in the rows of the last device: nobody moves, and everybody halves the scale.
    again, state, _ = run(after, state, x.at[-1].set(60000))
    assert_bitwise_equal(again, after)
    assert (bool(state.grads_finite), float(state.loss_scale)) == (False, 512)


@pytest.mark.parametrize(
    ("specs", "options", "error", "said"),
    [
        (P(None, None, "fsdp"), {}, ValueError, r"gather at 'w': P\(None, None, 'fsdp'\) has more"),
        ("fsdp", {}, TypeError, r"gather\(specs\): must be jax.sharding.PartitionSpecs; got str"),
        (P("fsdp"), {"axis_name": "model"}, NameError, r"gather\(axis_name\): 'model' is no axis"),
        (P("fsdp"), {"reduce": "max"}, ValueError, r"gather\(reduce\): got 'max'"),
    ],
)
@pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")
def test_what_does_not_fit_is_an_error(specs, options, error, said, mesh):
    def fun(p):
        return gather(p, {"w": specs}, BF16, **{"axis_name": "fsdp", **options})

    run = jax.shard_map(fun, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    with pytest.raises(error, match=said):
        jax.eval_shape(run, {"w": jnp.ones((8, 16))})


def _twice(way, tree):
    """Steps that would average over 'fsdp' what is split over it."""

    def loss(p, x):
        whole = gather(p, {"w": P("fsdp")}, "32-true", axis_name="fsdp") if way != "by hand" else p
        return jnp.sum(whole["w"]) * jnp.sum(x)

    if way == "value_and_grad":
        return mpjax.value_and_grad(loss, loss_scale=None, axis_name="fsdp")(tree, jnp.ones(2))[1]
    step = mpjax.make_train_step(loss, optax.sgd(0.1), "32-true", axis_name="fsdp", donate=False)
    return step(step.init(tree), jnp.ones(2))[0].params


@pytest.mark.parametrize(
    ("way", "check_vma", "said"),
    [
        (
            "step",
            False,
            r"gather\(axis_name\): it reduces(.|\n)*make_train_step\(axis_name=",
        ),
        (
            "value_and_grad",
            False,
            r"value_and_grad\(axis_name='fsdp'\)(.|\n)*without axis_",
        ),
        ("value_and_grad", True, r"value_and_grad\(axis_name='fsdp'\) averages"),
        (
            "step",
            True,
            r"make_train_step\(axis_name\): each device of 'fsdp' holds another",
        ),
        ("by hand", True, r"another part of 'w'(.|\n)*with_loss_scale\(tx, axis_name='fsdp'\)"),
    ],
)
@pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")
def test_gradients_of_parts_are_not_averaged_with_each_other(way, check_vma, said, mesh):
    run = jax.shard_map(
        lambda p: _twice(way, p),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(run, {"w": jnp.ones((8, 16))})


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_a_step_of_shards_that_clips_and_scales_is_that_of_one_device(max_norm, mesh):
    specs = {"w": P("fsdp"), "b": P()}
    start = {"w": params()["w"], "b": jnp.ones(16)}

    def loss(p, x):
        return jnp.mean((x @ p["w"] + p["b"]) ** 2)

    def loss_of_shards(p, x):
        return loss(gather(p, specs, "32-true", axis_name="fsdp", reduce="mean"), x)

    def step(fun, axis_name):
        clip = mpjax.optim.clip_by_global_norm(max_norm, axis_name=axis_name)
        tx = optax.chain(clip, optax.sgd(1.0))
        tx = mpjax.with_loss_scale(tx, mpjax.DynamicLossScale(), axis_name=axis_name)

        def local(p, opt_state, x):
            scale = mpjax.current_loss_scale(opt_state)
            _, grads = mpjax.value_and_grad(fun, loss_scale=scale)(p, x)
            updates, opt_state = tx.update(grads, opt_state, p)
            return optax.apply_updates(p, updates), opt_state

        return local, tx.init(start)

    x = jnp.linspace(-1, 2, 64).reshape(8, 8)
    local, state = step(loss, None)
    want, _ = local(start, state, x)
    local, state = step(loss_of_shards, "fsdp")
    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P(), P("fsdp")), out_specs=(specs, P())
    )
    got, _ = jax.jit(spread)(start, state, x)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(got["b"], want["b"], rtol=1e-5, atol=1e-8)
    assert np.abs(want["w"] - start["w"]).max() > 1e-4


def test_a_norm_over_devices_needs_types_that_tell_shards_from_copies(mesh):
    def norm(x):
        return mpjax.optim.global_norm(x, axis_name="fsdp")

    options = {"mesh": mesh, "in_specs": P("fsdp"), "out_specs": P()}
    assert jax.eval_shape(jax.shard_map(norm, **options), jnp.ones(8)).shape == ()
    with pytest.raises(ValueError, match=r"global_norm\(axis_name\)(.|\n)*check_vma=True"):
        jax.eval_shape(jax.shard_map(norm, **options, check_vma=False), jnp.ones(8))


@pytest.mark.parametrize(
    ("axis_name", "spec", "said"),
    [
        (None, P("fsdp"), r"'fsdp' has other gradients(.|\n)*axis_name='fsdp'"),
        (None, P(), None),
        ("fsdp", P("fsdp"), None),
        ((), P("fsdp"), None),  # each device trains a model of its own
    ],
)
def test_clipping_each_device_by_the_norm_of_its_own_shards_warns(axis_name, spec, said, mesh):
    clip = mpjax.optim.clip_by_global_norm(1.0, axis_name=axis_name)

    def clipped(grads):
        return clip.update({"w": grads, "count": 0}, clip.init(grads))[0]["w"]

    run = jax.shard_map(clipped, mesh=mesh, in_specs=spec, out_specs=spec)
    wanted = pytest.warns(mpjax.PolicyWarning, match=said) if said else contextlib.nullcontext()
    with wanted:
        jax.eval_shape(run, jnp.ones((8, 16)))


# -- under jit -------------------------------------------------------------------------------------


def test_constraint_keeps_values_up_to_one_rounding_and_gradients_sharded(mesh):
    sharding = NamedSharding(mesh, P("fsdp"))

    def loss(w, x):
        whole = gather_constraint(w, sharding, BF16)
        return jnp.sum(mpjax.autocast(jnp.dot, BF16)(x, whole))

    w = jax.device_put(params()["w"], sharding)
    x = jax.device_put(batch(), NamedSharding(mesh, P(("data", "fsdp"))))
    grad = jax.jit(jax.grad(loss))(w, x)
    assert grad.dtype == jnp.float32
    assert_bitwise_equal(grad, jnp.broadcast_to(batch().sum(0)[:, None], (8, 16)))
    assert grad.sharding.is_equivalent_to(sharding, 2)
    whole = jax.jit(lambda w: gather_constraint(w, sharding, BF16))(w)
    assert_bitwise_equal(whole, w.astype(jnp.bfloat16).astype(jnp.float32))
    assert whole.sharding.is_fully_replicated


def test_constraint_wants_shardings():
    with pytest.raises(TypeError, match=r"gather_constraint\(shardings\).*got P"):
        gather_constraint(jnp.ones(4), P("fsdp"), BF16)
