"""Cuts programs: some of their equations behind a boundary, some of their values moved and back.

A program is traced, its equations are split at random places, and each piece is called behind a
boundary (`jax.jit`, a checkpoint, a branch, a loop of one turn ...), or a value is sorted and put
back, padded and cut. Plain JAX computes the same: what differs under autocast is autocast's.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from mpjax._jaxpr.binding import bind, written_at

Fun = Callable[..., Any]


PUT_IN = frozenset({"name", "optimization_barrier"})
"""Operations that a boundary consists of."""
BOUNDARIES: dict[str, Callable[[Fun], Fun]] = {}


def boundary(name: str) -> Callable[[Fun], Fun]:
    """Adds a boundary, written as a function of a piece and of the piece's arguments."""

    def add(call: Fun) -> Fun:
        BOUNDARIES[name] = lambda piece: functools.partial(call, piece)
        return call

    return add


def _floats(outs, move):
    return [move(x) if getattr(x, "dtype", None) == jnp.float32 else x for x in outs]


# -- boundaries around a piece of a program --------------------------------------------------------


@boundary("jit")
def _jit(fun, *args):
    return jax.jit(_named(fun))(*args)


@boundary("checkpoint")
def _checkpoint(fun, *args):
    return jax.checkpoint(_named(fun))(*args)


@boundary("checkpoint with a policy")
def _checkpoint_dots(fun, *args):
    return jax.checkpoint(_named(fun), policy=jax.checkpoint_policies.dots_saveable)(*args)


@boundary("cond")
def _cond(fun, *args):
    held = next((a for a in args if getattr(a, "dtype", None) == jnp.float32), None)
    going = True if held is None else jnp.ravel(held)[0] < np.inf
    zeros = _zeros_like_results(fun, args)
    run = _named(lambda *args: tuple(fun(*args)))
    return list(lax.cond(jnp.asarray(going) | True, run, lambda *_: zeros, *args))


@boundary("switch")
def _switch(fun, *args):
    i = sum(jnp.size(a) for a in args) % 3
    return lax.switch(jnp.asarray(i, jnp.int32), [_named(fun)] * 3, *args)


@boundary("scan that stacks")
def _scan_stacking(fun, *args):
    stacked = tuple(a[None] for a in args)
    _, ys = lax.scan(lambda c, xs: (c, tuple(fun(*xs))), None, stacked, length=1)
    return [y[0] for y in ys]


def _zeros_like(fun: Fun) -> Fun:
    """Returns a function of the same arguments, with zeros for results."""

    def zeros(*xs: Any) -> Any:
        made = jax.eval_shape(fun, *xs)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made)

    return zeros


def _zeros_like_results(fun, args):
    return _zeros_like(lambda *xs: tuple(fun(*xs)))(*args)


@boundary("scan that carries")
def _scan_carrying(fun, *args):
    start = _zeros_like_results(fun, args)
    return list(lax.scan(lambda _, __: (tuple(fun(*args)), None), start, None, length=1)[0])


@boundary("fori_loop")
def _fori(fun, *args):
    start = _zeros_like_results(fun, args)
    return list(lax.fori_loop(0, 1, lambda i, _: tuple(fun(*args)), start))


@boundary("map")
def _map(fun, *args):
    stacked = (jnp.zeros(1), *(a[None] for a in args))
    return [y[0] for y in lax.map(lambda xs: tuple(fun(*xs[1:])), stacked)]


@boundary("custom_jvp")
def _custom_jvp(fun, *args):
    made = jax.custom_jvp(_named(fun))
    made.defjvp(lambda primals, tangents: jax.jvp(_named(fun), primals, tangents))
    return made(*args)


@boundary("custom_vjp")
def _custom_vjp(fun, *args):
    made = jax.custom_vjp(_named(fun))
    made.defvjp(lambda *args: jax.vjp(_named(fun), *args), lambda pull, cts: pull(cts))
    return made(*args)


@boundary("custom_vmap")
def _custom_vmap(fun, *args):
    made = jax.custom_batching.custom_vmap(_named(fun))

    @made.def_vmap
    def rule(size, batched, *args):
        axes = tuple(0 if b else None for b in batched)
        outs = jax.vmap(_named(fun), axes, axis_size=size)(*args)
        return outs, [True] * len(outs)

    return made(*args)


@boundary("barrier")
def _barrier(fun, *args):
    return lax.optimization_barrier(list(fun(*args)))


@boundary("checkpoint_name")
def _name(fun, *args):
    return _floats(fun(*args), lambda x: jax.ad_checkpoint.checkpoint_name(x, "cut"))


def _on_one_device(fun, *args, check_vma=False):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    whole = jax.sharding.PartitionSpec()
    where = {"mesh": mesh, "in_specs": whole, "out_specs": whole, "check_vma": check_vma}
    return jax.shard_map(fun, **where)(*args)


@boundary("shard_map")
def _sharded(fun, *args):
    return list(_on_one_device(lambda *xs: tuple(fun(*xs)), *args))


def _named(fun):
    def cut_piece(*args):
        return fun(*args)

    return cut_piece


# -- moves of values, and back ---------------------------------------------------------------------


def of_axes(move: Fun) -> Fun:
    """Returns a move that leaves a scalar where it is."""
    return lambda x: move(x) if x.ndim else x


def _sort(x):
    order = jnp.argsort(lax.stop_gradient(x), axis=-1)
    return jnp.take_along_axis(jnp.sort(x, axis=-1), jnp.argsort(order, axis=-1), axis=-1)


def _top_k(x):
    values, order = lax.top_k(x, x.shape[-1])
    return jnp.take_along_axis(values, jnp.argsort(order, axis=-1), axis=-1)


def _pool(x):
    wide = jnp.repeat(x[None, ..., None], 2, axis=-1)
    window = (*(1,) * (wide.ndim - 1), 2)
    return lax.reduce_window(wide, -jnp.inf, lax.max, window, window, "VALID")[0, ..., 0]


def _update(x):
    start = (0,) * (x.ndim + 1)
    return lax.dynamic_update_slice(jnp.zeros((2, *x.shape), x.dtype), x[None], start)[0]


def _pad(x):
    return lax.pad(x, np.float32(0), [(1, 1, 0)] * x.ndim)[(slice(1, -1),) * x.ndim]


def _reshape(x):
    if x.ndim != 1:
        return x.reshape(-1).reshape(x.shape)
    return jnp.flip(jnp.flip(x.reshape(-1)).reshape(x.shape[::-1]).T.reshape(-1)).reshape(x.shape)


def _psum(x):
    def run(y):
        return lax.psum(lax.pcast(y, "one", to="varying"), "one")

    return _on_one_device(run, x, check_vma=True)


def _reduce_scatter(x):
    def run(y):
        return lax.psum_scatter(y, "one", tiled=True)

    return _on_one_device(run, x)


def _all_gather(x):
    return _on_one_device(lambda y: lax.all_gather(y, "one", tiled=True), x)


def _psum_by_vmap(x):
    return jax.vmap(lambda y: lax.psum(y, "one"), axis_name="one")(x[None])[0]


MOVES: dict[str, Callable[[Any], Any]] = {
    "sort": of_axes(_sort),
    "top_k": of_axes(_top_k),
    "max pooling": _pool,
    ".at[].set": lambda x: jnp.zeros((2, *x.shape), x.dtype).at[1].set(x)[1],
    "dynamic_update_slice": _update,
    "pad": of_axes(_pad),
    "concatenate": lambda x: jnp.concatenate([x[None], jnp.zeros_like(x)[None]])[0],
    "reshape": _reshape,
    "stack": lambda x: jnp.stack([x, x])[1],
    "where": lambda x: jnp.where(jnp.ones(x.shape, bool), x, 0.0),
    "all_gather": of_axes(_all_gather),
}

DEVICES: dict[str, Callable[[Any], Any]] = {
    "psum": _psum,
    "pmean": lambda x: _on_one_device(lambda y: lax.pmean(y, "one"), x),
    "reduce_scatter": of_axes(_reduce_scatter),
}
"""Sums over devices, of which there is one."""

SUMS: dict[str, Callable[[Any], Any]] = {
    **DEVICES,
    "psum by vmap": _psum_by_vmap,
    ".at[].add": lambda x: jnp.zeros((2, *x.shape), x.dtype).at[1].add(x)[1],
    "reduce": lambda x: lax.reduce(x[None], np.float32(0), lambda a, b: lax.add(a, b), (0,)),
    "cumprod": lambda x: jnp.cumprod(x[None], axis=0)[0],
    "complex": lambda x: lax.complex(x, jnp.zeros_like(x)).real,
}
"""The same value, as there is one term: otherwise the result is another one."""

OF_VALUES = {**MOVES, **SUMS}


def _else_zeros(fun: Fun) -> Fun:
    """One of two branches; the other one gives zeros, of which other things are known."""
    return lambda *xs: lax.cond(xs[0].ravel()[0] < 1e30, fun, _zeros_like(fun), *xs)


def _left_by_a_loop(fun: Fun) -> Fun:
    """A loop of two turns from zeros on: each makes the result anew, and carries it."""
    return lambda *xs: lax.fori_loop(0, 2, lambda _, carry: fun(*xs), _zeros_like(fun)(*xs))


AROUND: dict[str, Callable[[Fun], Fun]] = {
    "uncut": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "barrier": lambda fun: lambda *xs: lax.optimization_barrier(fun(*lax.optimization_barrier(xs))),
    "cond": _else_zeros,
    "fori_loop": _left_by_a_loop,
    "scan": lambda fun: lambda *xs: lax.scan(lambda c, _: (c, fun(*xs)), 0, None, 1)[1][0],
}
"""Boundaries around a function of arrays that gives one array, as an author writes them."""


def in_turn(values: Iterable[str], *chosen: tuple[Iterable[str], str]) -> str:
    """Returns one of some values for a case of a law: each meets each of the others' values.

    A law of many heads, losses and cuts takes its losses in turn, or CI would run for hours.

    Args:
      values: the values.
      chosen: for each other parameter its values, and that of the case.
    """
    places = (list(every).index(one) for every, one in chosen)
    one_of = list(values)
    return one_of[sum(places) % len(one_of)]


def cuts_in_turn(*chosen: tuple[Iterable[str], str]) -> list[str]:
    """Names the cuts for a case of a law: none, and each second of the others.

    Args:
      chosen: for each parameter of the law its values, and that of the case: the next has the rest.
    """
    first = sum(list(every).index(one) for every, one in chosen) % 2
    return ["uncut", *[cut for cut in AROUND if cut != "uncut"][first::2]]


# -- cutting ---------------------------------------------------------------------------------------


def _piece(
    jaxpr: Any, first: int, last: int, outside: set[Any]
) -> tuple[Fun, list[Any], list[Any]]:
    """Returns some equations as a function, with the variables that it reads and leaves."""
    eqns = jaxpr.eqns[first:last]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(v for v in _variables(eqns) if v not in made)
    leaves = [v for eqn in eqns for v in eqn.outvars if v in outside]

    def run(*args: Any) -> list[Any]:
        env = dict(zip(reads, args, strict=True))
        for eqn in eqns:
            _bind(eqn, env)
        return [env[v] for v in leaves]

    return run, list(reads), leaves


def _variables(eqns: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations read, in order."""
    return [v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)]


def _start(closed: Any, args: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values that a program begins with."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return env | dict(zip(closed.jaxpr.invars, args, strict=True))


def _read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def _bind(eqn: Any, env: dict[Any, Any]) -> None:
    """Adds the results of an equation to the values of variables."""
    with written_at(eqn):
        env.update(zip(eqn.outvars, bind(eqn, _read(env, eqn.invars)), strict=True))


def cut(closed: Any, places: Sequence[int], wrap: dict[int, Callable[[Fun], Fun]]) -> Fun:
    """Returns a traced program as a function, split before the equations at some places.

    Args:
      closed: the program.
      places: sorted places among its equations.
      wrap: what to put around the n-th piece; the others are as they were.
    """
    jaxpr = closed.jaxpr
    ends = [0, *places, len(jaxpr.eqns)]
    outputs = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def run(*args: Any) -> list[Any]:
        env = _start(closed, args)
        for n, (first, last) in enumerate(itertools.pairwise(ends)):
            if first == last:
                continue
            outside = {*_variables(jaxpr.eqns[last:])} | outputs
            fun, reads, leaves = _piece(jaxpr, first, last, outside)
            outs = wrap.get(n, lambda f: f)(fun)(*(env[v] for v in reads))
            env.update(zip(leaves, outs, strict=True))
        return _read(env, jaxpr.outvars)

    return run


def moved(closed: Any, moves: dict[int, Callable[[Any], Any]]) -> Fun:
    """Returns a traced program as a function that moves the results of some equations, and back."""

    def run(*args: Any) -> list[Any]:
        env = _start(closed, args)
        for i, eqn in enumerate(closed.jaxpr.eqns):
            _bind(eqn, env)
            outs = [env[v] for v in eqn.outvars]
            env.update(zip(eqn.outvars, _floats(outs, moves.get(i, lambda x: x)), strict=True))
        return _read(env, closed.jaxpr.outvars)

    return run


def random_cut(closed: Any, kind: str, rng: random.Random) -> Fun:
    """Returns a program cut, or moved, at random places, by one kind of boundary or move."""
    count = len(closed.jaxpr.eqns)
    if kind not in BOUNDARIES:
        chosen = rng.sample(range(count), min(count, rng.choice((1, 2, 4))))
        return moved(closed, dict.fromkeys(chosen, OF_VALUES[kind]))
    places = sorted(rng.sample(range(1, count), min(count - 1, rng.choice((1, 2, 3, 5)))))
    pieces = range(len(places) + 1)
    chosen = pieces if rng.random() < 0.5 else rng.sample(pieces, rng.randint(1, len(places) + 1))
    return cut(closed, places, dict.fromkeys(chosen, BOUNDARIES[kind]))
