"""Low values whose cotangents are sums: of everything that a repetition, or a loop, made of them.

A value that is repeated has the sum of its copies' cotangents for its own, and so has a value that
every iteration of a loop reads. JAX would add them up in the dtype of the value: in bfloat16 a sum
of equal terms stops growing at 256 of them, in float16 it is inf past 65504. Values stay low here,
tangents pass through float32, and so does their transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mpjax._autocast import product
from mpjax._autocast.decide import states, traits
from mpjax._autocast.decide.states import FLOAT32, is_float32
from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive
from mpjax._jaxpr.identity import in_front

_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_summed(eqn: Any) -> bool:
    """Whether the derivative of an operation holds a sum, or what JAX writes as one."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return states.copies(eqn) > 2  # a sum of two terms is rounded once in any dtype
    if eqn.params.get("unique_indices") and name == "gather":
        return False  # what each element is read for is one thing
    return name in traits.REPEATS or name in traits.SELECTS


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an operation on low values, its tangents computed in float32."""
    # A 16-bit operand that the user's program has is none of ours: it keeps its dtype.
    pairs = zip(eqn.invars, values, strict=True)
    lows = [i for i, (v, x) in enumerate(pairs) if is_float32(v) and is_low(x)]
    if not lows:
        return _outs(eqn, values)
    low = values[lows[0]].dtype

    def plain(*args: Any) -> list[Any]:
        return _outs(eqn, args)

    def widened(*args: Any) -> list[Any]:
        outs = plain(*(a.astype(FLOAT32) if i in lows else a for i, a in enumerate(args)))
        pairs = zip(eqn.outvars, outs, strict=True)
        return [out.astype(low) if is_float32(v) else out for v, out in pairs]

    def rule(primals: Any, tangents: Any) -> Any:
        if eqn.primitive.name in traits.REPEATS:
            return made(*primals), widened(tangents[0], *primals[1:])
        # Which values were chosen is found again from low operands, rather than kept in float32.
        return jax.jvp(jax.checkpoint(widened, prevent_cse=False), primals, tangents)

    made = _with_rule(plain, rule)
    return made(*values)


def _outs(eqn: Any, values: Sequence[Any]) -> list[Any]:
    bound = compat.bind(eqn.primitive, values, eqn.params)
    return list(bound) if eqn.primitive.multiple_results else [bound]


def is_low(value: Any) -> bool:
    """Whether an array is held in a dtype of 16 bits."""
    return getattr(value, "dtype", None) in _LOW


def _with_rule(fun: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    made = jax.custom_jvp(fun)
    made.defjvp(rule)
    return made


# A primitive, since a rule of the user's may hold such a loop over tangents: then the value itself
# is transposed, and its cotangent has to go to the twin as well.
_reattached_p = own_primitive("reattached_value")
_reattached_p.def_impl(lambda low, full: low)
_reattached_p.def_abstract_eval(lambda low, full: low.update(weak_type=False))
mlir.register_lowering(_reattached_p, lambda ctx, low, full: [low])


def _reattached_jvp(primals: Any, tangents: Any) -> Any:
    # The value is attached again, or second derivatives would end at what is hidden.
    out, tangent = _reattached_p.bind(*primals), tangents[1]
    if isinstance(tangent, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, tangent.astype(out.dtype)


def _reattached_transpose(ct: Any, low: Any, full: Any) -> list[Any]:
    cts: list[Any] = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (low, full)]
    if ad.is_undefined_primal(full) and not isinstance(ct, ad.Zero):
        cts[1] = ct.astype(full.aval.dtype)
    return cts


def _reattached_batch(args: Any, dims: Any) -> Any:
    size = compat.batch_size(args, dims)
    return _reattached_p.bind(*(in_front(x, d, size) for x, d in zip(args, dims, strict=True))), 0


ad.primitive_jvps[_reattached_p] = _reattached_jvp
ad.primitive_transposes[_reattached_p] = _reattached_transpose
batching.primitive_batchers[_reattached_p] = _reattached_batch


def detached(low: jax.Array, full: jax.Array) -> Callable[[], jax.Array]:
    """Returns a low value for the body of a loop: read there, summed outside in float32.

    Args:
      low: the value.
      full: the same in float32; its tangent is that of the value.

    Returns:
      A function to be called in the body.
    """
    hidden = product.hidden(low)
    return lambda: _reattached_p.bind(hidden, full)
