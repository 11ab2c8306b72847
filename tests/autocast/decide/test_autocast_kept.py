"""What a program keeps is never rounded: solvers, averages, recursions, in both 16-bit types."""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _kept_programs import PROGRAMS
from _places import ROOT
from jax import lax

import mpjax
from mpjax._autocast.known import chains, iterations, walk
from mpjax._jaxpr import structure

BY_NAME = {p.name: p for p in PROGRAMS}
POLICIES = {"bf16": "bf16-mixed", "f16": "16-mixed"}
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
# What an exponential reads is a product's result, which is stored low, as in PyTorch: these may
# have as large an error as rules="widest" gives.
STORED_LOW = {
    "crf_log_partition",
    "logaddexp_recursion",
    "online_softmax",
    "transitions_that_differ_by_step",
    "hidden_markov_unrolled",
}


class Dot:
    """A product on operands rounded to `dtype`: a 16-bit product is exact in float32."""

    def __init__(self, dtype=None):
        self.dtype = dtype

    def _rounded(self, x):
        return x if self.dtype is None else x.astype(self.dtype).astype(x.dtype)

    def __call__(self, x, y):
        return jnp.matmul(self._rounded(x), self._rounded(y))

    def convolve(self, x, kernel):
        return lax.conv(self._rounded(x), self._rounded(kernel), (1,), "SAME")


def results(program, cast, dot):
    """Returns a function: the outputs of a program, and the gradient of a sum over them."""
    fun = cast(program.make(dot))

    def loss(*args):
        return sum(jnp.sum(x * jnp.cos(x)) for x in jax.tree.leaves(fun(*args)))

    return lambda *args: (fun(*args), jax.grad(loss)(*args) if program.gradient else ())


def widened(a):
    return a.astype(np.float64) if a.dtype == np.float32 else a


def computed(ways, wide=False):
    """Runs each way of each program, by name, as one compiled program: a third of the time."""
    args = {name: BY_NAME[name].args for name in ways}
    with jax.enable_x64(wide):
        if wide:
            args = jax.tree.map(widened, args)
        run = jax.jit(lambda args: {n: [way(*args[n]) for way in ways[n]] for n in ways})
        return jax.tree.map(lambda x: np.asarray(x, np.float64), run(args))


def error(found, want):
    def relative(x, y):
        return np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)

    return max(map(relative, *map(jax.tree.leaves, (found, want))))


def ways_of(name, dtype):
    """Returns a program as autocast runs it, and as those do that have the errors it may have."""
    program, policy = BY_NAME[name], POLICIES[dtype]
    ways = [
        results(program, lambda f: mpjax.autocast(f, policy), Dot()),
        results(program, lambda f: f, Dot(DTYPES[dtype])),  # a careful hand cast
    ]
    if name in STORED_LOW:
        widest = functools.partial(mpjax.autocast, policy=policy, rules="widest")
        ways.append(results(program, widest, Dot()))
    return ways


def check_not_rounded(rows):
    exact = computed({n: [results(BY_NAME[n], lambda f: f, Dot())] for n, _ in rows}, wide=True)
    for dtype in POLICIES:
        found = computed({name: ways_of(name, dtype) for name, of in rows if of == dtype})
        for name, ways in found.items():
            ours, *allowed = (error(way, exact[name][0]) for way in ways)
            assert ours <= 2 * max(allowed) + 1e-6, (name, dtype)


PARTS = 6
# What is kept does not depend on the type: a third of the programs in float16, `SLOW=1` all.
NAMES = list(BY_NAME)
IN_FLOAT16 = NAMES[::3]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_a_program_keeps_is_not_rounded(part):
    names = NAMES[part::PARTS]
    rows = [(name, "bf16") for name in names]
    check_not_rounded(rows + [(name, "f16") for name in names if name in IN_FLOAT16])


@pytest.mark.slow
def test_what_the_other_programs_keep_is_not_rounded_to_float16():
    check_not_rounded([(name, "f16") for name in NAMES if name not in IN_FLOAT16])


def test_the_page_says_how_many_there_are():
    assert f"\nTests run {len(PROGRAMS)} such programs: " in (ROOT / "docs/autocast.md").read_text()


INSIDE = ["flow_in_twenty_steps", "steps_by_a_softmax", "hidden_markov_unrolled", "euler_scan"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INSIDE)
def test_a_gradient_taken_inside_keeps_what_the_function_keeps(name):
    program = BY_NAME[name]

    def gradients(cast, dot, dtype):
        fun = program.make(dot)

        def loss(*args):  # a linear one, so that cotangents start as constants
            found = jnp.ravel(fun(*args))
            return jnp.sum(found * jnp.cos(jnp.arange(found.size, dtype=dtype)))

        args = [a.astype(dtype) if a.dtype == np.float32 else a for a in program.args]
        floats = [i for i, a in enumerate(args) if a.dtype == dtype]
        found = jax.jit(cast(jax.grad(loss, floats)))(*args)
        return np.concatenate([np.ravel(x / np.linalg.norm(x)) for x in map(np.float64, found)])

    with jax.enable_x64(True):
        want = gradients(lambda f: f, Dot(), np.float64)
    hand = gradients(lambda f: f, Dot(jnp.bfloat16), np.float32)
    found = gradients(lambda f: mpjax.autocast(f, "bf16-mixed"), Dot(), np.float32)
    assert np.linalg.norm(found - want) <= 2 * np.linalg.norm(hand - want)


def test_clear_caches_lets_go_of_what_inner_functions_close_over():
    def build():
        table = jnp.full((64, 64), 0.5)

        @jax.jit
        def inner(x):
            return jnp.tanh(x @ table) @ table

        mpjax.autocast(lambda x: inner(x).sum(), "bf16-mixed")(jnp.ones((8, 64)))
        return weakref.ref(table)

    table = build()
    jax.clear_caches()
    gc.collect()
    assert table() is None


# -- linear iterations -------------------------------------------------------------------------

_A = jnp.ones((8, 8)) / 9


def _norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


TURNS = [
    (lambda v: (v @ _A,), (True,)),
    (lambda v: (jnp.max(1 + 0.9 * (v @ _A)[None], 0) / 2,), (True,)),
    (lambda v: (jax.jit(lambda v: v @ _A)(v) - v,), (True,)),
    (lambda v: (jax.checkpoint(lambda v: v + 0.1 * v @ _A)(v),), (True,)),
    (lambda u, v: (v, u @ _A), (True, True)),
    (lambda v: (0.9 * v + 1,), (False,)),  # by no product
    (lambda v: (jnp.tanh(v @ _A),), (False,)),
    (lambda v: (jax.nn.relu(v @ _A),), (False,)),
    (lambda v: (_norm(v @ _A),), (False,)),
    (lambda v: (v + _norm(v) @ _A,), (False,)),
    (lambda v: (v + jax.nn.gelu(v @ _A) @ _A,), (False,)),
    (lambda v: (v / jnp.linalg.norm(v @ _A),), (False,)),
    (lambda v: (_A @ _A,), (False,)),
    (lambda v: (v @ v,), (True,)),
    (lambda v: (v @ (2 * jnp.eye(8) - _A @ v),), (True,)),  # an inverse
    (lambda v: (1.5 * v - 0.5 * v @ v @ v @ _A,), (True,)),  # the root of one
    (lambda v: (jax.nn.softmax(v @ v.T) @ v,), (False,)),
    (lambda v: (_norm(v @ v),), (False,)),
]


# Of these a loop tells more, since it sees of which carries each one is made.
TURNS_OF_LOOPS = [
    (lambda m, v: (m @ m, v @ m), (True, True)),
    (lambda m, v: (m @ (2 - m) @ (2 - m), jax.jit(jnp.matmul)(2 - m, v)), (True, True)),  # a root
    (lambda u, v: (u + v, v @ _A), (False, True)),
    (lambda v: (v + (v @ _A + jnp.tanh(v @ _A) @ _A) @ _A,), (False,)),  # a residual network
]


@pytest.mark.parametrize(("turn", "want"), TURNS + TURNS_OF_LOOPS)
def test_a_carry_is_iterated_linearly_that_reaches_itself_by_products_and_nothing_else(turn, want):
    start = tuple(jnp.ones((8, 8)) for _ in want)
    jaxpr = jax.make_jaxpr(lambda *c: lax.scan(lambda c, _: (turn(*c), None), c, None, 3))(*start)
    (part,) = structure.parts(next(e for e in jaxpr.eqns if e.primitive.name == "scan"))
    least = iterations.least_turns(part.program, part.carried.start, part.carries)
    assert tuple(map(math.isfinite, least)) == want


# Turns that make each carry a long chain.
MANY = {
    "one product": (lambda v: (v @ _A,), (16,)),
    "two products": (lambda v: (v @ _A + v @ _A @ _A,), (8,)),
    "three products in a jit": (lambda v: (jax.jit(lambda v: v @ _A @ _A @ _A)(v),), (6,)),
    "one product beside another": (lambda v: (v @ _A + _A @ v,), (16,)),
    "in a circle of two": (lambda u, v: (v @ _A, u @ _A), (16, 16)),
    "a square": (lambda v: (v @ v,), (3,)),
    "by one that is squared": (lambda m, v: (m @ m, v @ m), (3, 3)),
    "beside one that is squared": (lambda m, v: (m @ m, v @ _A), (3, 16)),
    "a loop inside": (lambda v: (lax.fori_loop(0, 9, lambda _, v: v @ _A, v),), (1,)),
}


@pytest.mark.parametrize("name", MANY)
def test_the_fewer_turns_make_a_long_chain_the_more_products_each_has(name):
    turn, want = MANY[name]
    start = tuple(jnp.ones((8, 8)) for _ in want)
    jaxpr = jax.make_jaxpr(lambda *c: lax.scan(lambda c, _: (turn(*c), None), c, None, 3))(*start)
    (part,) = structure.parts(next(e for e in jaxpr.eqns if e.primitive.name == "scan"))
    assert iterations.least_turns(part.program, part.carried.start, part.carries) == want


@pytest.mark.parametrize(("turn", "want"), TURNS)
@pytest.mark.parametrize("cut", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_law_of_chains_a_loop_that_is_written_out_is_one(turn, want, cut):
    def written_out(*carries):
        for _ in range(2 * chains.MANY):
            carries = cut(turn)(*carries)
        return carries

    start = tuple(jnp.ones((8, 8)) for _ in want)
    program = jax.make_jaxpr(written_out)(*start)
    known = walk.inside(program, walk.unrelated(program.jaxpr))
    assert tuple(chains.is_long(known[v].chain) for v in program.jaxpr.outvars) == want


LOOPS = {
    "scan": lambda turn, v, n: lax.scan(lambda v, _: (turn(v), None), v, None, n)[0],
    "fori_loop": lambda turn, v, n: lax.fori_loop(0, n, lambda _, v: turn(v), v),
    "while": lambda turn, v, n: lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, turn(c[1])), (0, v)
    )[1],
}


def _alone(gram):
    return lambda c: (1.5 * c[0] - 0.5 * c[0] @ c[0] @ c[0] @ gram,), (jnp.eye(8),)


def _coupled(gram):
    def turn(carries):
        factor = 1.5 * jnp.eye(8) - 0.5 * carries[1] @ carries[0]
        return carries[0] @ factor, factor @ carries[1]

    return turn, (jnp.eye(8), gram)


def _of_a_power(gram):  # its fourth root
    def turn(carries):
        factor = (5 * jnp.eye(8) - carries[1]) / 4
        return carries[0] @ factor, factor @ factor @ factor @ factor @ carries[1]

    return turn, (jnp.eye(8), gram)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("root", [_alone, _coupled, _of_a_power])
def test_law_of_chains_a_matrix_that_is_multiplied_by_itself_is_float32_in_few_turns(
    loop, inside, root
):
    def whitened(w, x):
        h = jnp.tanh(x @ w)
        gram = h.T @ h / 64 + 0.03 * jnp.eye(8)
        turn, start = root(gram / jnp.trace(gram))
        return jnp.mean((h @ LOOPS[loop](turn, start, 8)[0]) ** 4)

    x, w = np.random.default_rng(0).normal(size=(2, 64, 8)).astype(np.float32)
    take = jax.jacfwd if loop == "while" else jax.grad
    right = jax.jit(take(whitened))(w[:8], x)
    low = lambda f: mpjax.autocast(f, "bf16-mixed")  # noqa: E731
    got = low(take(whitened))(w[:8], x) if inside else take(low(whitened))(w[:8], x)
    assert np.linalg.norm(got - right) < 0.016 * np.linalg.norm(right)


@pytest.mark.parametrize("other", [False, True])
def test_law_of_chains_a_layer_behind_one_is_low(other):
    def loss(m, v, w):
        for _ in range(4):
            m = m @ m
        read = m @ v
        return jnp.sum(jnp.tanh((read @ w) @ w) if other else read)

    products = [
        row
        for row in mpjax.explain(loss, "bf16-mixed")(_A, jnp.ones((8, 32)), jnp.ones((32, 32))).rows
        if row.operation == "dot_general"
    ]
    low = sum(row.count for row in products if row.dtype == "bf16")
    assert (low, sum(row.count for row in products)) == ((2, 7) if other else (0, 5))


@pytest.mark.parametrize("power", [16, 23, 64])
@pytest.mark.parametrize("cut", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_law_of_chains_each_product_of_a_power_is_float32(power, cut):
    turned = lambda w, x: x @ cut(lambda m: jnp.linalg.matrix_power(m, power))(w - w.T)  # noqa: E731
    rows = mpjax.explain(turned, "bf16-mixed")(_A, jnp.ones((4, 8))).rows
    made = [r for r in rows if r.operation == "dot_general"]
    assert {r.dtype for r in made} == {"f32"}
    assert "errors grow" in str(made[0].reason)


def test_few_factors_and_layers_of_weights_that_differ_are_no_long_chain():
    def layers(x, ws):
        for w in ws:
            x = x + x @ w
        return x @ jnp.linalg.matrix_power(ws[0], 8)

    ws = [jnp.ones((8, 8)) for _ in range(30)]
    rows = mpjax.explain(layers, "bf16-mixed")(jnp.ones((4, 8)), ws).rows
    assert {r.dtype for r in rows if r.operation == "dot_general"} == {"bf16"}


def test_layers_of_weights_that_differ_are_no_linear_iteration():
    jaxpr = jax.make_jaxpr(lambda c, w: lax.scan(lambda c, w: (c @ w, None), c, w))(
        jnp.ones((8, 8)), jnp.ones((3, 8, 8))
    )
    (part,) = structure.parts(jaxpr.eqns[-1])
    assert iterations.least_turns(part.program, part.carried.start, part.carries) == (math.inf,)
