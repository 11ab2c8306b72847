"""Cuts programs: some of their equations behind a boundary, some of their values moved and back.

A program is traced, its equations are split at random places, and each piece is called behind a
boundary (`jax.jit`, a checkpoint, a branch, a loop of one turn ...), or a value is sorted and put
back, padded and cut. Plain JAX computes the same: what differs under autocast is autocast's.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mpjax._jaxpr.binding import bind, written_at

Fun = Callable[..., Any]


def _named(fun: Fun) -> Fun:
    def cut_piece(*args: Any) -> Any:
        return fun(*args)

    return cut_piece


def _floats(outs: Sequence[Any], move: Callable[[Any], Any]) -> list[Any]:
    return [move(x) if getattr(x, "dtype", None) == jnp.float32 else x for x in outs]


# -- boundaries around a piece of a program --------------------------------------------------------


def _jit(fun: Fun) -> Fun:
    return jax.jit(_named(fun))


def _checkpoint(fun: Fun) -> Fun:
    return jax.checkpoint(_named(fun))


def _checkpoint_dots(fun: Fun) -> Fun:
    return jax.checkpoint(_named(fun), policy=jax.checkpoint_policies.dots_saveable)


def _cond(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        held = next((a for a in args if getattr(a, "dtype", None) == jnp.float32), None)
        going = True if held is None else jnp.ravel(held)[0] < np.inf
        return lax.cond(jnp.asarray(going) | True, _named(fun), _named(fun), *args)

    return run


def _switch(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        i = sum(jnp.size(a) for a in args) % 3
        return lax.switch(jnp.asarray(i, jnp.int32), [_named(fun)] * 3, *args)

    return run


def _scan_stacking(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        stacked = tuple(a[None] for a in args)
        _, ys = lax.scan(lambda c, xs: (c, tuple(fun(*xs))), None, stacked, length=1)
        return [y[0] for y in ys]

    return run


def _scan_carrying(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        types = jax.eval_shape(lambda *xs: tuple(fun(*xs)), *args)
        start = tuple(jnp.zeros(t.shape, t.dtype) for t in types)
        outs, _ = lax.scan(lambda _, __: (tuple(fun(*args)), None), start, None, length=1)
        return list(outs)

    return run


def _fori(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        types = jax.eval_shape(lambda *xs: tuple(fun(*xs)), *args)
        start = tuple(jnp.zeros(t.shape, t.dtype) for t in types)
        return list(lax.fori_loop(0, 1, lambda i, _: tuple(fun(*args)), start))

    return run


def _map(fun: Fun) -> Fun:
    def run(*args: Any) -> Any:
        stacked = (jnp.zeros(1), *(a[None] for a in args))
        return [y[0] for y in lax.map(lambda xs: tuple(fun(*xs[1:])), stacked)]

    return run


def _custom_jvp(fun: Fun) -> Fun:
    made = jax.custom_jvp(_named(fun))
    made.defjvp(lambda primals, tangents: jax.jvp(_named(fun), primals, tangents))
    return made


def _custom_vjp(fun: Fun) -> Fun:
    made = jax.custom_vjp(_named(fun))
    made.defvjp(lambda *args: jax.vjp(_named(fun), *args), lambda pull, cts: pull(cts))
    return made


def _custom_vmap(fun: Fun) -> Fun:
    made = jax.custom_batching.custom_vmap(_named(fun))

    @made.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> Any:
        axes = tuple(0 if b else None for b in batched)
        outs = jax.vmap(_named(fun), axes, axis_size=size)(*args)
        return outs, [True] * len(outs)

    return made


def _barrier(fun: Fun) -> Fun:
    return lambda *args: lax.optimization_barrier(list(fun(*args)))


def _name(fun: Fun) -> Fun:
    return lambda *args: _floats(fun(*args), lambda x: jax.ad_checkpoint.checkpoint_name(x, "cut"))


def _sharded(fun: Fun) -> Fun:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    whole = jax.sharding.PartitionSpec()

    def run(*args: Any) -> Any:
        mapped = jax.shard_map(
            lambda *xs: tuple(fun(*xs)), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        return list(mapped(*args))

    return run


# -- moves of values -------------------------------------------------------------------------------


def _sort(x: Any) -> Any:
    if x.ndim == 0:
        return x
    order = jnp.argsort(lax.stop_gradient(x), axis=-1)
    return jnp.take_along_axis(jnp.sort(x, axis=-1), jnp.argsort(order, axis=-1), axis=-1)


def _top_k(x: Any) -> Any:
    if x.ndim == 0:
        return x
    values, order = lax.top_k(x, x.shape[-1])
    return jnp.take_along_axis(values, jnp.argsort(order, axis=-1), axis=-1)


def _pool(x: Any) -> Any:
    wide = jnp.repeat(x[None, ..., None], 2, axis=-1)
    ones = (1,) * (wide.ndim - 1)
    return lax.reduce_window(wide, -jnp.inf, lax.max, (*ones, 2), (*ones, 2), "VALID")[0, ..., 0]


def _set(x: Any) -> Any:
    return jnp.zeros((2, *x.shape), x.dtype).at[1].set(x)[1]


def _update(x: Any) -> Any:
    start = (0,) * (x.ndim + 1)
    return lax.dynamic_update_slice(jnp.zeros((2, *x.shape), x.dtype), x[None], start)[0]


def _pad(x: Any) -> Any:
    if x.ndim == 0:
        return x
    return lax.pad(x, np.float32(0), [(1, 1, 0)] * x.ndim)[(slice(1, -1),) * x.ndim]


def _concatenate(x: Any) -> Any:
    return jnp.concatenate([x[None], jnp.zeros_like(x)[None]])[0]


def _reshape(x: Any) -> Any:
    return (
        jnp.flip(jnp.flip(x.reshape(-1)).reshape(x.shape[::-1]).T.reshape(-1)).reshape(x.shape)
        if x.ndim == 1
        else x.reshape(-1).reshape(x.shape)
    )


def _stack(x: Any) -> Any:
    return jnp.stack([x, x])[1]


def _where(x: Any) -> Any:
    return jnp.where(jnp.ones(x.shape, bool), x, 0.0)


PUT_IN = frozenset({"name", "optimization_barrier"})
"""Operations that a boundary consists of."""
BOUNDARIES: dict[str, Callable[[Fun], Fun]] = {
    "jit": _jit,
    "checkpoint": _checkpoint,
    "checkpoint with a policy": _checkpoint_dots,
    "cond": _cond,
    "switch": _switch,
    "scan that stacks": _scan_stacking,
    "scan that carries": _scan_carrying,
    "fori_loop": _fori,
    "map": _map,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vmap": _custom_vmap,
    "barrier": _barrier,
    "checkpoint_name": _name,
    "shard_map": _sharded,
}
MOVES: dict[str, Callable[[Any], Any]] = {
    "sort": _sort,
    "top_k": _top_k,
    "max pooling": _pool,
    ".at[].set": _set,
    "dynamic_update_slice": _update,
    "pad": _pad,
    "concatenate": _concatenate,
    "reshape": _reshape,
    "stack": _stack,
    "where": _where,
}


# -- cutting ---------------------------------------------------------------------------------------


def _piece(
    jaxpr: Any, first: int, last: int, outside: set[Any]
) -> tuple[Fun, list[Any], list[Any]]:
    """Returns some equations as a function, with the variables that it reads and leaves."""
    eqns = jaxpr.eqns[first:last]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(
        v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal) and v not in made
    )
    leaves = [v for eqn in eqns for v in eqn.outvars if v in outside]

    def run(*args: Any) -> list[Any]:
        env = dict(zip(reads, args, strict=True))
        for eqn in eqns:
            _bind(eqn, env)
        return [env[v] for v in leaves]

    return run, list(reads), leaves


def _bind(eqn: Any, env: dict[Any, Any]) -> None:
    """Adds the results of an equation to the values of variables."""
    operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
    with written_at(eqn):
        env.update(zip(eqn.outvars, bind(eqn, operands), strict=True))


def cut(closed: Any, places: Sequence[int], wrap: dict[int, Callable[[Fun], Fun]]) -> Fun:
    """Returns a traced program as a function, split before the equations at some places.

    Args:
      closed: the program.
      places: sorted places among its equations.
      wrap: what to put around the n-th piece; the others are as they were.
    """
    jaxpr = closed.jaxpr
    ends = [0, *places, len(jaxpr.eqns)]

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))
        for n, (first, last) in enumerate(itertools.pairwise(ends)):
            if first == last:
                continue
            outside = {
                v for eqn in jaxpr.eqns[last:] for v in eqn.invars if not isinstance(v, Literal)
            } | {v for v in jaxpr.outvars if not isinstance(v, Literal)}
            fun, reads, leaves = _piece(jaxpr, first, last, outside)
            outs = wrap.get(n, lambda f: f)(fun)(*(env[v] for v in reads))
            env.update(zip(leaves, outs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    return run


def moved(closed: Any, moves: dict[int, Callable[[Any], Any]]) -> Fun:
    """Returns a traced program as a function that moves the results of some equations, and back."""
    jaxpr = closed.jaxpr

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))
        for i, eqn in enumerate(jaxpr.eqns):
            _bind(eqn, env)
            outs = [env[v] for v in eqn.outvars]
            env.update(zip(eqn.outvars, _floats(outs, moves.get(i, lambda x: x)), strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    return run


def random_cut(closed: Any, kind: str, rng: random.Random) -> Fun:
    """Returns a program cut, or moved, at random places, by one kind of boundary or move."""
    count = len(closed.jaxpr.eqns)
    if kind in MOVES:
        chosen = rng.sample(range(count), min(count, rng.choice((1, 2, 4))))
        return moved(closed, dict.fromkeys(chosen, MOVES[kind]))
    places = sorted(rng.sample(range(1, count), min(count - 1, rng.choice((1, 2, 3, 5)))))
    pieces = range(len(places) + 1)
    chosen = pieces if rng.random() < 0.5 else rng.sample(pieces, rng.randint(1, len(places) + 1))
    return cut(closed, places, dict.fromkeys(chosen, BOUNDARIES[kind]))
