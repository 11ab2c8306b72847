"""`make_train_step(watch=N)`: right numbers in each Nth step, NaN and next to no cost between."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpjax
from mpjax.numerics import to_scalars
from mpjax.numerics._statistics import STATISTICS, limits
from mpjax.testing import assert_bitwise_equal

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss_fn(params, batch):
    with jax.named_scope("up"):
        h = jnp.tanh(batch @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean(jnp.square(h @ params["down"]["kernel"])) * params["gain"]


def params():
    kernel = np.full((4, 6), 0.3, np.float32)
    kernel[0, :2] = (1e-9, 1e6)  # float16 makes 0 and inf of these
    up = {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(6)}
    return {"up": up, "down": {"kernel": jnp.full((6, 2), 0.3)}, "gain": jnp.float32(1)}


def test_statistics_are_those_of_numpy_in_each_nth_step():
    scale = mpjax.StaticLossScale(2.0**10)
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "bf16-mixed", loss_scale=scale, watch=2)
    state = step.init(params())
    before = jax.device_get(state.params)
    grads = jax.grad(loss_fn)(before, X)
    new, first = [], None
    for _ in range(3):
        state, metrics = step(state, X)
        seen = jax.device_get(metrics["watched"])
        new.append(bool(seen["is_new"]))
        values = jax.tree.leaves({k: v for k, v in seen.items() if k != "is_new"})
        assert all(np.isfinite(v) == new[-1] for v in values)
        assert ("watched/wgrad/up/amax" in to_scalars(metrics)) == new[-1]
        assert not any("is_new" in name for name in to_scalars(metrics))
        first = first or seen
    assert new == [True, False, True]
    assert set(first["weight"]) == set(first["wgrad"]) == {"up", "down", "gain"}
    assert set(first["weight"]["up"]) == set(STATISTICS)
    kernel = before["up"]["kernel"]
    assert first["weight"]["up"]["amax"] == np.float32(1e6)
    norm = np.sqrt(np.sum(kernel.astype(np.float64) ** 2))
    assert first["weight"]["up"]["l2_norm"] == pytest.approx(norm, rel=1e-6)
    bits = np.log2(1e6) - np.log2(1e-9)
    assert first["weight"]["up"]["dynamic_range"] == pytest.approx(bits, rel=1e-5)
    for module, leaves in grads.items():  # unscaled, and rounded to bfloat16 on their way
        flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(leaves)])
        got = first["wgrad"][module]["amax"]
        assert got == pytest.approx(np.abs(flat).max(), rel=2**-5, abs=1e-9)


def layers(params, batch, *, looped):
    def layer(x, w):
        with jax.named_scope("product"):
            x = x @ w
        with jax.named_scope("tanh"):
            return jnp.tanh(x), None

    if looped:
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), batch, params)[0] ** 2)
    return jnp.sum(layer(layer(layer(batch, params[0])[0], params[1])[0], params[2])[0] ** 2)


def test_activations_and_their_gradients_are_those_of_float32_in_loops_too():
    ws = np.random.default_rng(1).normal(size=(3, 4, 4)).astype(np.float32)
    seen = {}
    for looped in (False, True):
        fun = functools.partial(layers, looped=looped)
        step = mpjax.make_train_step(fun, optax.sgd(0.0), "16-mixed", watch=1, loss_scale=256.0)
        seen[looped] = jax.device_get(step(step.init(jnp.asarray(ws)), X)[1]["watched"])
    x, products, outs = X, [], []
    for w in ws:
        products.append(x @ w)
        x = np.tanh(products[-1])
        outs.append(x)
    cotangent, to_product, to_tanh = 2 * x, [], []
    for w, out in zip(ws[::-1], outs[::-1], strict=True):
        to_product.append(cotangent * (1 - out**2))
        cotangent = to_product[-1] @ w.T
        to_tanh.append(cotangent)
    for looped, kinds in seen.items():
        # A cast counts as well: of what a loop carries, and of cotangents, for the next product.
        want = {("activation", "product"): [*products, *[X, *outs] * looped]}
        want |= {("activation", "tanh"): outs, ("gradient", "tanh"): to_product}
        last = len(to_tanh) if looped else -1  # the batch needs no gradient
        want |= {("gradient", "product"): [*to_tanh[:last], *to_product]}
        for (kind, module), values in want.items():
            flat = np.abs(np.concatenate([np.ravel(v) for v in values])).astype(np.float64)
            got = kinds[kind][module]
            assert got["amax"] == pytest.approx(flat.max(), rel=2**-8)
            assert got["l2_norm"] == pytest.approx(np.linalg.norm(flat), rel=2**-8)
            bits = np.log2(flat.max() / flat.min())
            assert got["dynamic_range"] == pytest.approx(bits, abs=0.2)
            assert got["underflows%"] == got["overflows%"] == 0


def test_a_product_tells_what_its_rounding_loses():
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(x @ w)

    w = jnp.float32([[1e-5, 1.0, 1e4, 1e4]])
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.0), "16-mixed", watch=1)
    x = np.float32([[1e-3], [1e2]])
    seen = jax.device_get(step(step.init(w), x)[1]["watched"]["activation"]["layer"])
    assert seen["underflows%"] == 100 / 8  # of 8: 1e-8 becomes 0, and twice 1e6 inf
    assert seen["overflows%"] == 100 / 4


def _kernel(w):
    return jnp.reshape(w, (1, 1, *w.shape))


PRODUCTS = {
    "matrix": jnp.matmul,
    "convolution": lambda x, w: lax.conv_general_dilated(
        x[:, None, None], _kernel(w), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )[:, 0, 0],
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("policy", ["16-mixed", "16-true"])
def test_a_product_whose_result_is_stored_low_tells_what_was_lost(policy, product):
    def loss_fn(params, x):
        with jax.named_scope("first"):
            x = PRODUCTS[product](x, params["first"])
        with jax.named_scope("middle"):
            x = jax.nn.relu(PRODUCTS[product](x, params["middle"]))
        with jax.named_scope("last"):
            return 1e-6 * jnp.sum(PRODUCTS[product](x, params["last"]))

    w, scale = np.float32([[1e-5, 1.0, 1e4, 1e4]]), mpjax.StaticLossScale(1.0)
    params = {"first": w, "middle": np.eye(4, dtype="f"), "last": np.full((4, 4), 1e-2, "f")}
    tx, options = optax.sgd(0.0), {"watch": 1, "loss_scale": scale, "rounding": "nearest"}
    if policy == "16-mixed":
        del options["rounding"]
    step = mpjax.make_train_step(loss_fn, tx, policy, **options)
    x = np.float32([[1e-3], [1e2]])
    seen = jax.device_get(step(step.init(params), x)[1]["watched"])
    first = seen["activation"]["first"]
    assert first["underflows%"] == 100 / 8  # of 8: 1e-8 becomes 0, and twice 1e6 inf
    assert first["overflows%"] == 100 / 4
    assert first["amax"] == pytest.approx(1e6, rel=1e-3)
    # The largest is 1e-6, the smallest a product of 4e-8, which float16 rounds to 6e-8.
    assert seen["gradient"]["last"]["amax"] == pytest.approx(1e-6, rel=2**-4)
    assert seen["gradient"]["last"]["dynamic_range"] == pytest.approx(np.log2(25), abs=0.1)


def test_a_model_without_names_is_told_apart_by_its_source_lines():
    def loss_fn(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    step = mpjax.make_train_step(loss_fn, optax.sgd(0.0), "bf16-mixed", watch=1)
    seen = step(step.init(jnp.eye(4)), X)[1]["watched"]
    assert [name.partition(":")[0] for name in seen["activation"]] == ["test_numerics_watch.py"]


def test_looking_changes_no_number_of_the_step():
    new = []
    for watch in (None, 1):
        step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "bf16-mixed", watch=watch)
        new.append(step(step.init(params()), X)[0])
    assert_bitwise_equal(*new)


def test_shares_are_of_the_compute_dtype_and_of_scaled_gradients():
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "16-mixed", watch=1, loss_scale=2.0**20)
    _, metrics = step(step.init(params()), X)
    seen = jax.device_get(metrics["watched"])
    assert seen["weight"]["up"]["underflows%"] == pytest.approx(100 / 24)  # of 24 that are not 0
    assert seen["weight"]["up"]["overflows%"] == pytest.approx(100 / 24)
    assert seen["weight"]["down"]["overflows%"] == seen["weight"]["down"]["underflows%"] == 0
    kept = mpjax.PolicyMap("16-mixed", {"up": "float32"})
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), kept, watch=1)
    _, metrics = step(step.init(params()), X)
    assert metrics["watched"]["weight"]["up"]["overflows%"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
def test_what_rounds_to_zero_and_to_inf_is_what_a_cast_rounds_so(dtype):
    zero, inf = (np.array(bits, np.uint32).view(np.float32) for bits in limits(jnp.dtype(dtype)))
    for edge, up in ((zero, np.float32(np.inf)), (inf, np.float32(0))):
        with np.errstate(over="ignore", under="ignore"):
            ends = np.array([edge, np.nextafter(edge, up)])
            inside, other = ends.astype(dtype).astype(np.float32)
        assert inside in (0, np.inf)
        assert np.isfinite(other)
        assert other != 0
    assert [int(x) for x in limits(jnp.dtype("float32"))] == [0, 0x7F800000]


@pytest.mark.standard_promotion("optax.adam promotes its count")
def test_a_step_that_does_not_look_runs_no_kernel_and_no_copy_more():
    def convolved(kernels, images):
        for kernel in kernels:
            options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
            images = jnp.tanh(
                jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", **options)
            )
        return jnp.mean(images**2)

    kernels = [jnp.ones((3, 3, 2, 4)), jnp.ones((3, 3, 4, 4))]
    found = []
    for watch in (None, 100):
        step = mpjax.make_train_step(convolved, optax.adam(1e-3), "16-mixed", watch=watch)
        state, images = step.init(kernels), jnp.ones((2, 8, 8, 2))
        text = step.lower(state, images).compile().as_text()
        outside_of_branches = text[text.index("\nENTRY") :]
        # JAX 0.10 copies all the same: see `_watch._behind`.
        kinds = "fusion|copy" if jax.__version_info__ >= (0, 12) else "fusion"
        arrays = rf"= (\w+\[[\d,]+\]\S* (?:{kinds}))\("
        found.append(re.findall(arrays, outside_of_branches))
    assert len(found[0]) > 10
    assert sorted(found[0]) == sorted(found[1])


def test_steps_in_a_loop_stack_what_they_watched():
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "bf16-mixed", watch=2)
    state = step.init(params())
    _, metrics = jax.lax.scan(step, state, jnp.stack([X] * 3))
    seen = metrics["watched"]
    assert [*seen] == ["is_new", "activation", "gradient", "weight", "wgrad"]
    np.testing.assert_array_equal(seen["is_new"], [True, False, True])
    np.testing.assert_array_equal(seen["weight"]["up"]["amax"], [1e6, np.nan, 1e6])
    with pytest.raises(KeyError, match="weights"):
        seen["weights"]


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
@pytest.mark.parametrize("watch", [None, pytest.param(100, marks=pytest.mark.slow)])
def test_a_step_that_could_be_diagnosed_is_the_program_of_one_that_could_not(watch):
    def lowered(*, diagnosis):
        step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "16-mixed", watch=watch)
        state = step.init(params())
        if diagnosis:
            assert step.diagnose(state, X).rows
        else:
            del step._diagnosis
        return step.lower(state, X)

    one, other = lowered(diagnosis=True), lowered(diagnosis=False)
    assert one.as_text() == other.as_text()
    compiled = one.compile(), other.compile()
    bytes_accessed = [c.cost_analysis()["bytes accessed"] for c in compiled]
    temporaries = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    assert len(set(bytes_accessed)) == len(set(temporaries)) == 1
    assert not any("counts" in line for line in compiled[0].as_text().splitlines())


def test_a_step_inside_a_shard_map_is_watched(devices):
    mesh = jax.sharding.Mesh(np.array(devices), "d")
    spec = jax.sharding.PartitionSpec
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "bf16-mixed", axis_name="d", watch=2)
    state = step.init(params())
    both = jax.shard_map(step, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())
    _, metrics = jax.jit(both)(state, X)
    plain = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "bf16-mixed", watch=2)
    _, want = plain(plain.init(params()), X)
    seen, want = metrics["watched"], want["watched"]
    # A shard's loss is the mean of its own eighth: so are the gradients inside it.
    seen = dict(seen)
    for statistics in seen["gradient"].values():
        statistics |= {name: statistics[name] / 8 for name in ("amax", "l2_norm")}
    for got, one in zip(*map(jax.tree.leaves, (seen, dict(want))), strict=True):
        np.testing.assert_allclose(got, one, rtol=2**-6, atol=1e-9)


def _scanned(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def _branched(w, x):
    return lax.cond(w.sum() > -9, lambda x: jnp.tanh(x @ w[0]), lambda x: x, x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inner", [_scanned, _branched])
def test_loops_and_branches_inside_a_shard_map_are_watched(inner, check_vma, devices):
    def loss_fn(w, x):
        return jnp.mean(inner(w, x) ** 2)

    w, mesh = jnp.stack([jnp.eye(4) / 2] * 2), jax.sharding.Mesh(np.array(devices), "d")
    one = mpjax.make_train_step(loss_fn, optax.sgd(0.0), "bf16-mixed", watch=1, donate=False)
    all_ = mpjax.make_train_step(loss_fn, optax.sgd(0.0), "bf16-mixed", watch=1, axis_name="d")
    spec = jax.sharding.PartitionSpec
    both = jax.shard_map(
        all_, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec(), check_vma=check_vma
    )
    want = one(one.init(w), X)[1]["watched"]["activation"]
    seen = jax.jit(both)(all_.init(w), X)[1]["watched"]["activation"]
    for got, right in zip(*map(jax.tree.leaves, (seen, want)), strict=True):
        np.testing.assert_allclose(got, right, rtol=2**-6, atol=1e-9)
