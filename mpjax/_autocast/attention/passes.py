"""Runs the forward and the backward pass of an attention by a kernel, which reads `Operands`."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._autocast.attention import empty_rows
from mpjax._autocast.attention.program import LEAST, AttentionProgram, Empty, Operands
from mpjax._autocast.known.named_attention import MULTIPLIED
from mpjax._base import compat

_NEVER = 1e30  # as the logarithm of a row's sum: all weights are exp(logit - 1e30) = 0


def forward(kernel: ModuleType, *arrays: Any, program: AttentionProgram) -> tuple[Any, Any]:
    """Returns the result and the logarithm of each row's sum, by a kernel."""
    inputs, spec = program.operands(*arrays), program.spec
    special = empty_rows.special(inputs, spec)
    out, rows = kernel.forward(empty_rows.ready(inputs, spec, special), spec)
    out = empty_rows.filled(out, inputs, spec, special)
    if special.keyless is not None and spec.empty is Empty.MEAN:
        rows = jnp.where(special.keyless[..., 0], LEAST, rows)
    return program.result(out), rows.reshape(*program.lead, *rows.shape[1:])


def backward(
    kernel: ModuleType, *args: Any, program: AttentionProgram, wrt: tuple[int, ...]
) -> list[Any]:
    """Returns the cotangents of query, key and value, by a kernel."""
    *arrays, out, rows, ct = args
    spec = program.spec

    def operands(*moving: Any) -> tuple[Any, Any]:
        full = list(arrays)
        for i, x in zip(wrt, moving, strict=True):
            full[i] = x
        inputs = program.operands(*full)
        return inputs[:MULTIPLIED], inputs[MULTIPLIED:]

    floats, pull, others = jax.vjp(operands, *(arrays[i] for i in wrt), has_aux=True)
    inputs = Operands(*floats, *others)
    batch, heads, queries, _ = inputs.sizes
    size = inputs.value.shape[-1]
    turned = functools.partial(_untransposed, program, (batch, queries, heads, size))
    out, ct = turned(out), turned(ct)
    rows = rows.reshape(batch, heads, queries)
    special = empty_rows.special(inputs, spec)
    given = empty_rows.ready(inputs, spec, special)
    which = special.filled(spec.empty)
    if which is None:  # no special rows: the kernel's gradients are XLA's
        return list(pull(tuple(kernel.backward(given, spec, out, rows, ct))))

    def instead(*floats: Any) -> Any:
        return empty_rows.filled(jnp.zeros_like(ct), Operands(*floats, *others), spec, special)

    others_share = jax.vjp(instead, *floats)[1](ct)
    zero, is_filled = jnp.zeros((), ct.dtype), empty_rows.as_result(which)
    out, ct = (jnp.where(is_filled, zero, x) for x in (out, ct))  # a NaN would spread
    rows = jnp.where(which[..., 0], _NEVER, rows)
    grads = list(kernel.backward(given, spec, out, rows, ct))
    if special.faint is not None:  # the bias absorbs the logits there: the query has no gradient
        grads[0] = jnp.where(empty_rows.as_result(special.faint), zero, grads[0])
    return list(pull(tuple(a + b for a, b in zip(grads, others_share, strict=True))))


def _untransposed(program: AttentionProgram, shape: tuple[int, ...], x: Any) -> Any:
    """Returns an array like the author's result with the axes of a kernel's result."""
    # `jax.linear_transpose` asserts inside a `shard_map` that tracks varying axes.
    zeros, x = compat.equally_varying(jnp.zeros(shape, x.dtype), x)
    return jax.vjp(program.result, zeros)[1](x)[0]
