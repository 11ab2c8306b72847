"""Attention on several devices, and in exported programs: whose kernel, what numbers, what is told.

Eight devices of this CPU stand for others. A kernel that must not run is one that raises.
"""

import functools
import types
from unittest import mock

import _attention_kernel as formulas
import _attention_written as written
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

pytestmark = [
    pytest.mark.standard_promotion("libraries promote masks and counts implicitly"),
    pytest.mark.no_leak_check("a jitted gradient of a shard_map leaks in JAX, of q * k * v too"),
]
EXAMPLES, TIME, HEADS, SIZE = 8, 32, 4, 8
SHAPE = EXAMPLES, TIME, HEADS, SIZE
SPLIT = P("data", None, "model")


@pytest.fixture(autouse=True)
def short_attentions_run_in_kernels(monkeypatch):
    """On TPUs too, where they do not pay: what is tested is the kernel, and compiles quickly."""
    monkeypatch.setattr(formulas.flash, "_LEAST", 0)


IN_XLAS_FORM = "attention in XLA's form: XLA splits the program over 8 devices"


def run(*_):
    raise AssertionError("a kernel runs in a program that XLA splits")


NEVER = types.SimpleNamespace(
    NAME="never", why_not=lambda *_: "", why_not_installed=lambda *_: "", forward=run, backward=run
)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def operands(*, heads=HEADS):
    key = jax.random.key(0)
    shapes = SHAPE, (*SHAPE[:2], heads, SIZE), (*SHAPE[:2], heads, SIZE)
    return [jax.random.normal(jax.random.fold_in(key, i), s) for i, s in enumerate(shapes)]


def step(fun, argnums=(0, 1)):
    def loss(*args):
        return jnp.sum(jnp.sin(fun(*args).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, argnums=argnums))


def assert_near(found, wanted, bound):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


PADDED = (jnp.arange(TIME) < jnp.arange(4, 36, 4)[:, None])[:, None, None]
KEPT = {
    "causal": {"is_causal": True},
    "padded": {"mask": PADDED},
    "bias": {"bias": jnp.sin(jnp.arange(1.0 * HEADS * TIME * TIME)).reshape(1, HEADS, TIME, TIME)},
}
PLACES = {  # of query, of key and value, heads of these, and what is asked of it
    "examples": (P("data"), P("data"), HEADS, "causal"),
    "examples and heads": (SPLIT, SPLIT, HEADS, "bias"),
    "heads of the query alone": (SPLIT, P("data"), 1, "padded"),
    "queries": (P("data", "model"), P("data"), HEADS, "causal"),
    "the size of a head": (*[P("data", None, None, "model")] * 2, HEADS, "padded"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("places", PLACES)
def test_split_by_jit_it_is_xlas_form_and_right(places):
    of_query, of_key, heads, name = PLACES[places]
    args, mesh = operands(heads=heads), mesh_of()
    fun = mpjax.autocast(functools.partial(mpjax.dot_product_attention, **KEPT[name]), "bf16-mixed")
    wanted = step(lambda *xs: fun(*xs))(*args)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (of_query, of_key, of_key), strict=True)
    ]
    with formulas.everywhere(NEVER):
        found = step(lambda *xs: fun(*xs))(*placed)
    assert_near(found, wanted, 2**-9)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_in_a_mesh_that_is_set_it_is_xlas_form_and_right(kind):
    args, mesh = operands(), mesh_of(kind)
    fun = functools.partial(mpjax.dot_product_attention, is_causal=True)
    wanted = step(fun)(*args)
    with formulas.everywhere(NEVER), jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, SPLIT)) for x in args]
        found = step(lambda *xs: fun(*xs))(*placed)
    assert_near(found, wanted, 1e-5)


def placed_model():
    """Returns weights whose columns, and tokens whose examples, lie on several devices."""
    mesh = mesh_of()
    x = jnp.concatenate([written.X] * 4)
    return (
        jax.device_put(written.WEIGHTS, NamedSharding(mesh, P(None, None, "model"))),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["causal_by_tril", "by_linen", "in_groups"])
def test_attention_that_nobody_named_is_xlas_form_and_right(name):
    longer = {"BATCH": EXAMPLES, "FIRST": jnp.concatenate([written.FIRST] * 4)}
    with mock.patch.multiple(written, **longer):
        fun = mpjax.autocast(written.FOUND[name], "bf16-mixed")
        placed = placed_model()
        eqns = list(equations(jax.make_jaxpr(fun)(*placed).jaxpr))
        assert sum(eqn.primitive.name == "attention" for eqn in eqns) == 1
        wanted = step(lambda *xs: fun(*xs))(*map(np.asarray, placed))
        with formulas.everywhere(NEVER):
            found = step(lambda *xs: fun(*xs))(*placed)
    assert_near(found, wanted, 2**-7)


def mapped(*args, check_vma=False, axes=("data", "model"), **kwargs):
    fun = functools.partial(mpjax.dot_product_attention, **kwargs)
    split = P(*(axis if axis in axes else None for axis in SPLIT))
    return jax.shard_map(
        fun,
        mesh=mesh_of(),
        in_specs=split,
        out_specs=split,
        axis_names=set(axes),
        check_vma=check_vma,
    )(*args)


@pytest.mark.parametrize("check_vma", [False, True])
def test_mapped_over_examples_and_heads_it_is_the_kernel_and_right(check_vma):
    args = operands()

    def both(fun):  # a new function, of which nothing is remembered
        return step(lambda *xs: fun(*xs, is_causal=True), (0, 1, 2))(*args)

    wanted = both(mpjax.dot_product_attention)
    fun = functools.partial(mapped, check_vma=check_vma)
    assert_near(both(fun), wanted, 1e-5)
    with formulas.everywhere(NEVER), pytest.raises(AssertionError, match="a kernel runs"):
        both(fun)
    with formulas.everywhere(formulas):
        assert_near(both(fun), wanted, 1e-5)


def told(fun, *args):
    found = mpjax.explain(fun, "bf16-mixed")(*args)
    (reason,) = {row.reason for row in found.rows if "attention in" in row.reason}
    return reason


def longer(*, heads=HEADS):
    return [jnp.zeros((EXAMPLES, 128, heads, SIZE))] * 3


def test_explain_says_that_xla_splits_it_by_arguments_or_by_the_mesh():
    placed = [jax.device_put(x, NamedSharding(mesh_of(), P("data"))) for x in longer()]
    fun = functools.partial(mpjax.dot_product_attention, is_causal=True)
    kernels = "cuDNN on GPUs; flash attention on TPUs"
    assert told(fun, *longer()) == f"attention in one kernel: {kernels}"
    by_jit = f"{IN_XLAS_FORM}; inside jax.shard_map, {kernels}"
    assert told(fun, *placed) == by_jit
    with jax.set_mesh(mesh_of()):
        assert told(fun, *longer()) == by_jit
    assert told(mapped, *placed) == f"attention in one kernel: {kernels}"
    with mock.patch.multiple(written, BATCH=EXAMPLES):
        assert told(written.FOUND["causal_by_tril"], *placed_model()).startswith(IN_XLAS_FORM)


def test_explain_says_what_a_map_takes_from_kernels():
    partly = told(functools.partial(mapped, axes=("data",)), *longer())
    assert partly.startswith("attention in XLA's form: XLA splits the program over 2 devices")
    tracked = told(functools.partial(mapped, check_vma=True), *longer())
    assert tracked == (
        "attention in one kernel: cuDNN on GPUs; not on TPUs: Pallas needs jax.shard_map(..., "
        "check_vma=False)"
    )


# -- exported --------------------------------------------------------------------------------------


def exported(fun, *args, platforms):
    return jax.export.export(fun, platforms=platforms)(*args)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")])
def test_an_exported_program_calls_no_kernel_but_a_tpus(platforms):
    """CuDNN's call may not be in an exported program, which says nothing of its version."""
    tokens = {"TIME": 128, "FIRST": jnp.arange(128) < jnp.array([100, 128])[:, None]}
    x = jax.random.normal(jax.random.key(1), (written.BATCH, 128, written.WIDTH))
    with mock.patch.multiple(written, **tokens):
        fun = step(mpjax.autocast(written.FOUND["causal_by_tril"], "bf16-mixed"))
        made = exported(fun, written.WEIGHTS, x, platforms=platforms)
        text = made.mlir_module()
        assert made.platforms == platforms
        assert ("tpu_custom_call" in text) is ("tpu" in platforms)
        assert "cudnn" not in text
        if "cpu" in platforms:
            # Compiled twice: a few values are rounded the other way.
            assert_near(made.call(written.WEIGHTS, x), fun(written.WEIGHTS, x), 2**-12)


def test_a_batch_is_left_open_in_xlas_form():
    (batch,) = jax.export.symbolic_shape("batch")
    array = jax.ShapeDtypeStruct((batch, *SHAPE[1:]), jnp.float32)
    low = mpjax.autocast(
        functools.partial(mpjax.dot_product_attention, is_causal=True), "bf16-mixed"
    )
    made = exported(step(low), array, array, array, platforms=("cpu", "cuda", "tpu"))
    assert "tpu_custom_call" not in made.mlir_module()
    assert_near(made.call(*operands()), step(low)(*operands()), 2**-9)
