"""Binds loops, branches, checkpoints and shard_maps again, around functions of one's own.

An interpreter gives the function that runs in place of a program; each kind of equation is bound
here, by JAX's public function, with the parameters that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._base import compat
from mpjax._jaxpr import hijax_programs
from mpjax._jaxpr.equation import Eqn

Values = Sequence[Any]
"""Arrays, or pytrees of arrays."""


def scan(eqn: Eqn, body: Callable[[Any, Any], Values], carry: Values, xs: Any) -> list[Any]:
    """Returns the results of a `scan`: the last carry, then the stacks.

    Args:
      eqn: the equation.
      body: maps a carry and the slices of an iteration to the new carry, then what is stacked.
      carry: the first carry; it may hold more than that of the equation.
      xs: a tree of the arrays that are sliced.
    """
    params, count = eqn.params, len(carry)

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        outs = body(carry, slices)
        return outs[:count], outs[count:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    if not isinstance(options["length"], int):
        del options["length"]  # a symbol, when exported: JAX reads it off the scanned arrays
    if params.get("_split_transpose"):
        options["_split_transpose"] = True
    carry, ys = lax.scan(step, carry, xs, **options)
    return [*carry, *ys]


def while_loop(
    eqn: Eqn,
    going: Callable[[Any], Any],
    body: Callable[[Any, Any], tuple[Values, Any]],
    carry: Values,
    beside: Any = (),
) -> tuple[list[Any], Any]:
    """Returns the last carry of a `while`, and the last of what goes beside it.

    The condition of a loop that `vmap` joined is an array. The loop runs until all elements have
    ended; an element that has ended keeps its carry.

    Args:
      eqn: the equation.
      going: returns the condition of a carry.
      body: maps a carry and what goes beside it to those after an iteration.
      carry: the first carry, of arrays.
      beside: a tree of arrays that the condition does not read.
    """
    joined = bool(compat.closed(eqn.params["cond_jaxpr"]).out_avals[0].shape)

    def condition(state: Any) -> Any:
        return jnp.any(going(state[0])) if joined else going(state[0])

    def step(state: Any) -> Any:
        if not joined:
            return body(*state)
        is_going = going(state[0])
        new, after = body(*state)
        return [_chosen(is_going, *pair) for pair in zip(new, state[0], strict=True)], after

    return lax.while_loop(condition, step, (list(carry), beside))


def _chosen(is_going: Any, new: Any, old: Any) -> Any:
    return jnp.where(lax.broadcast_in_dim(is_going, new.shape, range(is_going.ndim)), new, old)


def cond(eqn: Eqn, index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Returns the results of a `cond`, a `switch` or a `platform_dependent`."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    # `lax.platform_dependent` lowers only the branch of the platform: others may fail there.
    pairs = list(zip(platforms, branches, strict=True))
    named = {name: branch for names, branch in pairs for name in names or ()}
    return lax.platform_dependent(*operands, default=dict(pairs).get(None), **named)


def checkpoint(eqn: Eqn, fun: Callable[..., Any], args: Values, policy: Any) -> Any:
    """Returns the results of a function under the checkpoint of an equation.

    `jax.checkpoint` would bind an equation that is differentiated already as one that is not: XLA
    may then undo the recomputation. Such an equation is bound itself, where `args` are arrays.
    """
    params = (hijax_programs.holder(eqn) or eqn).params
    if params.get("differentiated"):
        inner = jax.make_jaxpr(fun)(*args)
        if not inner.consts:  # no public function makes inputs of constants on both versions
            params = {**eqn.params, "jaxpr": inner.jaxpr, "policy": policy}
            return eqn.primitive.bind(*args, **params)
    prevent_cse = params["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # one for each operand, and there may be more now
        prevent_cse = any(prevent_cse)
    return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=policy)(*args)


def shard_map(
    eqn: Eqn, fun: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function mapped over the shards of the mesh axes of an equation."""
    params = eqn.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=params["check_vma"],
        axis_names=compat.manual_axes(params),
    )
