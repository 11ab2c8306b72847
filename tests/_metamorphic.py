"""Runs heads cut and uncut under autocast, and says how far they are from float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import _cuts
import _evaluate
import jax
import jax.numpy as jnp
import numpy as np
from _heads import HEADS
from _hidden_heads import HIDDEN, ONCE

from benchmarks.networks import NETWORKS
from mpjax import autocast


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A loss of parameters and data, as `written` for a dtype: float32 is what autocast gets."""

    name: str
    written: Callable[[Any], Callable[..., Any]]
    params: Any
    data: tuple[Any, ...]

    @functools.cached_property
    def leaves(self):
        """The arguments, flat, the parameters first."""
        return jax.tree.leaves((self.params, *self.data))

    @functools.cached_property
    def moving(self):
        """How many of them are parameters."""
        return len(jax.tree.leaves(self.params))

    def loss(self, dtype=jnp.float32):
        """Returns the loss as a function of leaves."""
        tree = jax.tree.structure((self.params, *self.data))
        fun = self.written(dtype)
        return lambda *leaves: fun(*jax.tree.unflatten(tree, leaves))


def _of_head(head):
    def written(dtype):
        is_low = jnp.finfo(dtype).bits == 16
        return head.make(hand_cast(dtype) if is_low else jnp.matmul)

    return Program(head.name, written, head.params, head.data)


def _of_network(name):
    network = NETWORKS[name]("tiny")
    with jax.default_prng_impl("threefry2x32"):
        params, batch = jax.tree.map(np.asarray, network.values())
    return Program(name, network.written, params, (batch,))


POLICIES = {"bf16": "bf16-mixed", "f16": "16-mixed"}
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
# A loss is a mean of rounded terms: one rounding of it, and two of a gradient, are luck.
FLOOR = {"bf16": (2**-9, 2**-8), "f16": (2**-11, 2**-11)}
SCALE = {"bf16": 1.0, "f16": 2.0**10}
OUTSIDE, INSIDE, OF_CUT = "gradient outside", "gradient inside, cut", "gradient inside, of a cut"
ONLY_INSIDE = frozenset({"custom_vmap"})  # JAX does not differentiate it in reverse
KINDS = (*_cuts.BOUNDARIES, *_cuts.OF_VALUES)


def hand_cast(dtype):
    """Returns a product on rounded operands, added up in float32."""
    return lambda x, y: jnp.matmul(*(a.astype(dtype).astype(jnp.float32) for a in (x, y)))


def value_and_grad(loss, params, scale):
    """Returns a function of leaves: the loss and its gradients in the first `params` of them."""

    def run(*leaves):
        def scaled(first):
            return loss(*first, *leaves[params:]) * scale

        value, grads = jax.value_and_grad(scaled)(list(leaves[:params]))
        return [value / scale, *(g / scale for g in grads)]

    return run


def _flat(arrays):
    return np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in arrays])


HEADS_BY_NAME = {head.name: head for head in (*HEADS, *HIDDEN, *ONCE)}


def add(heads):
    """Makes heads of a test known by their names; returns these."""
    HEADS_BY_NAME.update((head.name, head) for head in heads)
    return [head.name for head in heads]


@functools.cache
def program(name):
    """Returns a head or a network by its name."""
    return _of_head(HEADS_BY_NAME[name]) if name in HEADS_BY_NAME else _of_network(name)


@functools.cache
def _exact(name):
    of = program(name)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in of.leaves]
        fun = value_and_grad(of.loss(jnp.float64), of.moving, 1.0)
        value, *grads = run(fun, wide)
    return float(value), _flat(grads)


def errors(name, outs):
    """Returns the relative errors of a loss and of its gradient as a whole."""
    value, grads = _exact(name)
    off = np.linalg.norm(_flat(outs[1:]) - grads) / np.linalg.norm(grads)
    return abs(float(outs[0]) - value) / max(abs(value), 1e-9), float(off)


def run(fun, leaves):
    return _evaluate.evaluate(jax.make_jaxpr(fun)(*leaves), leaves)


@functools.cache
def variant(name, dtype, kind):
    """Returns the errors of a program uncut, cast by hand, or under PyTorch's rule."""
    of, policy = program(name), POLICIES[dtype]
    if kind == "by hand":
        loss = of.loss(DTYPES[dtype])
    else:
        loss = autocast(of.loss(), policy, rules={"uncut": None, "widest": "widest"}[kind])
    return errors(name, run(value_and_grad(loss, of.moving, SCALE[dtype]), of.leaves))


def bound(name, dtype, among):
    """Returns twice the largest error of some variants, and a little luck."""
    known = [variant(name, dtype, kind) for kind in among]
    loss, grads = (2 * max(e[i] for e in known) + FLOOR[dtype][i] for i in range(2))
    return loss, grads


@functools.cache
def traced(name, dtype, inside):
    """Returns the loss as a program, or the loss and its gradients."""
    of = program(name)
    fun = of.loss()
    if inside:
        fun = value_and_grad(fun, of.moving, SCALE[dtype])
    return jax.make_jaxpr(fun)(*of.leaves)


def cut_errors(name, dtype, kind, where, rng):
    """Returns the errors of a program cut at random.

    Its gradient is taken outside of autocast, or inside: of the whole before it is cut, or of what
    was cut.
    """
    cut = _cuts.random_cut(traced(name, dtype, where == INSIDE), kind, rng)
    if where == OF_CUT:
        of = program(name)
        cut = value_and_grad(functools.partial(_loss, cut), of.moving, SCALE[dtype])
    # Groups as small as these are computed again in the backward pass, or kept.
    with mock.patch("mpjax._autocast.speed.marks._SMALL", rng.choice((0, 1024))):
        return errors_of(name, dtype, cut, inside=where != OUTSIDE)


def _loss(cut, *leaves):
    return cut(*leaves)[0]


def errors_of(name, dtype, cut, inside=False):
    """Returns the errors of a program that was cut, under autocast."""
    of = program(name)
    fun = autocast(cut if inside else lambda *xs: cut(*xs)[0], POLICIES[dtype])
    if not inside:
        fun = value_and_grad(fun, of.moving, SCALE[dtype])
    return errors(name, run(fun, of.leaves))


def random_cut(names, rng):
    """Returns one cut of one program, chosen at random, with its errors and their limits."""
    name, dtype = rng.choice(names), rng.choice(list(POLICIES))
    kind = rng.choice(KINDS)
    where = INSIDE if kind in ONLY_INSIDE else _where(rng.random())
    limit = bound(name, dtype, ("uncut", "by hand", "widest"))
    return (name, dtype, kind, where), cut_errors(name, dtype, kind, where, rng), limit


def _where(chance):
    return INSIDE if chance < 0.25 else OF_CUT if chance < 0.5 else OUTSIDE
