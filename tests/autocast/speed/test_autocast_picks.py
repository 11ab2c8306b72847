"""One element of each row: its derivative is a choice, in the kernel that needs it, no scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import equations
from _hinted import hints
from _samples import integers, normal
from _small import BF16, distance, each_inside_and_outside, together, total
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mpjax import autocast, numerics, pods

X, ROWS = normal(0, 4, 5, 7), integers(1, 7, 4, 5)
WIDE = X.reshape(20, 7)


def along(axis, index, **how):
    return lambda x: jnp.take_along_axis(x, index, axis, **how)


def of_each(pick):
    return lambda x: jax.vmap(pick)(x.reshape(20, 7), ROWS.reshape(20))


def with_mode(mode):
    beyond = jnp.where(ROWS > 3, ROWS + 6, ROWS)
    return along(-1, beyond[..., None], mode=mode)


PICKS = {
    "a label of each row": along(-1, ROWS[..., None]),
    "counted from the end": along(-1, ROWS[..., None] - 7),
    "bytes": along(-1, ROWS[..., None].astype(jnp.uint8)),
    "along the first axis": along(0, ROWS.T[None, :, :1] % 4 + jnp.zeros((1, 5, 7), int)),
    "along a middle axis": along(1, ROWS[:, :1, None] % 5 + jnp.zeros((4, 1, 7), int)),
    "the last state of each sequence": along(1, (ROWS[:, 0] % 5)[:, None, None]),
    "mapped": of_each(lambda row, i: row[i]),
    "mapped, sliced": of_each(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False)),
    "mapped twice, over other axes": lambda x: jax.vmap(
        jax.vmap(lambda row, i: row[i], (1, 0)), (2, None), 1
    )(x, ROWS[0] % 4),
    "beyond the end, filled": lambda x: jnp.nan_to_num(with_mode("fill")(x)),
    "beyond the end, clipped": with_mode("clip"),
    "rows named in another order": lambda x: lax.gather(
        x, ROWS.T[..., None], lax.GatherDimensionNumbers((), (2,), (2,), (0, 1), (1, 0)), (1, 1, 1)
    ),
    "rows named in another order, between": lambda x: lax.gather(
        x,
        jnp.arange(28).reshape(7, 1, 4, 1) % 5,
        lax.GatherDimensionNumbers((1,), (), (1,), (0, 2), (2, 0)),
        (1, 1, 1),
    ),
    "squeezed": lambda x: along(-1, ROWS[..., None])(x).take(0, axis=-1),
}


# Logits that are moved before a label of each row is picked, as those of the next tokens are.
MOVED = {
    "all but the last": lambda z: z[:, :-1],
    "all but the first": lambda z: z[:, 1:],
    "every second": lambda z: z[:, ::2],
    "some sequences": lambda z: z[1:],
    "some words": lambda z: z[..., :-1],
    "transposed": lambda z: z.swapaxes(0, 1),
    "reversed": lambda z: jnp.flip(z, 1),
    "transposed and cut": lambda z: z.swapaxes(0, 1)[:-1],
    "reshaped and cut": lambda z: z.reshape(2, 10, 7)[:, :-1],
    "a part of a split": lambda z: jnp.split(z, 2, 0)[1],
    "one of an axis": lambda z: z[:, None, :-1][:, 0],
    "joined": lambda z: jnp.concatenate([z[:, :2], z[:, 3:]], 1),
}
LOSSES_OF_ROWS = {
    "a cross-entropy": optax.softmax_cross_entropy_with_integer_labels,
    "log-probabilities": lambda z, y: -along(-1, y[:, None])(jax.nn.log_softmax(z))[:, 0],
    "mapped": lambda z, y: -jax.vmap(lambda row, i: row[i])(jax.nn.log_softmax(z), y),
    "logits": lambda z, y: jax.nn.logsumexp(z, -1) - z[jnp.arange(len(y)), y],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", MOVED)
def test_a_label_is_picked_from_logits_that_are_moved(name, policy):
    def loss(of_rows):
        def mean(h, w, labels):
            logits = MOVED[name](h @ w)
            rows = logits.reshape(-1, logits.shape[-1])
            return of_rows(rows, labels[: len(rows)]).mean()

        return mean

    args = normal(3, 4, 5, 6), normal(4, 6, 7), integers(2, 6, 20)
    losses = {name: loss(of_rows) for name, of_rows in LOSSES_OF_ROWS.items()}
    for taken in (lambda fun: fun, functools.partial(jax.grad, argnums=(0, 1))):
        for (of, where), got in each_inside_and_outside(taken, losses, policy, *args):
            assert distance(got, taken(losses[of])(*args)) < 2 * BF16, (of, where)


def scatters(fun, *args):
    return [e for e in equations(jax.make_jaxpr(fun)(*args).jaxpr) if "scatter" in str(e.primitive)]


@pytest.mark.parametrize("name", PICKS)
def test_a_pick_has_no_scatter_for_a_derivative(name):
    fun = total(PICKS[name])
    assert not scatters(jax.grad(autocast(fun, "bf16-mixed")), X)
    assert scatters(jax.grad(fun), X)


def test_beyond_the_end_values_are_nan_and_tangents_zero():
    beyond = along(-1, jnp.full((4, 5, 1), 7), mode="fill")
    got, want = (jax.jvp(f, (X,), (X,)) for f in (autocast(beyond, "bf16-mixed"), beyond))
    np.testing.assert_array_equal(got, want)
    assert jnp.isnan(got[0]).all()
    assert not got[1].any()


def transformed(f, x, step):
    """Derivatives of either mode and of second order, mapped, computed again and in a loop."""
    return (
        jax.jvp(f, (x,), (step,)),
        jax.linearize(f, x)[1](step),
        jax.jvp(jax.grad(f), (x,), (step,)),
        jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), step))(x),
        jax.vmap(jax.grad(f))(jnp.stack([x, step])),
        jax.grad(lambda x: jnp.sum(jax.vmap(f, 2)(x)))(jnp.stack([x, step], 2)),
        jax.grad(jax.checkpoint(f))(x),
        lax.scan(lambda x, _: (x - 0.1 * jax.grad(f)(x), f(x)), x, None, length=3),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("names", [list(PICKS)[part::3] for part in range(3)])
def test_transformations_of_a_pick_are_those_of_a_gather(names):
    def both(fun):
        return lambda *xs: [transformed(f, *xs) for f in (autocast(fun, "bf16-mixed"), fun)]

    found = together({name: both(total(PICKS[name])) for name in names}, X, jnp.cos(X))
    for name, results in found.items():
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7, err_msg=name)


def test_rows_that_all_examples_read_have_the_sum_for_a_gradient():
    """A choice for each example would be as large as all their tables."""

    def fun(table, index):
        return jnp.sum(jnp.sin(jnp.take_along_axis(table, index[:, None], 1)))

    many = integers(2, 7, 64, 20)
    mapped = lambda f: lambda x: jnp.sum(jax.vmap(f, (None, 0))(x, many))  # noqa: E731
    low = mapped(autocast(fun, "bf16-mixed"))
    np.testing.assert_allclose(jax.grad(low)(WIDE), jax.grad(mapped(fun))(WIDE), rtol=1e-5)
    made = [
        v.aval.size for e in equations(jax.make_jaxpr(jax.grad(low))(WIDE).jaxpr) for v in e.outvars
    ]
    assert max(made) < 64 * WIDE.size


@pytest.mark.parametrize("fun", [lambda x: x[ROWS[0]], lambda x: x[2], lambda x: x[:, ROWS[0]]])
def test_rows_of_a_table_are_gathered_as_before(fun):
    low = jax.grad(lambda x: jnp.sum(autocast(fun, "bf16-mixed")(x)))
    plain = jax.grad(lambda x: jnp.sum(fun(x)))
    assert len(scatters(low, WIDE)) == len(scatters(plain, WIDE))
    np.testing.assert_array_equal(low(WIDE), plain(WIDE))


# -- the loss of a classifier ----------------------------------------------------------------------


def of_labels(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def by_log_softmax(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


LOSSES = {"optax": of_labels, "log_softmax": by_log_softmax}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
def test_the_gradient_of_sure_logits_is_rounded_once(loss, policy):
    """Of a sure answer, `p - 1` is what is left of two numbers that are alike.

    Each rounded before they are added, they would leave an error of 2⁻⁹ of 1 and not of `p - 1`.
    """
    count = 96  # 1 / 96 is no power of two
    labels = jnp.arange(count) % 8
    # Exact in either dtype, and so are their products with the identity.
    logits = 5.0 * jax.nn.one_hot(labels, 8) + jnp.round(4 * X.ravel()[:8]) / 8

    def fun(x, w):
        return loss(x @ w, labels)

    got = jax.jit(jax.grad(autocast(fun, policy), 0))(logits, jnp.eye(8))
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(loss))(jnp.asarray(logits, jnp.float64), labels)
    of_label = jnp.arange(count), labels
    got, exact = np.asarray(got, np.float64)[of_label], np.asarray(exact)[of_label]
    rounding = 2.0**-8 if policy == "bf16-mixed" else 2.0**-10
    assert np.max(np.abs(got - exact) / np.abs(exact)) < rounding


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_keeps_no_mask_and_no_float32_logits(loss):
    """Its labels are kept; where they are is found again."""
    labels = jnp.zeros(256, int)
    x, w = jnp.ones((256, 8)), jnp.ones((8, 64))

    def kept(fun):
        leaves = jax.tree.leaves(jax.vjp(lambda x: fun(x, w), x)[1])
        return [v.dtype.name for v in leaves if v.size >= 256 * 64]

    assert kept(autocast(lambda x, w: loss(x @ w, labels), "bf16-mixed")) == ["bfloat16"]


# -- of a computed value, what is picked is computed -----------------------------------------------

LABELS = jnp.arange(256) % 64
BIAS = jnp.linspace(-1.0, 1.0, 64)
BEYOND = jnp.arange(256) % 72
OF_PLACES = LABELS.reshape(4, 64)


def each(values, labels=LABELS, **how):
    return jnp.take_along_axis(values, labels[:, None], 1, **how)


def picked(values, labels=LABELS, **how):
    return jnp.sum(each(values, labels, **how))


COMPUTED = {
    "log-probabilities": lambda y: picked(jax.nn.log_softmax(y)),
    "inside a function": lambda y: jax.jit(lambda z: picked(jax.nn.log_softmax(z)))(y),
    "capped": lambda y: of_labels(4.0 * jnp.tanh(y / 4.0), LABELS),
    "biased": lambda y: of_labels(y + BIAS, LABELS),
    "biased by rows": lambda y: of_labels(y + jnp.sin(jnp.arange(256.0))[:, None], LABELS),
    "of a temperature": lambda y: picked(jax.nn.log_softmax(y / 0.7 - BIAS)),
    "beyond the end": lambda y: jnp.nansum(each(jax.nn.log_softmax(y), BEYOND)),
    "beyond the end, clipped": lambda y: picked(jax.nn.log_softmax(y), BEYOND, mode="clip"),
    "beyond the end, of a number": lambda y: picked(
        jax.nn.log_softmax(y + BIAS), BEYOND, mode="fill", fill_value=-3.0
    ),
    "mapped": lambda y: jnp.sum(jax.vmap(lambda r, i: jax.nn.log_softmax(r)[i])(y + BIAS, LABELS)),
    "flattened": lambda y: picked(jax.nn.log_softmax(y.reshape(4, 64, 64)).reshape(256, 64)),
    "laid out in places": lambda y: of_labels((y + BIAS).reshape(4, 64, 64), OF_PLACES),
    "a slice of each": lambda y: jnp.sum(
        jnp.take_along_axis(jax.nn.log_softmax(y).reshape(4, 64, 64), LABELS[:4, None, None], 2)
    ),
    "cut into columns": lambda y: picked(jnp.tanh(y + BIAS).reshape(512, 32).reshape(256, 64)),
    "of three axes": lambda y: of_labels(
        y + jnp.cos(jnp.arange(256.0)).reshape(4, 1, 64), OF_PLACES
    ),
}


WHOLE = ("beyond the end, of a number", "a slice of each", "cut into columns")


def of_a_product(name):
    if name == "of three axes":
        return lambda x, w: COMPUTED[name](x.reshape(4, 64, 8) @ w)
    return lambda x, w: COMPUTED[name](x @ w)


X_AND_W = normal(2, 256, 8), normal(3, 8, 64)


THIRDS = [("bf16-mixed", list(COMPUTED)[part::3]) for part in range(3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "names"), [*THIRDS, ("16-mixed", ("biased", WHOLE[1]))])
def test_no_part_of_a_computed_value_is_another(policy, names):
    def computed(name):
        fun = of_a_product(name)  # a new one, of which nothing is remembered
        low = autocast(fun, policy)
        return lambda *xs: (
            (jax.value_and_grad(low, (0, 1))(*xs), jax.jvp(jax.grad(low), xs, xs)),
            fun(*xs),
        )

    here = together({name: computed(name) for name in names}, *X_AND_W)
    with hints.without("picked"):
        there = together({name: computed(name) for name in names}, *X_AND_W)
    for name, (got, full) in here.items():
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(there[name][0]), strict=True):
            assert distance(a, b) < 2 * BF16, name
        loss = got[0][0]
        # Of 256 terms, which may cancel.
        assert abs(loss - full) < 2 * BF16 * max(abs(full), 256**0.5), name


@pytest.mark.parametrize("name", [name for name in COMPUTED if name not in WHOLE])
def test_a_label_is_picked_from_the_logits_as_they_are_stored(name):
    """XLA:TPU fuses nothing into a gather: it would store all that the gather reads in float32."""
    program = jax.make_jaxpr(autocast(of_a_product(name), "bf16-mixed"))(*X_AND_W)
    read = [e.invars[0].aval for e in equations(program.jaxpr) if e.primitive.name == "gather"]
    large = {array.dtype.name for array in read if array.size == 256 * 64}
    assert large == {"bfloat16"}


@pytest.mark.parametrize("name", ["log-probabilities", "capped"])
def test_logits_that_a_program_holds_low_itself_are_none_of_ours(name):
    logits = (X_AND_W[0] @ X_AND_W[1]).astype(jnp.bfloat16)
    fun = COMPUTED[name]
    got, want = (jax.jit(jax.grad(f))(logits) for f in (autocast(fun, "16-mixed"), fun))
    assert got.dtype == want.dtype
    assert distance(got, want) < 4 * BF16


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", ["biased", "of three axes"])
def test_xla_for_a_tpu_compiles_what_is_picked_of_a_bias(name):
    """It ends the process on a gather whose operand has axes of 1."""
    low = jax.value_and_grad(autocast(of_a_product(name), "bf16-mixed"), (0, 1))
    sharding = NamedSharding(pods.get_topology("v5e-4").make_mesh({"x": -1}), P())
    specs = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for v in X_AND_W]
    text = jax.jit(low).lower(*specs).compile().as_text()
    assert "gather" in text


def test_a_sharded_loss_gathers_nothing():
    """Logits split over the classes: a choice is made where each class is."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x, w, labels = jnp.ones((16, 8)), jnp.ones((8, 32)), jnp.arange(16)
    split = [NamedSharding(mesh, s) for s in (P(), P(None, "d"), P())]
    step = jax.jit(jax.grad(autocast(lambda x, w, y: of_labels(x @ w, y), "bf16-mixed"), 1))
    placed = [jax.device_put(v, s) for v, s in zip((x, w, labels), split, strict=True)]
    text = step.lower(*placed).compile().as_text()
    assert "scatter(" not in text
    assert distance(step(*placed), step(x, w, labels)) < 8 * BF16


@pytest.mark.no_leak_check("the gradient of a shard_map under jit leaks in JAX itself")
@pytest.mark.parametrize("check_vma", [True, False])
def test_labels_that_vary_over_devices_pick_from_what_does_not(check_vma):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def loss(w, y):
        logits = jnp.broadcast_to(jnp.sin(w), (4, 8))
        return lax.pmean(of_labels(logits, y), "d")

    def around(fun):
        how = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.grad(jax.shard_map(fun, mesh=mesh, **how)))

    w, labels = jnp.arange(8.0), jnp.arange(16) % 8
    got, want = (around(f)(w, labels) for f in (autocast(loss, "bf16-mixed"), loss))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_under_explicit_shardings_a_pick_is_a_gather():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("d")))
        labels = jax.device_put(jnp.arange(16) % 4, NamedSharding(mesh, P("d")))
        of = lambda f: jax.jit(jax.grad(lambda w: f(x @ w, labels)))(jnp.ones((8, 4)))  # noqa: E731
        got, want = of(autocast(of_labels, "bf16-mixed")), of(of_labels)
        assert distance(got, want) < 8 * BF16
        program = jax.make_jaxpr(autocast(of_labels, "bf16-mixed"))(x, labels)
        assert "gather_one" not in {str(e.primitive) for e in equations(program.jaxpr)}


def test_a_comparison_follows_the_error_of_what_is_picked():
    """The reference picks from its own logits, and not from rounded ones."""

    def loss(w, x):
        return jnp.sum(jnp.take_along_axis(x @ w, jnp.arange(20)[:, None] % 7, 1))

    w = normal(2, 7, 7)
    assert numerics.compare(loss, "bf16-mixed")(w, WIDE).loss > 2.0**-16


def test_a_label_beyond_the_end_is_found_where_it_is_read():
    def loss(w, x, labels):
        return by_log_softmax(x @ w, labels)

    found = numerics.diagnose(loss, "bf16-mixed")(jnp.ones((7, 8)), WIDE, jnp.arange(20))
    assert "gather_one" in str(found)
