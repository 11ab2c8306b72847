"""cuDNN's fused attention, called through JAX: the forward and the backward kernel separately.

JAX offers the kernels as one function with its own derivative. A trace of that derivative has both
kernels in it. `forward` runs the first for its results; `backward` is given these, and runs the
second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._autocast.attention.program import Operands, Spec
from mpjax._autocast.attention.traced import Forward, first_pass, second_pass
from mpjax._jaxpr.equation import Eqn

NAME = "cuDNN"
_MULTIPLE, _LARGEST = 8, 256


def why_not(operands: Operands, spec: Spec) -> str:
    """Returns why cuDNN does not take operands, empty if it may."""
    size, values = operands.query.shape[-1], operands.value.shape[-1]
    _, _, queries, keys = operands.sizes
    dtypes = {x.dtype.name for x in operands[:3]}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        return f"operands are {', '.join(sorted(dtypes))}, and not bfloat16 or float16"
    if size % _MULTIPLE or size > _LARGEST:
        return f"heads are of {size}, and not of a multiple of 8 up to 256"
    if values != size:
        return f"values are of {values}, and keys of {size}"
    if queries % 2 or keys % 2:  # without a bias too: JAX's derivative always hands cuDNN one
        return f"{queries} × {keys} has an odd length"
    if spec.right not in (None, 0):
        return "its window ends after a query's place"
    if spec.left is not None and spec.right is None:
        return "its window has no end"
    return ""


def why_not_installed(operands: Operands, spec: Spec) -> str:
    """Returns why JAX refuses the kernel here, such as the version of cuDNN or the GPU; or ''."""
    structs = [x for x in operands if x is not None]

    def both_passes(*arrays: Any) -> Any:  # JAX refuses more of the second, and `forward` runs it
        given = _restored(operands, arrays)
        out, pull = jax.vjp(_function(given, spec), *given[:3])
        return pull(out)

    try:
        jax.eval_shape(both_passes, *structs)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX refuses it: {error}"
    return ""


def _restored(operands: Operands, arrays: Sequence[Any]) -> Operands:
    given = iter(arrays)
    return Operands(*(None if x is None else next(given) for x in operands))


def _attend(operands: Operands, spec: Spec) -> Any:
    window = None if spec.left is None else (spec.left, 0)
    mask = operands.mask
    if mask is not None:
        _, _, queries, keys = operands.sizes
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], queries, keys))
    return jax.nn.dot_product_attention(
        operands.query,
        operands.key,
        operands.value,
        operands.bias,
        mask,
        scale=spec.scale,
        is_causal=spec.right == 0,
        key_value_seq_lengths=operands.lengths,
        local_window_size=window,
        implementation="cudnn",
    )


def forward(operands: Operands, spec: Spec) -> tuple[Any, Any]:
    """Returns the result, and the logarithm of each row's sum, f32[batch, heads, queries]."""
    kernel = Forward(functools.partial(_is_forward, operands))
    first_pass(_function(operands, spec), operands[:3], kernel)
    out, rows = kernel.found(NAME)
    return out, rows


def backward(operands: Operands, spec: Spec, out: Any, rows: Any, ct: Any) -> Sequence[Any]:
    """Returns the cotangents of query, key and value."""
    kernel = Forward(functools.partial(_is_forward, operands), [out, rows])
    grads = second_pass(_function(operands, spec), operands[:3], ct, kernel)
    kernel.found(NAME)
    return grads


def _function(operands: Operands, spec: Spec) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return _attend(operands._replace(query=query, key=key, value=value), spec)

    return attend


def _is_forward(operands: Operands, eqn: Eqn) -> bool:
    """Whether an equation is the forward kernel: its second result is a number for each row."""
    batch, heads, queries, _ = operands.sizes
    rows = [v.aval.shape for v in eqn.outvars[1:] if v.aval.dtype == jnp.float32]
    return eqn.primitive.multiple_results and rows == [(batch, heads, queries)]
