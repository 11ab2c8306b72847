"""Attention as one operation, whose derivative saves no value of the size queries × keys.

`attention_p` gives the result and the logarithm of each row's sum. Its tangent is one operation
too, linear in the tangents of the operands. In forward mode it is computed by XLA's form; its
transpose is `backward_p`, which reads the operands, the result and the rows' sums. So a backward
pass saves these on every platform. The derivatives of both are those of XLA's form.

The kernel is chosen where the operations are lowered (`kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.attention import kernels, passes
from mpjax._autocast.attention.program import AttentionProgram, batched, out_avals
from mpjax._autocast.known import named_attention
from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive, runs_operations_one_by_one

attention_p = named_attention.FORWARD
"""Maps operands to (result, rows)."""
tangent_p = own_primitive("attention_tangent", computes=True)
"""Maps operands, result, rows and the tangents of operands `wrt` to the result's tangent."""
backward_p = named_attention.BACKWARD
"""Maps operands, result, rows and the result's cotangent to the cotangents of operands `wrt`."""


def attention(program: AttentionProgram, *arrays: Any) -> tuple[Any, Any]:
    """Returns the result of an attention, and the logarithm of each row's sum of exponentials."""
    if any(compat.explicit_sharding(jax.typeof(x)) is not None for x in arrays):
        return jax.checkpoint(program.form)(*arrays)  # JAX types results by its products
    out, rows = attention_p.bind(*compat.equally_varying(*arrays), program=program)
    return out, rows


def backward(*args: Any, program: AttentionProgram, wrt: tuple[int, ...]) -> list[Any]:
    """Returns the cotangents of the operands `wrt` of an attention: see `backward_p`."""
    return backward_p.bind(*compat.equally_varying(*args), program=program, wrt=wrt)


# -- by XLA's operations ---------------------------------------------------------------------------


def _form(*arrays: Any, program: AttentionProgram) -> tuple[Any, Any]:
    return program.form(*arrays)


def _along(
    program: AttentionProgram, arrays: Sequence[Any], wrt: Sequence[int]
) -> Callable[..., Any]:
    """Returns the result as a function of some of the operands."""

    def fun(*moving: Any) -> Any:
        full = list(arrays)
        for i, x in zip(wrt, moving, strict=True):
            full[i] = x
        return program.form(*full)[0]

    return fun


def _tangent(*args: Any, program: AttentionProgram, wrt: tuple[int, ...]) -> Any:
    arrays, tangents = args[: -2 - len(wrt)], args[-len(wrt) :]
    moving = [arrays[i] for i in wrt]
    return jax.jvp(_along(program, arrays, wrt), moving, list(tangents))[1]


def _backward(*args: Any, program: AttentionProgram, wrt: tuple[int, ...]) -> list[Any]:
    *arrays, _, _, ct = args
    # Without the barrier XLA would recognise the forward pass's logits, and store them for this.
    *arrays, ct = lax.optimization_barrier((*arrays, ct))
    return list(jax.vjp(_along(program, arrays, wrt), *(arrays[i] for i in wrt))[1](ct))


# -- rules of the primitives -----------------------------------------------------------------------


def _run(primitive: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    def impl(*args: Any, program: AttentionProgram, **params: Any) -> Any:
        if runs_operations_one_by_one():
            return fun(*args, program=program, **params)
        bind = functools.partial(primitive.bind, program=program, **params)
        key = (primitive, *sorted(params.items()))
        return program.once(key, lambda: jax.jit(bind))(*args)

    return impl


attention_p.def_impl(_run(attention_p, _form))
tangent_p.def_impl(_run(tangent_p, _tangent))
backward_p.def_impl(_run(backward_p, _backward))
kernels.register(attention_p, _form, passes.forward, others=0)
kernels.register(backward_p, _backward, passes.backward, others=3)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))


@attention_p.def_abstract_eval
def _abstract(*avals: Any, program: AttentionProgram) -> tuple[Any, Any]:
    return out_avals(program, avals)


@tangent_p.def_abstract_eval
def _tangent_abstract(*avals: Any, wrt: tuple[int, ...], **_: Any) -> Any:
    return avals[-2 - len(wrt)].update(weak_type=False)


@backward_p.def_abstract_eval
def _backward_abstract(*avals: Any, wrt: tuple[int, ...], **_: Any) -> list[Any]:
    return [compat.like_varying(avals[i].update(weak_type=False), avals[-1]) for i in wrt]


# -- derivatives -----------------------------------------------------------------------------------


def _moving(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _jvp(primals: Any, tangents: Any, *, program: AttentionProgram) -> Any:
    out, rows = attention_p.bind(*primals, program=program)
    wrt = _moving(tangents)
    if not wrt:
        return (out, rows), (_zero(out), _zero(rows))
    args = compat.equally_varying(*primals, out, rows, *(tangents[i] for i in wrt))
    return (out, rows), (tangent_p.bind(*args, program=program, wrt=wrt), _zero(rows))


def _transpose(ct: Any, *args: Any, program: AttentionProgram, wrt: tuple[int, ...]) -> list[Any]:
    places = range(len(args) - len(wrt), len(args))
    asked = [i for i, place in zip(wrt, places, strict=True) if ad.is_undefined_primal(args[place])]
    cts: list[Any] = [None] * len(args)
    if isinstance(ct, ad.Zero):
        by_operand = dict.fromkeys(asked)
    else:
        operands = *args[: -len(wrt)], ct
        grads = backward(*operands, program=program, wrt=tuple(asked))
        by_operand = dict(zip(asked, grads, strict=True))
    for i, place in zip(wrt, places, strict=True):
        if i in by_operand:
            cts[place] = ad.Zero(args[place].aval) if by_operand[i] is None else by_operand[i]
    return cts


def _by_form(fun: Callable[..., Any], primitive: Any) -> Callable[..., Any]:
    """Returns the JVP rule of a primitive by XLA's form.

    The form computes `out` and `rows` again from the other operands, so that the tangents given for
    these two add nothing.
    """

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        moving = _moving(tangents)

        def of_moving(*values: Any) -> Any:
            full = list(primals)
            for i, x in zip(moving, values, strict=True):
                full[i] = x
            return fun(*full, **params)

        given = [primals[i] for i in moving], [tangents[i] for i in moving]
        if not moving:
            return out, jax.tree.map(_zero, out)
        return out, jax.jvp(of_moving, *given)[1]

    return rule


ad.primitive_jvps[attention_p] = _jvp
ad.primitive_jvps[tangent_p] = _by_form(_tangent, tangent_p)
ad.primitive_jvps[backward_p] = _by_form(_backward, backward_p)
ad.primitive_transposes[tangent_p] = _transpose


# -- vmap ------------------------------------------------------------------------------------------


def _batch(args: Any, dims: Any, *, program: AttentionProgram) -> Any:
    size = compat.batch_size(args, dims)
    in_axes = [d if compat.is_batched(d) else None for d in dims]
    return attention_p.bind(*args, program=batched(program, size, in_axes)), (0, 0)


def _batch_derivative(primitive: Any, count: Callable[[Any, Any], int]) -> Callable[..., Any]:
    """Returns the batching rule of a primitive; `count` gives the number of attention operands."""

    def rule(args: Any, dims: Any, *, program: AttentionProgram, wrt: tuple[int, ...]) -> Any:
        size = compat.batch_size(args, dims)
        own = count(args, wrt)
        all_args = compat.all_batched(args, dims)
        in_axes = [0 if compat.is_batched(d) or i in wrt else None for i, d in enumerate(dims)]
        args = [x if axis == 0 else y for x, y, axis in zip(all_args, args, in_axes, strict=True)]
        wider = batched(program, size, in_axes[:own])
        args = [*args[:own], *all_args[own:]]
        out = primitive.bind(*args, program=wider, wrt=wrt)
        return out, [0] * len(wrt) if primitive.multiple_results else 0

    return rule


batching.primitive_batchers[attention_p] = _batch
batching.primitive_batchers[tangent_p] = _batch_derivative(
    tangent_p, lambda args, wrt: len(args) - 2 - len(wrt)
)
batching.primitive_batchers[backward_p] = _batch_derivative(
    backward_p, lambda args, _: len(args) - 3
)
