"""Runs heads cut and uncut under autocast, and says how far they are from float64."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import _cuts
import _evaluate
import jax
import jax.numpy as jnp
import numpy as np
from _heads import HEADS, Head

from mpjax._autocast import autocast

BY_NAME = {head.name: head for head in HEADS}
POLICIES = {"bf16": "bf16-mixed", "f16": "16-mixed"}
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
# A loss is a mean of rounded terms: one rounding of it, and two of a gradient, are luck.
FLOOR = {"bf16": (2**-9, 2**-8), "f16": (2**-12, 2**-11)}
SCALE = {"bf16": 1.0, "f16": 2.0**10}
ONLY_INSIDE = frozenset({"custom_vmap"})  # JAX does not differentiate it in reverse
KINDS = (*_cuts.BOUNDARIES, *_cuts.MOVES)

Errors = tuple[float, float]


def hand_cast(dtype: Any) -> Callable[[Any, Any], Any]:
    """Returns a product on rounded operands, added up in float32."""
    return lambda x, y: jnp.matmul(*(a.astype(dtype).astype(jnp.float32) for a in (x, y)))


def value_and_grad(loss: Callable[..., Any], params: int, scale: float) -> Callable[..., list[Any]]:
    """Returns a function of leaves: the loss and its gradients in the first `params` of them."""

    def run(*leaves: Any) -> list[Any]:
        def scaled(first: Sequence[Any]) -> Any:
            return loss(*first, *leaves[params:]) * scale

        value, grads = jax.value_and_grad(scaled)(list(leaves[:params]))
        return [value / scale, *(g / scale for g in grads)]

    return run


def _flat(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in arrays])


@functools.cache
def _leaves(head: Head) -> tuple[list[Any], Any, int]:
    leaves, tree = jax.tree.flatten((head.params, *head.data))
    return leaves, tree, len(jax.tree.leaves(head.params))


def leaves(name: str) -> list[Any]:
    """Returns the arguments of a head, flat."""
    return _leaves(BY_NAME[name])[0]


def loss_of(head: Head, dot: Callable[[Any, Any], Any] = jnp.matmul) -> Callable[..., Any]:
    """Returns the loss of a head as a function of leaves."""
    _, tree, _ = _leaves(head)
    return lambda *leaves: head.make(dot)(*jax.tree.unflatten(tree, leaves))


@functools.cache
def _exact(name: str) -> tuple[float, np.ndarray]:
    head = BY_NAME[name]
    leaves, _, params = _leaves(head)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in leaves]
        value, *grads = jax.jit(value_and_grad(loss_of(head), params, 1.0))(*wide)
    return float(value), _flat(grads)


def errors(name: str, outs: Sequence[Any]) -> Errors:
    """Returns the relative errors of a loss and of its gradient as a whole."""
    value, grads = _exact(name)
    off = np.linalg.norm(_flat(outs[1:]) - grads) / np.linalg.norm(grads)
    return abs(float(outs[0]) - value) / max(abs(value), 1e-9), float(off)


def _run(fun: Callable[..., Any], leaves: Sequence[Any]) -> list[Any]:
    return _evaluate.evaluate(jax.make_jaxpr(fun)(*leaves), leaves)


@functools.cache
def variants(name: str, dtype: str) -> dict[str, Errors]:
    """Returns the errors of a head uncut, cast by hand, and under PyTorch's rule."""
    head = BY_NAME[name]
    leaves, _, params = _leaves(head)
    plain, policy = loss_of(head), POLICIES[dtype]

    def of(loss: Callable[..., Any]) -> Errors:
        return errors(name, _run(value_and_grad(loss, params, SCALE[dtype]), leaves))

    return {
        "uncut": of(autocast(plain, policy)),
        "by hand": of(loss_of(head, hand_cast(DTYPES[dtype]))),
        "widest": of(autocast(plain, policy, rules="widest")),
    }


def bound(name: str, dtype: str, among: Sequence[str]) -> Errors:
    """Returns twice the largest error of some variants, and a little luck."""
    known = [variants(name, dtype)[k] for k in among]
    loss, grads = (2 * max(e[i] for e in known) + FLOOR[dtype][i] for i in range(2))
    return loss, grads


@functools.cache
def traced(name: str, dtype: str, inside: bool) -> Any:
    head = BY_NAME[name]
    leaves, _, params = _leaves(head)
    fun = loss_of(head)
    if inside:
        fun = value_and_grad(fun, params, SCALE[dtype])
    return jax.make_jaxpr(fun)(*leaves)


def cut_errors(name: str, dtype: str, kind: str, inside: bool, rng: random.Random) -> Errors:
    """Returns the errors of a head that is cut at random, its gradient taken inside or outside."""
    arguments, _, params = _leaves(BY_NAME[name])
    cut = _cuts.random_cut(traced(name, dtype, inside), kind, rng)
    # Groups as small as these are computed again in the backward pass, or kept.
    with mock.patch("mpjax._autocast.groups._SMALL", rng.choice((0, 1024))):
        fun = autocast(cut if inside else lambda *xs: cut(*xs)[0], POLICIES[dtype])
        if not inside:
            fun = value_and_grad(fun, params, SCALE[dtype])
        return errors(name, _run(fun, arguments))
