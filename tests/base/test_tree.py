"""Pytrees: what moves and what does not, selection, finiteness, readable paths."""

from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from _helpers import bits, count_casts, over_shards
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._base.tree import leaf_paths
from mpjax.testing import assert_bitwise_equal

BF16 = mpjax.Policy("float32", "bfloat16", "float32")
F16 = mpjax.Policy("float32", "float16", "float32")
F64 = mpjax.Policy("float64", "float64", "float64")

STAYS = {
    "int32": jnp.arange(3),
    "int8": jnp.ones(2, jnp.int8),
    "int4": jnp.ones(2, jnp.int4),
    "uint8": np.ones(2, np.uint8),
    "bool": jnp.array([True, False]),
    "fp8 e4m3": jnp.ones(2, jnp.float8_e4m3fn),
    "fp8 e5m2": jnp.ones(2, jnp.float8_e5m2),
    "fp8 e8m0": np.ones(2, ml_dtypes.float8_e8m0fnu),
    "fp4": jnp.ones(2, jnp.float4_e2m1fn),
    "complex64": jnp.ones(2, jnp.complex64),
    "complex128": np.ones(2, np.complex128),
    "numpy complex": np.complex64(1j),
    "typed key": jax.random.key(0),
    "raw key": jax.random.PRNGKey(0),
    "keys": jax.random.split(jax.random.key(0), 3),
    "string": "relu",
    "bytes": b"x",
    "python int": 3,
    "python bool": True,
    "python float": 0.1,
    "python complex": 1j,
    "function": jax.nn.relu,
    "object array": np.array(["a", None], dtype=object),
    "text array": np.array(["a", "b"]),
    "spec of ints": jax.ShapeDtypeStruct((2,), jnp.int32),
    "spec of keys": jax.eval_shape(jax.random.key, 0),
}


class Attention(NamedTuple):
    query: Any
    key: Any
    value: Any


class Box(eqx.Module):
    array: jax.Array
    activation: Any = eqx.field(static=True)
    name: str


# -- law 1: what moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STAYS)
@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute", "cast_to_output"])
def test_law_01_only_floating_leaves_move(kind, method):
    leaf = STAYS[kind]
    policy = mpjax.get_policy("bfloat16")
    assert getattr(policy, method)(leaf) is leaf
    assert getattr(policy, method)({"a": [leaf, None]})["a"][0] is leaf


@pytest.mark.parametrize("source", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("make", [jnp.asarray, np.asarray, lambda x: np.asarray(x)[()]])
def test_law_01_floating_leaves_move(source, target, make):
    x = make(jnp.asarray(1.5, source))
    got = mpjax.get_policy(target).cast_to_compute(x)
    assert got.dtype == jnp.dtype(target)
    assert isinstance(got, jax.Array) == isinstance(x, jax.Array)  # NumPy's stays NumPy's
    assert float(got) == 1.5


def test_law_01_numpy_float64_is_float32_to_jax_with_x64_off():
    x = np.array([1.0 + 2.0**-11 + 2.0**-40, 1e300])
    got = F16.cast_to_compute({"x": x, "s": x[0]})
    # In float32 the first is a tie, which goes to even; straight from float64 it would go up.
    assert float(got["x"][0]) == float(got["s"]) == 1.0
    assert np.isinf(got["x"][1])
    assert got["x"].dtype == got["s"].dtype == jnp.float16
    assert BF16.cast_to_param(x).dtype == np.float32
    spec = BF16.cast_to_compute(jax.ShapeDtypeStruct((2,), np.float64))
    assert spec.dtype == jnp.bfloat16


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray, np.float64, lambda x: x.dtype])
def test_law_01_float64_stays_with_x64_on_unless_the_policy_names_it(make):
    with jax.enable_x64(True):
        x = make(np.float64(1.0))
        x = jax.ShapeDtypeStruct((), x) if isinstance(x, np.dtype) else x
        assert BF16.cast_to_compute(x) is x
        assert mpjax.Policy("f64", "bf16", "f32").cast_to_compute(x).dtype == jnp.bfloat16
        assert F64.cast_to_compute(jnp.float32(1)).dtype == jnp.float64


def test_law_01_specs_keep_their_sharding_and_casts_keep_devices(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    spec = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding, weak_type=True)
    got = BF16.cast_to_compute({"w": spec})["w"]
    assert got == jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=sharding)
    assert not got.weak_type
    array = BF16.cast_to_compute(jax.device_put(jnp.ones(8), sharding))
    assert array.sharding == sharding


@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute", "cast_to_output"])
@pytest.mark.parametrize("container", [dict, flax.core.FrozenDict, nnx.State])
def test_law_01_overwrite_with_gradient_is_never_cast(method, container):
    owg = {"dense": {"kernel_scale": jnp.ones(1), "amax": jnp.ones(4)}}
    tree = container({"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": owg})
    for policy in (mpjax.get_policy("bfloat16"), mpjax.PolicyMap("bfloat16")):
        got = getattr(policy, method)(tree)
        assert got["_overwrite_with_gradient"]["dense"]["amax"].dtype == jnp.float32
        assert got["params"]["w"].dtype == jnp.bfloat16


def test_law_01_overwrite_with_gradient_as_attribute_is_never_cast():
    class Variables(eqx.Module):
        params: Any
        _overwrite_with_gradient: Any

    got = BF16.cast_to_compute(Variables(jnp.ones(2), jnp.ones(2)))
    assert got.params.dtype == jnp.bfloat16
    assert got._overwrite_with_gradient.dtype == jnp.float32


def test_law_01_overwrite_with_gradient_is_never_scaled():
    tree = {"_overwrite_with_gradient": {"s": jnp.ones(1)}, "w": jnp.ones(1)}
    for method in ("scale", "unscale"):
        got = getattr(mpjax.StaticLossScale(8), method)(tree)
        assert got["_overwrite_with_gradient"]["s"] == 1
        assert got["w"] != 1


def test_law_01_equinox_modules_are_plain_pytrees():
    got = BF16.cast_to_compute(Box(jnp.ones(2), jax.nn.gelu, "b"))
    assert (got.array.dtype, got.activation, got.name) == (jnp.bfloat16, jax.nn.gelu, "b")
    layer = BF16.cast_to_compute(eqx.nn.Linear(2, 3, key=jax.random.key(0)))
    assert layer(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_law_01_nnx_states_and_modules():
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    cast = BF16.cast_to_compute(state)
    assert {x.dtype for x in jax.tree.leaves(cast)} == {jnp.dtype(jnp.bfloat16)}
    assert nnx.merge(graph, cast).scale[...].dtype == jnp.bfloat16


def test_law_01_nnx_dropout_keeps_its_key():
    state = nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    assert_bitwise_equal(BF16.cast_to_compute(state), state)


def test_law_01_optax_states_keep_their_counters():
    state = optax.adam(1e-3).init({"w": jnp.ones(2)})
    got = BF16.cast_to_compute(state)
    assert type(got) is type(state)
    assert got[0].count.dtype == jnp.int32
    assert got[0].mu["w"].dtype == jnp.bfloat16


def test_law_01_haiku_params():
    params = hk.transform(lambda x: hk.Linear(3)(x)).init(jax.random.key(0), jnp.ones((1, 2)))
    got = F16.cast_to_compute(params)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float16)}


def test_law_01_loss_scales_inside_a_state_are_float32_leaves_like_any():
    # A cast of the whole train state would move them: only parameters are cast, by path.
    policies = mpjax.PolicyMap("bf16-mixed", {"scale": "float32"})
    tree = {"scale": mpjax.DynamicLossScale(), "params": jnp.ones(2)}
    got = policies.cast_to_compute(tree)
    assert_bitwise_equal(got["scale"], tree["scale"])
    assert got["params"].dtype == jnp.bfloat16


# -- law 3: a cast that is none adds nothing -----------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute", "cast_to_output"])
def test_law_03_no_cast_in_the_jaxpr_when_the_dtype_matches(dtype, method):
    cast = getattr(mpjax.get_policy(dtype), method)
    tree = {"w": jnp.ones(2, dtype), "n": jnp.arange(2)}
    assert jax.make_jaxpr(cast)(tree).jaxpr.eqns == []
    assert cast(tree)["w"] is tree["w"]


def test_law_03_no_cast_of_a_weakly_typed_array_that_matches():
    cast = mpjax.get_policy("float32").cast_to_compute
    assert jax.make_jaxpr(lambda x: cast(x * 2.0))(1.0).jaxpr.eqns[-1].primitive.name == "mul"


def test_law_03_one_cast_where_the_dtype_differs():
    assert count_casts(BF16.cast_to_compute, {"w": jnp.ones(2), "b": jnp.ones(2)}) == 2


def test_cast_is_differentiable_and_its_gradient_has_the_parameters_dtype():
    grads = jax.grad(lambda w: BF16.cast_to_compute(w).sum().astype(jnp.float32))(jnp.ones(2))
    assert grads.dtype == jnp.float32


# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": {"b": 1}, "c": [2, (3,)]}, ["a/b", "c/0", "c/1/0"]),
        (Attention(1, 2, 3), ["query", "key", "value"]),
        ({"x": Attention([1], {"k": 2}, 3)}, ["x/query/0", "x/key/k", "x/value"]),
        ({"value": 1}, ["value"]),
        (1.0, [""]),
        (None, []),
    ],
)
def test_paths_are_what_users_write(tree, paths):
    assert leaf_paths(tree) == paths


# -- all_finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"])
def test_all_finite_sees_one_bad_value_in_any_dtype(bad, dtype):
    good = jnp.ones((3, 2), dtype)
    assert mpjax.all_finite({"a": good, "b": good})
    assert not mpjax.all_finite({"a": good, "b": good.at[1, 1].set(jnp.asarray(bad, dtype))})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", [(4096,), (64, 64), (128, 130), (1024, 1024), (3, 3, 64, 24)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_all_finite_sees_one_bad_value_anywhere_in_a_large_array(bad, shape, dtype):
    # XLA:CPU of JAX 0.12 passes over NaN in the maximum of an array of 4096 values and more.
    good = jnp.full(shape, 2, dtype)
    all_finite = jax.jit(mpjax.all_finite)
    assert all_finite([good])
    for index in (0, 7, good.size // 2 + 3, good.size - 1):
        where = np.unravel_index(index, shape)
        assert not all_finite([good.at[where].set(bad)])


@pytest.mark.parametrize(
    "tree", [None, {}, {"n": jnp.arange(3)}, jnp.zeros((0, 3)), *STAYS.values()]
)
def test_all_finite_of_what_cannot_be_infinite(tree):
    got = mpjax.all_finite(tree)
    assert got
    assert (got.shape, got.dtype) == ((), jnp.bool_)


@pytest.mark.parametrize("x", [float("nan"), float("-inf"), complex("nan"), np.float64("inf")])
def test_all_finite_reads_numbers(x):
    assert not mpjax.all_finite([1.0, x])


# NumPy, which JAX 0.10.0 casts with, warns unless JAX has a cast of that kind already.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_all_finite_sees_what_overflows_in_jax():
    assert not mpjax.all_finite(np.float64(1e300))  # inf in float32, which JAX makes of it
    with jax.enable_x64(True):
        assert mpjax.all_finite(np.float64(1e300))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_all_finite_of_a_large_sharded_array(devices, spec, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    good = np.ones((64, 128), np.float32)
    bad = good.copy()
    bad[40, 77] = np.nan
    all_finite = jax.jit(mpjax.all_finite)
    with jax.set_mesh(mesh):
        good, bad = jax.device_put((good, bad), jax.sharding.NamedSharding(mesh, spec))
        assert (bool(all_finite(good)), bool(all_finite(bad))) == (True, False)
        text = all_finite.lower(good).compile().as_text()
    assert "all-gather" not in text
    assert "collective-permute" not in text


def test_all_finite_of_large_arrays_under_vmap_and_shard_map(devices):
    rows = jnp.ones((8, 64, 128)).at[5, 3, 2].set(jnp.nan)
    want = [i != 5 for i in range(8)]
    assert jax.jit(jax.vmap(mpjax.all_finite))(rows).tolist() == want
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    each = over_shards(lambda x: mpjax.all_finite(x)[None], mesh, P("x"), out_specs=P("x"))
    assert each(rows).tolist() == want


def test_all_finite_skips_float0():
    grads = jax.grad(lambda n: 1.0, allow_int=True)(jnp.arange(3))
    assert mpjax.all_finite(grads)


ROWS = np.ones((8, 2), np.float32)
BAD_ROWS = ROWS.copy()
BAD_ROWS[5, 1] = np.nan


def test_all_finite_agrees_under_vmap_and_pmap():
    for transform in (jax.vmap, jax.pmap):
        agree = transform(lambda x: mpjax.all_finite(x, axis_name="i"), axis_name="i")
        assert not agree(BAD_ROWS).any()
        assert agree(ROWS).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axis_name", "unhappy"), [(("a", "b"), 8), ("b", 2), ("a", 4), ((), 1), (None, 1)]
)
def test_all_finite_agrees_over_mesh_axes(devices, axis_name, unhappy, check_vma):
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    rows = jax.P(("a", "b"))

    def of_shard(x):
        return mpjax.all_finite(x, axis_name)[None]

    finite = over_shards(of_shard, mesh, rows, out_specs=rows, check_vma=check_vma)
    assert (~finite(BAD_ROWS)).sum() == unhappy
    assert finite(ROWS).all()


# -- select_tree ---------------------------------------------------------------------------------

FULL = {
    "f32": jnp.array([1.0, -0.0, jnp.nan]),
    "bf16": jnp.ones(2, jnp.bfloat16),
    "fp8": jnp.ones(2, jnp.float8_e4m3fn),
    "int": jnp.arange(2),
    "flag": jnp.array(True),
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(0)),
    "numpy": np.ones((2, 2), np.float32),
    "text": "gelu",
    "bytes": b"b",
    "fun": jax.nn.gelu,
    "none": None,
    "empty": jnp.zeros((0,)),
    "number": 1.5,
}
OTHER = {
    **FULL,
    "f32": jnp.array([-0.0, 2.0, jnp.inf]),
    "bf16": jnp.zeros(2, jnp.bfloat16),
    "int": jnp.arange(2) + 7,
    "flag": jnp.array(False),
    "key": jax.random.key(1),
    "numpy": np.zeros((2, 2), np.float32),
    "number": 2.5,
}


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_select_tree_chooses_bit_for_bit(pred):
    a, b = (jax.tree.map(lambda x: x, tree) for tree in (FULL, OTHER))
    as_arrays = {"number": jnp.asarray(1.5)}, {"number": jnp.asarray(2.5)}
    assert_leaves_equal(mpjax.select_tree(pred, a, b), {**FULL, **as_arrays[0]})
    assert_leaves_equal(mpjax.select_tree(~jnp.asarray(pred), a, b), {**OTHER, **as_arrays[1]})


def assert_leaves_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if hasattr(b, "dtype"):
            assert bits(a) == bits(b)
        else:
            assert a is b or a == b


def test_select_tree_under_vmap_over_pred():
    preds = jnp.array([True, False, True])
    a, b = {"w": jnp.ones((3, 2)), "k": jnp.ones(3)}, {"w": jnp.zeros((3, 2)), "k": jnp.zeros(3)}
    got = jax.vmap(mpjax.select_tree)(preds, a, b)
    assert got["w"].tolist() == [[1, 1], [0, 0], [1, 1]]
    only_pred = jax.vmap(mpjax.select_tree, in_axes=(0, None, None))(preds, 1.0, 2.0)
    assert only_pred.tolist() == [1, 2, 1]


def test_select_tree_gradients_go_to_the_chosen_tree_only():
    def loss(a, b, pred):
        return jax.tree.reduce(jnp.add, mpjax.select_tree(pred, a, b)) ** 2

    for pred in (True, False):
        da, db = jax.grad(loss, (0, 1))(jnp.float32(3), jnp.float32(5), jnp.array(pred))
        assert (float(da), float(db)) == ((6.0, 0.0) if pred else (0.0, 10.0))
        d_inf = jax.grad(loss, 1 if pred else 0)(jnp.float32(3), jnp.float32(5), jnp.array(pred))
        assert float(d_inf) == 0


def test_select_tree_never_asks_for_a_gradient_of_pred():
    def loss(w):
        return mpjax.select_tree(w > 2, w * 3, w)

    assert jax.grad(loss)(jnp.float32(3)) == 3
    assert jax.grad(loss)(jnp.float32(1)) == 1


def test_select_tree_where_shards_vary(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))

    def choose(x, y):
        return mpjax.select_tree(jnp.all(x > 0), x, y), mpjax.select_tree(jnp.array(True), y, x)

    for check_vma in (True, False):
        specs = {"out_specs": P("i"), "check_vma": check_vma}
        sharded = over_shards(choose, mesh, P("i"), P(), **specs)
        got, _ = sharded(jnp.arange(8.0), jnp.full(1, -1.0))
        assert got.tolist() == [-1, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_overwritten_leaves_are_judged_since_an_inf_in_them_would_stay(bad):
    tree = {"w": jnp.ones(2), "_overwrite_with_gradient": {"amax": jnp.array([1.0, bad])}}
    assert not mpjax.all_finite(tree)
    assert mpjax.all_finite(tree["w"])
    tx = mpjax.with_loss_scale(optax.sgd(0.1), mpjax.StaticLossScale(8))
    params = jax.tree.map(jnp.ones_like, tree)
    updates, state = tx.update(tree, tx.init(params), params)
    assert not state.grads_finite
    kept = mpjax.optim.apply_updates(params, updates)
    assert kept["_overwrite_with_gradient"]["amax"].tolist() == [1.0, 1.0]
