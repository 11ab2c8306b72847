"""Sums the cotangents of low values in float32: of values that a broadcast or a loop repeats.

The cotangent of a repeated value is the sum of its copies' cotangents, and so is that of a value
that every iteration of a loop reads. JAX would add them up in the dtype of the value: in bfloat16 a
sum of equal terms stops growing at 256 terms, in float16 it is inf past 65504. Here values stay
low, and tangents pass through float32, so that their transposes (cotangents) do too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from mpjax._autocast import product
from mpjax._autocast.known import traits
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.own_primitives import own_primitive
from mpjax._jaxpr import binding, sizes
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.identity import in_front
from mpjax._jaxpr.sizes import is_float32

_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_summed(eqn: Eqn) -> bool:
    """Whether the transpose of an operation is a sum, or JAX writes it as one: of a gather."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return sizes.copies(eqn) > 2  # a sum of two terms is rounded once in any dtype
    if eqn.params.get("unique_indices") and name == "gather":
        return False  # each element is read at most once, so that its cotangent is no sum
    return name in traits.REPEATS or name in traits.SELECTS


def bind(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an operation on low values, its tangents computed in float32."""
    # An operand that is 16-bit in the user's own program is not ours to widen.
    pairs = zip(eqn.invars, values, strict=True)
    lows = [i for i, (v, x) in enumerate(pairs) if is_float32(v) and is_low(x)]
    if not lows:
        return binding.bind(eqn, values)
    low = values[lows[0]].dtype

    def plain(*args: Any) -> list[Any]:
        return binding.bind(eqn, args)

    def widened(*args: Any) -> list[Any]:
        outs = plain(*(a.astype(FLOAT32) if i in lows else a for i, a in enumerate(args)))
        pairs = zip(eqn.outvars, outs, strict=True)
        return [out.astype(low) if is_float32(v) else out for v, out in pairs]

    def rule(primals: Any, tangents: Any) -> Any:
        if eqn.primitive.name in traits.REPEATS:
            return made(*primals), widened(tangents[0], *primals[1:])
        # The checkpoint recomputes the chosen places (a max, a sort) from low operands; else JAX
        # would save float32 operands for the backward pass.
        return jax.jvp(jax.checkpoint(widened, prevent_cse=False), primals, tangents)

    made = _with_rule(plain, rule)
    return made(*values)


def is_low(value: Any) -> bool:
    """Whether an array has a dtype of 16 bits."""
    return getattr(value, "dtype", None) in _LOW


def _with_rule(fun: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    made = jax.custom_jvp(fun)
    made.defjvp(rule)
    return made


# A primitive and not a `custom_jvp`: a user's rule may contain such a loop over tangents. Then JAX
# transposes the value itself, and its cotangent has to go to the float32 twin.
_reattached_p = own_primitive("reattached_value")
_reattached_p.def_impl(lambda low, full: low)
_reattached_p.def_abstract_eval(lambda low, full: low.update(weak_type=False))
mlir.register_lowering(_reattached_p, lambda ctx, low, full: [low])


def _reattached_jvp(primals: Any, tangents: Any) -> Any:
    # The value is attached again: the hidden low value alone would have no second derivatives.
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
    """Returns a low value for the body of a loop, whose cotangents are summed in float32.

    Args:
      low: the value.
      full: the same in float32, which receives the gradient.

    Returns:
      A function to call in the body; it returns the value.
    """
    hidden = product.hidden(low)
    return lambda: _reattached_p.bind(hidden, full)
