"""What autocast decides, looked at before anything is computed: states, actions, flags, carries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _planned import Kind, Planned, read_flags, reads, states, walk, ways
from jax import lax

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROW = jax.ShapeDtypeStruct((8,), jnp.float32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)
BF16 = jnp.dtype(jnp.bfloat16)
LOW, WIDE, NEUTRAL = Kind.LOW, Kind.WIDE, Kind.NEUTRAL


# -- one operation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fun", "name", "kind"),
    [
        (lambda x, w: jnp.exp(x @ w), "exp", WIDE),
        (lambda x, w: jnp.tanh(x @ w) @ w, "tanh", LOW),
        (lambda x, w: jnp.sum(x @ w, 0), "reduce_sum", WIDE),
        (lambda x, w: (x @ w).T @ x, "transpose", LOW),
        (lambda x, w: jnp.sin(x), "sin", WIDE),
        (lambda x, w: x * x, "mul", NEUTRAL),
        (lambda x, w: (x @ w) * (x @ w) @ w, "mul", LOW),
        (lambda x, w: jnp.tanh((x @ w) + 257.0) @ w, "add", WIDE),  # no bfloat16 number
        (lambda x, w: jnp.tanh((x @ w) + 256.0) @ w, "add", LOW),
        (lambda x, w: jnp.maximum(x @ w, jnp.exp(x)), "max", WIDE),
        (lambda x, w: lax.reduce_precision(x @ w @ w, 8, 7), "reduce_precision", WIDE),
        (lambda x, w: lax.reduce_precision(x, 8, 7), "reduce_precision", NEUTRAL),
    ],
)
def test_an_operation_is_in_the_state_that_its_class_gives(fun, name, kind):
    assert Planned(fun, X, W).kinds(name)[-1:] == [kind]


def test_an_input_that_is_joined_with_what_is_low_keeps_its_bits():
    joins = {
        "concatenate": lambda x, w: jnp.tanh(jnp.concatenate([x, x @ w])) @ w,
        "select_n": lambda x, w: jnp.tanh(lax.select(x > 0, x, x @ w)) @ w,
        "jit": lambda x, w: jnp.tanh(jnp.where(x > 0, x, x @ w)) @ w,
    }
    for name, fun in joins.items():
        assert Planned(fun, X, W).states(name) == [states.KEPT]
    rows = Planned(lambda x, w: jnp.tanh(jnp.concatenate([x[jnp.array([0])], x @ w])) @ w, X, W)
    assert rows.states("concatenate") == [states.low(BF16)]  # rows of a table


def test_what_a_running_sum_reads_is_not_rounded_by_what_makes_it():
    assert Planned(lambda x, w: lax.cumsum(jnp.tanh(x @ w)), X, W).kinds("tanh") == [WIDE]
    assert Planned(lambda x, w: jnp.tanh(x @ w) @ w, X, W).kinds("tanh") == [LOW]


# -- sums ------------------------------------------------------------------------------------------


def residual(x, w):
    return x + jnp.exp(jnp.tanh(x) @ w)


def gated(x, by):
    return x + by * jnp.tanh(x)


def logsumexp(x, shares):
    most = x.max(1, keepdims=True)
    return jnp.log(jnp.exp(x - most) @ shares) + most


def average(new):
    mean = jnp.exp(new)
    return mean + 0.5 * (new - mean)


@pytest.mark.parametrize(
    ("fun", "state"),
    [
        (lambda x, w: (x + jnp.tanh(x @ w)) @ w, states.KEPT),  # of an input, made of it
        (lambda x, w: (x + jnp.tanh(w[:4] @ w)) @ w, states.low(BF16)),  # a table of positions
        (lambda x, w: x + jnp.tanh(w[:4] @ w), states.WIDE),  # and no product comes later
        (lambda x, w: (x[::-1] + jnp.tanh(x @ w)) @ w, states.KEPT),  # the input, moved
        (lambda x, w: (x[np.arange(4)] + jnp.tanh(x @ w)) @ w, states.low(BF16)),  # rows of it
        (lambda x, w: (x @ w + jnp.tanh(x @ w)) @ w, states.low(BF16)),  # a stream
        (lambda x, w: (x @ w + jnp.tanh(x @ w) / 32) @ w, states.KEPT),  # a small step
        (lambda x, w: (x @ w + jnp.tanh(x @ w) * 2**-5) @ w, states.KEPT),
        (lambda x, w: (x @ w + jnp.tanh(x @ w) / 31) @ w, states.low(BF16)),
        (lambda x, w: (x @ w + (jnp.tanh(x @ w) / 32).T.reshape(4, 8)) @ w, states.KEPT),
        (lambda x, w: (x @ w + x[0, 0] * jnp.tanh(x @ w)) @ w, states.KEPT),  # a step size
        (lambda x, w: gated(x @ w, x[0]) @ w, states.low(BF16)),  # of a channel
        (lambda x, w: (x @ w + jnp.zeros(8)) @ w, states.low(BF16)),
        (lambda x, w: (jnp.exp(x) + x @ w) @ w, states.low(BF16)),  # a branch joins a stream
        (lambda x, w: jnp.exp(x) + x @ w, states.WIDE),  # a loss, and no stream
        (lambda x, w: jnp.tanh(jnp.exp(x) + x @ w) @ w, states.WIDE),  # of which neither is made
        (lambda x, w: jnp.tanh(residual(x @ w, w)) @ w, states.low(BF16)),  # a branch of a stream
        (lambda x, w: jnp.tanh(logsumexp(x @ w, w)) @ w, states.WIDE),  # its maximum is none
        (lambda x, w: jnp.sin(residual(x @ w, w)) @ w, states.WIDE),  # which a sine reads
        (lambda x, w: jnp.tanh(average(x @ w)) @ w, states.WIDE),  # by no product
        (lambda x, w: residual(x[:2], w) @ w, states.KEPT),  # of a part of an input
        (lambda x, w: jnp.tanh((x + 1.0) + jnp.exp(x @ w)) @ w, states.KEPT),  # the input, shifted
    ],
)
def test_a_sum_is_a_state_a_stream_or_neither(fun, state):
    assert Planned(fun, X, W).states("add")[-1] == state


# -- loops -----------------------------------------------------------------------------------------


def carried(step, *start, xs=None, length=3):
    """Returns the kinds of a loop's carries, as the plan has them."""

    def fun(start, xs):
        return lax.scan(step, start, xs, length=None if xs is not None else length)

    call = Planned(fun, start, xs).call("scan")
    return [s.kind for s in call.out_states[: len(start)]]


WS = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)


def test_a_plain_recurrent_cell_is_low_and_a_gated_one_a_state():
    def plain(carry, w):
        return (jnp.tanh(carry[0] @ w),), None

    def gated(carry, w):
        gate = jax.nn.sigmoid(carry[0] @ w)
        return (gate * carry[0] + (1 - gate) * jnp.tanh(carry[0] @ w),), None

    assert carried(plain, X, xs=WS) == [LOW]
    assert carried(gated, X, xs=WS) == [WIDE]


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda x, w: x + jnp.tanh(norm(x) @ w), LOW),  # a layer
        (lambda x, w: x + jax.jit(lambda x: jnp.tanh(norm(x) @ w))(x), LOW),
        (lambda x, w: jax.checkpoint(lambda x, w: x + norm(x) @ w)(x, w), LOW),
        (lambda x, w: x + jnp.tanh(norm(x) @ w.T), LOW),
        (lambda x, w: x + jnp.tanh(x @ w), WIDE),  # no norm: it may be a training step
        (lambda x, w: x + jnp.tanh(norm(x) @ (w @ w)), WIDE),  # a weight that is made
        (lambda x, w: x + norm(x @ w), WIDE),  # a norm behind the product
        (lambda x, w: x + 0 * (norm(x) @ w).sum() + w[:4], WIDE),
        (lambda x, w: x + jnp.tanh(x / jnp.linalg.norm(x, axis=-1, keepdims=True) @ w), LOW),
        (lambda x, w: x + jnp.tanh(x / (x.std(-1, keepdims=True) + 1e-5) @ w), LOW),
        (lambda x, w: x + jnp.log(jnp.exp(x) @ w + 2), WIDE),  # an exponential is no norm
        (lambda x, w: x + jnp.tanh(jax.nn.softmax(x) @ w), WIDE),
        (lambda x, w: x + jnp.tanh(jnp.linalg.solve(w, x.T).T @ w), WIDE),
    ],
)
def test_a_norm_and_a_weight_of_its_own_make_a_carry_a_stream(step, kind):
    assert carried(lambda carry, w: ((step(carry[0], w),), None), X, xs=WS) == [kind]


def test_data_that_differ_by_element_are_no_weight():
    def oja(weights, xs, rates):
        def step(w, x):
            w = w * lax.rsqrt((w**2).sum() + 1e-6)
            return w + rate * (x @ w) @ x, None

        rate = rates.sum()
        return lax.scan(step, weights, xs)[0]

    planned = Planned(jax.vmap(oja), X, jax.ShapeDtypeStruct((4, 3, 5, 8), jnp.float32), X)
    assert planned.call("scan").out_states[0] == states.KEPT


def test_a_weight_that_every_iteration_reads_makes_a_state():
    def fun(x, w):
        return lax.scan(lambda x, _: (x + norm(x) @ w, None), x, None, length=3)[0]

    assert Planned(fun, X, W).call("scan").out_states[0] == states.KEPT


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (lambda x, w: x + 0.5 * jnp.sin(x), states.WIDE_PURE),
        (lambda x, w: x + 0.5 * jnp.sin(x @ w), states.low(BF16)),
    ],
    ids=["no product", "a product"],
)
def test_what_no_product_went_into_is_not_rounded_behind_a_loop_either(step, state):
    def fun(x, w):
        kept = lax.scan(lambda x, _: (step(x, w), None), x, None, length=3)[0]
        return jnp.tanh(kept) @ w

    assert Planned(fun, X, W).states("tanh") == [state]


def test_a_weight_sliced_by_a_counter_makes_a_stream():
    def fun(x, ws):
        return lax.fori_loop(0, 3, lambda i, x: x + norm(x) @ ws[i], x)

    (stream,) = [
        s for s in Planned(fun, X, WS).call("scan").out_states if s.kind is not Kind.FOREIGN
    ]
    assert stream.kind is LOW


def test_convolutions_need_no_norm():
    images = jax.ShapeDtypeStruct((1, 2, 8), jnp.float32)
    kernels = jax.ShapeDtypeStruct((3, 2, 2, 3), jnp.float32)

    def step(carry, kernel):
        return (carry[0] + lax.conv(carry[0], kernel, (1,), "SAME"),), None

    assert carried(step, images, xs=kernels) == [LOW]


def test_direct_paths_stop_at_products_and_bounded_functions():
    def fun(a, b, c, d, e):
        return a + 1, jnp.tanh(b) + a, c @ e, jnp.logaddexp(d, a), (b * d).sum()

    closed = jax.make_jaxpr(fun)(W, W, W, W, W)
    made = ways.of_program(closed)
    assert [ways.places(way.direct) for way in made] == [[0], [0], [], [0, 3], [1, 3]]
    assert [ways.places(way.all) for way in made] == [[0], [0, 1], [2, 4], [0, 3], [1, 3]]
    assert [ways.places(way.by_product) for way in made] == [[], [], [2, 4], [], []]


# -- how values are read ---------------------------------------------------------------------------


LATER = read_flags.LATER | read_flags.FORWARD


def flags(fun, *args, want=read_flags.OUTPUT, full=frozenset()):
    program = jax.make_jaxpr(fun)(*args)
    jaxpr = program.jaxpr
    known = walk.inside(program, walk.unrelated(jaxpr))
    found = reads.of(jaxpr, (want,) * len(jaxpr.outvars), reads.Others(full), known)
    return [found.get(v, 0) for v in jaxpr.invars]


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda x, w: x @ w, read_flags.PRODUCT | LATER | read_flags.WHOLE),
        (lambda x, w: x.T @ x, read_flags.PRODUCT | LATER | read_flags.WHOLE),
        (lambda x, w: x[:2] @ w, read_flags.PRODUCT | LATER),  # not whole
        (lambda x, w: jnp.tanh(x) @ w, LATER),
        (lambda x, w: x, read_flags.OUTPUT),
        (lambda x, w: 2 * x + w[0], read_flags.OUTPUT),
        (lambda x, w: 2 * x + 1, read_flags.OUTPUT | read_flags.NEAR),
        (lambda x, w: jnp.tanh(x), 0),
        (lambda x, w: jnp.exp(x), read_flags.ABSOLUTE),
        (
            lambda x, w: jnp.sin(3 * x[:, ::-1] + w[0]),
            read_flags.ABSOLUTE | read_flags.NEAR | read_flags.RESULT,
        ),
        (lambda x, w: lax.cumsum(x), read_flags.RUINED),
        (lambda x, w: lax.cumsum(3 * x[:, ::-1]), read_flags.RUINED),
        (lambda x, w: jnp.matmul(x, w, precision="highest"), read_flags.RUINED),
        (lambda x, w: jnp.where(x > 0, lax.cumsum(x), 0), read_flags.RUINED),
        (lambda x, w: lax.cumsum(jnp.where(w[0] > 0, x, 0)), read_flags.RUINED),
        (lambda x, w: lax.cumsum(jax.nn.sigmoid(x)), read_flags.RUINED),
        (lambda x, w: lax.reduce_precision(x, 8, 7) @ w, read_flags.RUINED | LATER),
        (lambda x, w: jnp.exp(lax.cumsum(x)) @ w, read_flags.RUINED | LATER),
    ],
)
def test_reads_say_who_reads_an_input(fun, want):
    assert flags(fun, X, W)[0] & ~read_flags.COTANGENTS == want


MEETING = read_flags.READ | read_flags.APART | read_flags.MEET


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda x, w: x[0], 0),
        (lambda x, w: x > 0, 0),
        (lambda x, w: jnp.tanh(x), read_flags.READ),
        (lambda x, w: jnp.tanh(x) + jnp.exp(x), read_flags.READ),
        (lambda x, w: jnp.tanh(x.T), read_flags.READ),
        (lambda x, w: lax.sort(x), read_flags.READ | read_flags.APART),
        (lambda x, w: lax.sort(x) + x, MEETING),
        (lambda x, w: jnp.sort(x.T).T + x, MEETING),
        (
            lambda x, w: lax.cond(w[0, 0] > 0, lax.sort, jnp.tanh, x),
            read_flags.READ | read_flags.APART,
        ),
    ],
)
def test_reads_say_which_cotangents_add_up(fun, want):
    assert flags(fun, X, W)[0] & read_flags.COTANGENTS == want


def test_a_loop_asks_for_what_it_carries_in_float32_and_not_for_its_end():
    def fun(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]

    found, weight = flags(fun, X, W)
    assert not found & (read_flags.OUTPUT | read_flags.WHOLE)
    assert found & read_flags.PRODUCT
    assert weight & read_flags.WHOLE  # the same in each iteration: worth a copy outside


def test_what_starts_as_a_constant_is_given_back_unrounded():
    def fun(x, w):
        def step(total, _):
            total = jnp.tanh(total @ w) + jnp.exp(x)
            return total, total @ w  # read by a product, too

        return lax.scan(step, jnp.zeros((4, 8)), None, length=2)

    (body,) = Planned(fun, X, W).call("scan").programs
    (total,) = [d.eqn.outvars[0] for d in body.decisions if d.eqn.primitive.name == "add"]
    assert body.states[total].kind is WIDE


def test_branches_agree_on_the_narrower_state():
    def fun(x, w, i):
        low = x @ w
        return lax.switch(i, [lambda y: y, lambda y: jnp.exp(y), lambda y: y * 2], low) @ w

    def same(x, w, i):
        return lax.switch(i, [lambda y: y, lambda y: y * 2], x @ w) @ w

    assert Planned(same, X, W, COUNT).call("cond").out_states[0].kind is LOW
    assert states.join([states.low(BF16), states.WIDE]).kind is WIDE
    assert [p.out_states[0].kind for p in Planned(fun, X, W, COUNT).call("cond").programs] == [
        LOW
    ] * 3
