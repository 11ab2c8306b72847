"""What is cut into parts is cut as it is held, and widened then; if no element has two readers."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from _hinted import hints, moves
from _samples import normal

from mpjax import autocast, pods

W = normal(0, 16, 32, scale=1 / 4)
V = normal(1, 16, 16, scale=1 / 4)
X = normal(2, 8, 16)

APART = {
    "split": lambda y: jnp.split(y, 2, -1),
    "rows": lambda y: tuple(y)[:2],
    "two slices": lambda y: (y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]),
    "slices with a gap": lambda y: (y[:, :8], y[:, 24:]),
    "slices of another axis, too": lambda y: (y[:4, :16], y[4:, 16:]),
    "slices in turns": lambda y: (y[:, ::2], y[:, 1::2]),
    "one transposed": lambda y: (y.T[:16], 2.0),
    "one reversed": lambda y: (y[:, ::-1], 2.0),
}
TOGETHER = {
    "slices that overlap": lambda y: (y[:, :16], y[:, 15:31]),
    "the same slice": lambda y: (y[:, :16], y[:, :16] + 1.0),
    "slices in steps that meet": lambda y: (y[:, ::2], y[:, ::3][:, :1]),
    "slices in the same turn": lambda y: (y[:, ::2], y[:, 2:16:2][:, :1]),
    "a slice and the whole": lambda y: (y[:, :16], jnp.sum(y)),
    "a split and the whole": lambda y: (jnp.split(y, 2, -1)[0], jnp.max(y)),
}


def gated(parts):
    def loss(w, v, x):
        gate, let_through = parts(x @ w)
        y = jax.nn.sigmoid(gate) * let_through
        return jnp.sum(y**2) * jnp.sum(v)

    return loss


def cuts(fun):
    """Returns the dtypes of all parts and whole values that are moved forward."""
    text = str(jax.make_jaxpr(autocast(fun, "bf16-mixed"))(W, V, X))
    return set(re.findall(r":(\w+)\[[^=]* = (?:split|unstack|slice|transpose|rev)\[", text))


@pytest.mark.parametrize("case", APART)
def test_what_is_cut_into_parts_is_widened_after_it_is_cut(case):
    assert cuts(gated(APART[case])) == {"bf16"}
    with hints.without("moved_low"):
        assert "f32" in cuts(gated(APART[case]))


@pytest.mark.parametrize("case", TOGETHER)
def test_what_has_two_readers_is_widened_before_and_its_cotangents_are_summed_in_float32(case):
    fun = gated(TOGETHER[case])
    assert "f32" in cuts(fun)
    text = str(jax.make_jaxpr(jax.grad(autocast(fun, "bf16-mixed")))(W, V, X))
    assert set(re.findall(r":(\w+)\[8,32\] = add_any", text)) == {"f32"}


def assert_no_bit_depends_on(hint, computed, losses, *args):
    """Computes all losses in bfloat16, the first in float16, with a hint and without: two programs.

    No loss looks at the dtype.
    """
    rows = [*((name, "bf16-mixed") for name in losses), (next(iter(losses)), "16-mixed")]

    def run(*args):  # of new functions, of which nothing is remembered
        new = {row: functools.partial(losses[row[0]]) for row in rows}
        return [computed(autocast(new[row], row[1]), *args) for row in rows]

    here = jax.jit(lambda *xs: run(*xs))(*args)
    with hints.without(hint):
        there = jax.jit(lambda *xs: run(*xs))(*args)
    for row, *results in zip(rows, here, there, strict=True):
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            assert jnp.array_equal(a, b), row


def value_and_gradients(fun, *args):
    return jax.value_and_grad(fun, range(len(args)))(*args)


def test_no_bit_of_a_result_or_gradient_depends_on_it():
    losses = {name: gated(parts) for name, parts in (APART | TOGETHER).items()}
    assert_no_bit_depends_on("moved_low", value_and_gradients, losses, W, V, X)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("hint", "parts"),
    [
        ("moved_low", APART["split"]),
        ("moved_low", APART["two slices"]),
        ("read_in_parts", lambda y: jnp.split(y + jnp.linspace(-1.0, 1.0, 2048), 2, -1)),
    ],
)
def test_a_tpu_stores_no_gate_in_float32(hint, parts):
    mesh = pods.get_topology("v5e-4").make_mesh({"x": -1})

    def array(shape, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    args = array((512, 2048)), array((1024, 512)), array((4 * 2048, 512), "x")

    def accessed():
        def loss(up, down, x):
            gate, let_through = parts(x @ up)
            return jnp.mean((x + (jax.nn.sigmoid(gate) * let_through) @ down) ** 2)

        step = jax.jit(jax.value_and_grad(autocast(loss, "bf16-mixed")))
        return step.lower(*args).compile().cost_analysis()["bytes accessed"]

    here = accessed()
    with hints.without(hint):
        assert here < 0.85 * accessed()


B = jnp.linspace(-1.0, 1.0, 32)
BIASED = {
    "a bias": lambda y: jnp.split(y + B, 2, -1),
    "a bias, in rows": lambda y: tuple(y + B)[:2],
    "a bias, in slices": lambda y: (lambda z: (z[:, :16], z[:, 16:]))(y + B),
    "a bias, in turns": lambda y: (lambda z: (z[:, ::2], z[:, 1::2]))(y + B),
    "a scale and a bias": lambda y: jnp.split(B * y - 2.0 * B, 2, -1),
    "a bias of rows": lambda y: jnp.split(y + B[:8, None], 2, -1),
    "a bias of rows, parted by rows": lambda y: (lambda z: (z[:4, :16], z[4:, 16:]))(
        y + (B[:8, None] + 1.0)
    ),
    "a number": lambda y: jnp.split(-(y + 0.5), 2, -1),
}
MERGED = {"another product": lambda y: jnp.split(y + X @ W[::-1], 2, -1)}


def wide_sums(fun):
    """Returns how many sums and products of the whole the compiled program computes in float32."""
    text = jax.jit(autocast(fun, "bf16-mixed")).lower(W, V, X).compile().as_text()
    return len(re.findall(r"= f32\[8,32\]\S* (?:add|subtract|multiply|negate)\(", text))


@pytest.mark.parametrize("case", BIASED)
def test_a_sum_of_which_parts_are_read_is_computed_in_parts(case):
    assert wide_sums(gated(BIASED[case])) == 0
    with hints.without("read_in_parts"):
        assert wide_sums(gated(BIASED[case])) > 0


def test_a_sum_that_is_read_whole_too_is_computed_once():
    def operand_too(y):
        return (y + B)[:, :16], jnp.sum(jnp.exp(y))

    assert wide_sums(gated(operand_too)) > 0

    program = jax.make_jaxpr(lambda y: jnp.split(y + y[:, :1], 2, -1))(X)
    *_, add, split = program.eqns
    assert set(moves.read_in_parts([add, split], ())) == {*add.outvars}
    assert not moves.read_in_parts([add, split], add.outvars)  # another group reads it, too


def test_what_is_computed_in_parts_has_the_same_bits_and_derivatives():
    def computed(fun, *args):
        forward = jax.jvp(fun, args, args)
        batched = jax.vmap(fun, (None, None, 0))(*args[:2], jnp.stack([args[2], -args[2]]))
        return value_and_gradients(fun, *args), forward, batched

    losses = {name: gated(parts) for name, parts in (BIASED | MERGED).items()}
    assert_no_bit_depends_on("read_in_parts", computed, losses, W, V, X)


def test_a_value_in_many_parts_is_widened_before():
    """Two by two, comparing a thousand parts would take longer than a program's compilation."""

    def loss(w, v, x):
        y = x @ jnp.concatenate([w, w], -1)
        return sum(jnp.sum(jnp.exp(y[:, i : i + 1])) for i in range(40)) * jnp.sum(v)

    assert cuts(loss) == {"f32"}


def test_a_branch_that_only_calls_a_function_of_nothing_is_computed():
    def loss(w, v, x):
        made = jax.jit(lambda: jnp.full((8, 32), 0.5))
        y = jax.lax.cond(x[0, 0] > jnp.inf, lambda: x @ w, lambda: made())
        return jnp.sum(y @ w.T) * jnp.sum(v)

    with mock.patch("mpjax._autocast.speed.marks._SMALL", 0):
        found = autocast(loss, "bf16-mixed")(W, V, X)
    assert found == pytest.approx(float(loss(W, V, X)), rel=0.02)


# -- an input that a group reads as it is, and moved -----------------------------------------------


def by_groups(y, groups=4):
    """Normalises groups of channels: statistics of the reshaped input, for the input as it is."""
    parts = y.reshape(*y.shape[:-1], groups, y.shape[-1] // groups)
    mean = parts.mean((0, -1), keepdims=True)
    scale = jax.lax.rsqrt(((parts - mean) ** 2).mean((0, -1), keepdims=True) + 1e-5)
    mean, scale = (
        jnp.broadcast_to(v, (1, *parts.shape[1:])).reshape(1, *y.shape[1:]) for v in (mean, scale)
    )
    return (y - mean) * scale


def by_rows(y):
    """Divides rows by their size, found in the transposed input."""
    return y / jnp.sqrt(1.0 + jnp.sum(jnp.tanh(y.T) ** 2, 0))[:, None]


MOVED_AGAIN = {"groups of channels": by_groups, "rows": by_rows}


def of_moved(norm):
    return lambda w, x: jnp.sum(jnp.tanh(norm(x @ w)) ** 2)


def test_no_bit_depends_on_whether_what_is_moved_again_is_widened_first():
    def computed(fun, *args):
        return value_and_gradients(fun, *args), jax.jvp(jax.grad(fun), args, args)

    losses = {name: of_moved(norm) for name, norm in MOVED_AGAIN.items()}
    assert_no_bit_depends_on("moved_again", computed, losses, W, X)


@pytest.mark.parametrize(
    ("case", "move"), [("groups of channels", "reshape"), ("rows", "transpose")]
)
def test_what_is_moved_again_is_moved_as_it_is_held(case, move):
    def moved():
        low = autocast(of_moved(MOVED_AGAIN[case]), "bf16-mixed")
        return re.findall(rf":(\w+)\[[\d,]*\] = {move}\[", str(jax.make_jaxpr(low)(W, X)))

    assert "bf16" in moved()
    with hints.without("moved_again"):
        assert "bf16" not in moved()
