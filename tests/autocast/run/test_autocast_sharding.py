"""Explicit sharding: what JAX's types let one write has, under autocast, the types of plain JAX."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _samples import normal
from _small import BF16, KEY, W, X, distance, loss
from jax import lax
from jax.sharding import AxisType, auto_axes, explicit_axes, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import autocast

S = normal(2, 4, 16, 16, scale=0.3)
IMAGE = normal(3, 8, 8, 8, 4)
KERNEL = normal(4, 3, 3, 4, 4, scale=0.3)
POINT = normal(5, 1, 1, 4, 8, scale=0.3)
LABELS = jnp.arange(8) % 5
ROWS, WHOLE, COLUMNS = P("x", None), P(None, None), P(None, "y")
BY_DATA = P("x", None, None, None), P(None, None, None, None)


def explicit_mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


@pytest.fixture
def explicit():
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        yield mesh


def product(x, w, *spec, **sums):
    """A product whose sharding is asked for, with sums that may be left to be taken."""
    return jnp.einsum("bh,hd->bd", x, w, out_sharding=P(*spec, **sums))


def partial(x, w):
    return product(x, w, "x", None, unreduced={"y"})


def gathered(w):
    """A weight whose gradient is left unreduced, as fully sharded data parallelism is written."""
    return reshard(w, P(None, None, reduced={"x"}))


def layer(c, w):
    return jnp.tanh(c @ gathered(w)), None


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(x, w):
    q, k = (x @ w).reshape(8, 4, 4), (x @ w.T).reshape(8, 4, 4)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return jnp.einsum("bqk,bkd->bqd", weights, q)


def cross_entropy(x, w):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), LABELS[:, None], 1))


def convolved(x, k):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers))


def pooled(x, k):
    return lax.reduce_window(
        convolved(x, k), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )


def sharded_by_hand(x, w):
    body = jax.shard_map(
        lambda a, b: jnp.tanh(a @ b), in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
    )
    return body(x, w) @ w


def twice(x, w):
    return jnp.tanh(x @ w) @ w


@jax.custom_vjp
def with_rule(x, w):
    return jnp.tanh(x @ w)


def _backward(kept, ct):
    x, w = kept
    weight = jnp.einsum("bi,bo->io", x, ct, out_sharding=jax.typeof(w).sharding)
    return ct @ w.T, weight


with_rule.defvjp(lambda x, w: (jnp.tanh(x @ w), (x, w)), _backward)


def sums_left(x, w):
    return reshard(
        lax.reduce_sum(jax.nn.gelu(x @ w), axes=(1,), out_sharding=P("x", unreduced={"y"})), P("x")
    )


def dropped(x, w):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (8, 16), out_sharding=P("x", None))
    return jnp.where(kept, x @ w, 0) @ w


# How the operands are sharded, the function, and other operands than X and W.
def explicitly(x, w):
    """Axes that are explicit inside a region in which XLA chooses."""

    def product(x, w):
        return reshard(x @ w, P("x", "y"))

    def region(x, w):
        return explicit_axes(product, in_sharding=(ROWS, WHOLE))(x, w) @ w

    return auto_axes(region, out_sharding=ROWS)(x, w) @ w


FEATURES = {
    "a sum left": (P("x", "y"), P("y", None), lambda x, w: reshard(partial(x, w), ROWS)),
    "a sum left, added": (
        P("x", "y"),
        P("y", None),
        lambda x, w: reshard(partial(x, w) + partial(x, w), ROWS) @ reshard(w, WHOLE),
    ),
    "a reduction left": (ROWS, COLUMNS, sums_left),
    "a gathered weight": (ROWS, WHOLE, lambda x, w: jnp.tanh(x @ gathered(w))),
    "fully sharded": (ROWS, ROWS, lambda x, w: jnp.tanh(x @ gathered(w)) @ gathered(w)),
    "checkpointed layers": (
        ROWS,
        P(None, "x", None),
        lambda x, s: lax.scan(jax.checkpoint(layer), x, s)[0],
        X,
        S,
    ),
    "tensor parallel": (
        ROWS,
        COLUMNS,
        lambda x, w: product(norm(jax.nn.gelu(x @ w)), reshard(w, COLUMNS).T, "x", None),
    ),
    "reshard": (ROWS, WHOLE, lambda x, w: jnp.tanh(reshard(x @ w, P("y", None)) @ w)),
    "out_sharding": (
        P("x", "y"),
        P("y", None),
        lambda x, w: jnp.tanh(jnp.dot(x, w, out_sharding=ROWS)) @ reshard(w, WHOLE),
    ),
    "take": (P(), WHOLE, lambda x, w: jnp.take(w, LABELS, axis=0) @ w),
    "get": (ROWS, WHOLE, lambda x, w: w.at[reshard(LABELS, P("x"))].get(out_sharding=ROWS) @ w + x),
    "vmap with spmd_axis_name": (
        ROWS,
        WHOLE,
        lambda x, w: jax.vmap(lambda row: twice(row, w), spmd_axis_name="x")(x),
    ),
    "auto_axes": (ROWS, WHOLE, lambda x, w: auto_axes(twice, out_sharding=ROWS)(x, w) @ w),
    "explicit_axes": (ROWS, WHOLE, explicitly),
    "shard_map of one axis": (ROWS, WHOLE, sharded_by_hand),
    "reshape": (
        ROWS,
        COLUMNS,
        lambda x, w: jnp.reshape(x @ w, (8, 2, 8), out_sharding=P("x", "y", None)).sum(2) @ w[:2],
    ),
    "attention": (ROWS, WHOLE, attention),
    "cross entropy": (ROWS, WHOLE, cross_entropy),
    "custom_vjp": (ROWS, WHOLE, lambda x, w: with_rule(x, w) @ w),
    "cond": (ROWS, WHOLE, lambda x, w: lax.cond(x.sum() > 0, lambda x, w: x @ w, twice, x, w) @ w),
    "a loop": (ROWS, WHOLE, lambda x, w: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x)),
    "checkpoint": (
        ROWS,
        WHOLE,
        jax.checkpoint(twice, policy=jax.checkpoint_policies.dots_saveable),
    ),
    "convolution": (*BY_DATA, convolved, IMAGE, KERNEL),
    "a kernel of one point": (*BY_DATA, convolved, IMAGE, POINT),
    "pooling": (*BY_DATA, pooled, IMAGE, KERNEL),
    "dropout": (ROWS, WHOLE, dropped),
    "outer": (P("x"), P(None), lambda x, w: jnp.tanh(x[:, None] * w[None]) @ S[0], X[:, 0], W[0]),
}


def both(fun):
    return lambda *args: (fun(*args), jax.grad(loss(fun), (0, 1))(*args))


def types(tree):
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


PARTS = 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(PARTS))
def test_types_and_values_under_an_explicit_mesh(part, explicit):
    """A third of the features in one program: the partitioner takes longer than they do."""
    names = list(FEATURES)[part::PARTS]
    given = {}
    for name in names:
        of_x, of_w, _, *others = FEATURES[name]
        given[name] = [jax.device_put(*v) for v in zip(others or (X, W), (of_x, of_w), strict=True)]

    def computed(cast, around=lambda fun: fun):
        funs = {name: around(both(cast(FEATURES[name][2]))) for name in names}
        return jax.jit(lambda args: {name: funs[name](*args[name]) for name in names})

    plain = computed(lambda fun: fun)
    want, got = plain(given), computed(lambda fun: autocast(fun, "bf16-mixed"))(given)
    inside = computed(lambda fun: fun, lambda fun: autocast(fun, "bf16-mixed")).trace(given)
    outside = plain.trace(given).out_info
    for name in names:
        assert types(got[name]) == types(want[name]), name
        assert distance(got[name][0], want[name][0]) < 8 * BF16, name
        # Pooling may choose another winner.
        assert distance(got[name][1], want[name][1]) < 24 * BF16, name
        assert types(inside.out_info[name]) == types(outside[name]), name
    inside.lower()


# Those that name no axis need no mesh in the context: the types of arrays tell it.
WITHOUT_A_CONTEXT = (
    "take",
    "vmap with spmd_axis_name",
    "attention",
    "cross entropy",
    "custom_vjp",
    "cond",
    "checkpoint",
    "convolution",
    "a kernel of one point",
    "pooling",
    "outer",
)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", WITHOUT_A_CONTEXT)
def test_types_of_arrays_on_an_explicit_mesh_that_nobody_set(name, inside):
    of_x, of_w, fun, *others = FEATURES[name]
    mesh = explicit_mesh()
    x, w = (
        jax.device_put(v, jax.NamedSharding(mesh, spec))
        for v, spec in zip(others or (X, W), (of_x, of_w), strict=True)
    )
    plain = both(fun)
    low = autocast(plain, "bf16-mixed") if inside else both(autocast(fun, "bf16-mixed"))
    want, traced = jax.jit(plain).trace(x, w).out_info, jax.jit(low).trace(x, w)
    assert types(traced.out_info) == types(want)
    traced.lower()


@pytest.mark.parametrize("name", FEATURES)
def test_types_under_an_abstract_mesh(name):
    """A program for devices that are not there, traced for types of arrays alone."""
    of_x, of_w, fun, *others = FEATURES[name]
    types_of = (AxisType.Explicit,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=types_of)
    with use_abstract_mesh(mesh):
        x, w = (
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=jax.NamedSharding(mesh, spec))
            for v, spec in zip(others or (X, W), (of_x, of_w), strict=True)
        )
        want, got = (
            jax.jit(both(f)).trace(x, w).out_info for f in (fun, autocast(fun, "bf16-mixed"))
        )
    assert types(got) == types(want)


def test_a_product_is_rounded_where_a_gpu_makes_it_whatever_says_where_it_is(explicit):
    x, w = jax.device_put(X, ROWS), jax.device_put(W, WHOLE)
    fast = jax.jit(autocast(twice, "bf16-mixed"))
    text = fast.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert any(line.rstrip().endswith("-> tensor<8x16xbf16>") for line in dots)


# -- everything else on JAX's default mesh -------------------------------------------------------


def mean_square(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def operands(place=lambda spec: spec):
    w, b = 0.3 * jax.random.normal(KEY, (16, 8)), jnp.ones((8,))
    params = {"w": jax.device_put(w, place(COLUMNS)), "b": jax.device_put(b, place(P("y")))}
    return params, jax.device_put(jax.random.normal(KEY, (32, 16)), place(ROWS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_micro_batches_keep_shardings_and_give_the_same_step(policy, explicit):
    params, batch = operands()
    after = []
    for accumulate in (1, 2):
        options = {"accumulate": accumulate, "donate": False}
        step = mpjax.make_train_step(mean_square, optax.sgd(0.5), policy, **options)
        state = step.init(params)
        new, metrics = step(state, batch)
        assert types(new) == types(state)
        after.append((new.params, metrics["loss"]))
    assert distance(*after) < 4 * BF16
    assert distance(after[1][0], params) > 1e-3


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("policy", ["bf16-mixed", "32-true"])
def test_a_step_on_an_explicit_mesh_that_nobody_set(policy, accumulate):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (P(), P("data")))
    w, batch = jnp.full((16, 8), 0.1), jax.random.normal(KEY, (32, 16))
    losses = []
    for places in ((None, None), (whole, split)):
        params, x = (jax.device_put(v, place) for v, place in zip((w, batch), places, strict=True))
        options = {"accumulate": accumulate, "donate": False}
        step = mpjax.make_train_step(
            lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), optax.sgd(0.5), policy, **options
        )
        state, _ = step(step.init(params), x)
        losses.append(step(state, x)[1]["loss"])
    assert distance(*losses) < BF16


def test_micro_batches_smaller_than_the_devices_are_refused(explicit):
    params, batch = operands()
    step = mpjax.make_train_step(mean_square, optax.sgd(0.5), "bf16-mixed", accumulate=16)
    with pytest.raises(ValueError, match=r"2 rows in each, .*4 devices of 'x'(.|\n)*times 4"):
        step(step.init(params), batch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "look",
    [
        lambda *args: mpjax.numerics.exponents(mean_square, "16-mixed")(*args),
        lambda *args: mpjax.numerics.diagnose(mean_square, "16-mixed")(*args),
        lambda *args: mpjax.numerics.suggest(mean_square, "bf16-mixed", tolerance=0.1)(*args),
        lambda *args: mpjax.numerics.compare(mean_square, "bf16-mixed")(*args),
    ],
    ids=["exponents", "diagnose", "suggest", "compare"],
)
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
def test_tools_say_the_same_of_arrays_that_are_sharded_explicitly(look, is_set):
    mesh = explicit_mesh()
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        params, batch = operands(lambda spec: jax.NamedSharding(mesh, spec))
        got = without_times(look(params, batch))
    with jax.set_mesh(jax.make_mesh((1,), ("z",), axis_types=(AxisType.Auto,))):
        params, batch = jax.tree.map(np.asarray, (params, batch))
        want = without_times(look(params, batch))
    assert got == want


def without_times(report):
    """Returns the text of a report but for the line that says where the time went."""
    return [line for line in str(report).splitlines() if not re.search(r"\d\.\d s\b", line)]
