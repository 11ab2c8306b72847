"""A product on low operands; its derivative is two such products.

The forward product is a plain `dot_general`, visible to checkpoint policies and to sharding. JAX's
own derivative of it would multiply a float32 cotangent by a low operand (slow), and round the
gradient of a weight to the low dtype. So its operands are hidden from differentiation, and the
result passes through `linked`, an identity whose tangents are products of our own. These read the
tangent of each operand's float32 *carrier*, and the value of its low copy: a weight is cast once,
and its gradient leaves a float32 accumulator unrounded (but for `backends.convolved`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.product import backends, bilinear, operands, tpu_warning
from mpjax._autocast.product.bilinear import Bilinear
from mpjax._autocast.product.config import Config
from mpjax._autocast.product.operands import Kept, Operand
from mpjax._autocast.product.recorded import recorded
from mpjax._autocast.speed import smaller_first
from mpjax._base import compat
from mpjax._base.own_primitives import own_primitive, runs_operations_one_by_one
from mpjax._jaxpr import sizes
from mpjax._jaxpr.identity import batched


def with_precision(params: dict[str, Any], precision: Any) -> dict[str, Any]:
    """Returns a product's parameters with `precision` where they were left at the default."""
    given = params.get("precision")
    both = given if isinstance(given, tuple) else (given,)
    if any(p not in (None, lax.Precision.DEFAULT) for p in both):
        return params
    return {**params, "precision": precision}


# -- `product_p`: the products of tangents and cotangents ----------------------------------------

product_p = own_primitive("low_product", computes=True)


def _product(program: Bilinear, out_dtype: Any, a: Operand, b: Operand, *extras: Any) -> Any:
    arrays = compat.equally_varying(a.array, b.array)
    args, kept = operands.joined((*arrays, *extras), (a.stored, b.stored))
    return product_p.bind(*args, program=program, out_dtype=jnp.dtype(out_dtype), kept=kept)


@functools.lru_cache(maxsize=4096)
def _compiled(**params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(product_p.bind, **params))


def _run(
    *args: Any, program: Bilinear, out_dtype: Any, kept: Kept, backend: backends.Backend
) -> Any:
    arrays, stored = operands.parted(args, kept)
    return program.run(arrays, out_dtype, backend, stored)


@product_p.def_impl
def _product_impl(*args: Any, **params: Any) -> Any:
    if runs_operations_one_by_one():
        return _run(*args, backend=backends.TRACED, **params)
    return _compiled(**params)(*args)


@product_p.def_abstract_eval
def _product_abstract(a: Any, *_: Any, program: Bilinear, out_dtype: Any, kept: Kept) -> Any:
    del kept
    out = program.traced.jaxpr.outvars[0].aval
    return compat.like_varying(out.update(dtype=out_dtype, weak_type=False), a)


def _lowering(backend: Callable[[], backends.Backend]) -> Any:
    def run(*args: Any, **params: Any) -> Any:
        return _run(*args, backend=backend(), **params)

    lowered = mlir.lower_fun(run, multiple_results=False)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        if not all(isinstance(n, int) for aval in ctx.avals_in for n in aval.shape):
            return lowered(ctx, *args, **params)  # of an exported program with open lengths
        program = _traced(ctx.jaxpr_eqn_ctx, tuple(ctx.avals_in), backend(), **params)
        return compat.lower_program(ctx, program, *args)

    return lower


@functools.lru_cache(maxsize=4096)
def _traced(_where: Any, avals: Any, backend: backends.Backend, **params: Any) -> Any:
    """Returns a product on a backend as a program, traced once for equal products.

    The first argument is part of the key alone: operations are marked with the context in which
    they are traced (a mesh, `compute_on`, metadata).
    """
    return bilinear.program_of(functools.partial(_run, backend=backend, **params), *avals)


_RULES: dict[str, Any] = {
    "cpu": _lowering(backends.cpu),
    "tpu": _lowering(lambda: backends.TPU),
    **dict.fromkeys(backends.GPUS, _lowering(lambda: backends.GPU)),
}

# One rule for all platforms: in a program exported for several, JAX 0.12 fails on a primitive with
# several rules that are not cacheable. There the product is lowered as this primitive.
_exported_p = own_primitive("exported_product")
_exported_p.def_abstract_eval(_product_abstract)
mlir.register_lowering(_exported_p, _lowering(lambda: backends.OTHER))
for _platform, _rule in _RULES.items():
    mlir.register_lowering(_exported_p, _rule, platform=_platform)
_lower_exported = mlir.lower_fun(_exported_p.bind, multiple_results=False)


def _lower_product(ctx: Any, *args: Any, program: Bilinear, **params: Any) -> Any:
    platforms = ctx.module_context.platforms
    rule = _RULES.get(platforms[0]) if len(platforms) == 1 else None
    if platforms[0] in backends.GPUS and rule is not None and program.may_meet_a_weight:
        shapes = [aval.shape for aval in (*ctx.avals_in[:2], *ctx.avals_out)]
        ct, other, *rest = args
        args = ct, smaller_first(ct, other, shapes), *rest
    return (rule or _lower_exported)(ctx, *args, program=program, **params)


# Not cacheable: JAX would lower it as a function of its own, where `smaller_first` could not see
# the other uses of the cotangent.
mlir.register_lowering(product_p, _lower_product, cacheable=False)


def _product_jvp(primals: Any, tangents: Any, *, program: Bilinear, **params: Any) -> Any:
    out = product_p.bind(*primals, program=program, **params)
    (a, b, *extras), stored = operands.parted(primals, params["kept"])
    pair = Operand(a, stored[0]), Operand(b, stored[1])
    return out, _tangent(program, out, pair, tangents[:2], extras)


def _tangent(
    program: Bilinear, out: Any, pair: tuple[Operand, Operand], tangents: Any, extras: Any
) -> Any:
    parts = []
    # JAX transposes in reverse: the gradient of the smaller operand, mostly a weight, comes first.
    for i in sorted((0, 1), key=lambda i: -sizes.size(pair[i].array.shape)):
        tangent = tangents[i]
        if not isinstance(tangent, ad.Zero):
            moved = [Operand(tangent), pair[1]] if i == 0 else [pair[0], Operand(tangent)]
            parts.append(_product(program, out.dtype, *moved, *extras))
    if not parts:
        return ad.Zero(jax.typeof(out).to_tangent_aval())
    return functools.reduce(jnp.add, parts)


def _cotangent(program: Bilinear, wrt: int, mine: Any, ct: Any, other: Operand, extras: Any) -> Any:
    """Returns the cotangent of operand `wrt`, in the dtype of `mine`, from that of the result."""
    turned = bilinear.transposed(jax.sharding.get_abstract_mesh(), program, wrt)
    return _product(turned, mine.aval.dtype, Operand(ct), other, *extras)


def _product_transpose(ct: Any, *args: Any, program: Bilinear, kept: Kept, **_: Any) -> list[Any]:
    (a, b, *extras), stored = operands.parted(args, kept)
    wrt = 0 if ad.is_undefined_primal(a) else 1
    mine, other = (a, b) if wrt == 0 else (b, a)
    cts: list[Any] = [None] * len(args)
    if isinstance(ct, ad.Zero):
        cts[wrt] = ad.Zero(mine.aval)
    else:
        cts[wrt] = _cotangent(program, wrt, mine, ct, Operand(other, stored[1 - wrt]), extras)
    return cts


def _product_batch(args: Any, dims: Any, *, program: Bilinear, kept: Kept, **params: Any) -> Any:
    args, dims = _sharing_amaxes(program, args, dims, kept)
    for i, behind in enumerate(operands.places(len(args), kept)):
        if behind:
            args, dims = operands.batched_together(args, dims, (i,), behind)
    size = compat.batch_size(args, dims)
    wider = _batched(program, size, operands.parted(dims, kept)[0])
    return product_p.bind(*args, program=wider, kept=kept, **params), 0


def _batched(program: Bilinear, size: int, dims: Sequence[Any]) -> Bilinear:
    in_axes = tuple(d if compat.is_batched(d) else None for d in dims)
    return bilinear.batched(jax.sharding.get_abstract_mesh(), program, size, in_axes)


def _sharing_amaxes(program: Bilinear, args: Any, dims: Any, kept: Kept) -> Any:
    """Returns operands whose examples share scales: each maximum is the largest of all examples."""
    place = len(args) - 2 * sum(kept) - 1
    if not program.config.is_delayed or not compat.is_batched(dims[place]):
        return args, dims
    args, dims = list(args), list(dims)
    args[place], dims[place] = jnp.max(args[place], axis=dims[place]), None
    return args, dims


ad.primitive_jvps[product_p] = _product_jvp
ad.primitive_transposes[product_p] = _product_transpose
batching.primitive_batchers[product_p] = _product_batch


# -- `hidden_p`: an operand of the forward product, without a derivative --------------------------

# `stop_gradient` has no transpose: a product of tangents inside a custom rule needs one.
hidden_p = own_primitive("hidden_operand")
hidden_p.def_impl(lambda x, **_: x)
hidden_p.def_abstract_eval(lambda x, **_: x.update(weak_type=False))


def _lower_hidden(ctx: Any, x: Any, *, settles: bool) -> Any:
    del settles
    return tpu_warning.lower_operand(ctx, x)


def _lower_hidden_on_cpu(ctx: Any, x: Any, *, settles: bool) -> Any:
    return backends.lower_operand(ctx, x) if settles else [x]


mlir.register_lowering(hidden_p, _lower_hidden)
mlir.register_lowering(hidden_p, _lower_hidden_on_cpu, platform="cpu")
batching.primitive_batchers[hidden_p] = functools.partial(batched, hidden_p)


def _hidden_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = hidden_p.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


ad.primitive_jvps[hidden_p] = _hidden_jvp
ad.primitive_transposes[hidden_p] = lambda ct, x, **_: [ad.Zero(x.aval)]


def hidden(x: jax.Array, *, settles: bool = False) -> jax.Array:
    """Returns a value whose derivative is zero.

    Args:
      x: the value.
      settles: whether XLA:CPU stores it in the order of its dimensions, as its fast kernels read.
    """
    return hidden_p.bind(x, settles=settles)


# -- `linked_p`: the result of the forward product, with the derivative above ------------------

linked_p = own_primitive("linked_product")
linked_p.def_impl(lambda out, *_, dtype, **__: lax.convert_element_type(out, dtype))


@linked_p.def_abstract_eval
def _linked_abstract(out: Any, *_: Any, dtype: Any, **__: Any) -> Any:
    return out.update(dtype=dtype, weak_type=False)


def _lower_linked(ctx: Any, out: Any, *_: Any, dtype: Any, settles: bool | None, **__: Any) -> Any:
    if settles is None:
        return [out]
    return backends.lower_result(ctx, out, dtype=dtype, settles=settles)


# Not cacheable: JAX would lower it as a function of its own, where there is no product to repeat.
mlir.register_lowering(linked_p, _lower_linked, cacheable=False)


def _linked_jvp(
    primals: Any, tangents: Any, *, program: Bilinear, kept: Kept, **params: Any
) -> Any:
    out = linked_p.bind(*primals, program=program, kept=kept, **params)
    (_, _, x_low, _, y_low, *extras), stored = operands.parted(primals, kept)
    # The low copies are arguments of this rule, so that their tangents give second derivatives.
    pair = Operand(x_low, stored[0]), Operand(y_low, stored[1])
    return out, _tangent(program, out, pair, (tangents[1], tangents[3]), extras)


def _linked_batch(args: Any, dims: Any, *, program: Bilinear, kept: Kept, **params: Any) -> Any:
    args, dims = _sharing_amaxes(program, args, dims, kept)
    behind = operands.places(len(args), kept)
    size = compat.batch_size(args, dims)
    args, dims = operands.batched_together(args, dims, (1, 2), behind[0])
    args, dims = operands.batched_together(args, dims, (3, 4), behind[1])
    for i, (x, d) in enumerate(zip(args, dims, strict=True)):
        args[i] = jnp.moveaxis(x, d, 0) if compat.is_batched(d) else x
    if not compat.is_batched(dims[0]):
        args[0] = jnp.broadcast_to(args[0], (size, *args[0].shape))
    axes = [0 if compat.is_batched(d) else None for d in operands.parted(dims, kept)[0]]
    wider = _batched(program, size, (axes[1], axes[3], *axes[5:]))
    return linked_p.bind(*args, program=wider, kept=kept, **params), 0


def _linked_transpose(ct: Any, *args: Any, program: Bilinear, kept: Kept, **_: Any) -> list[Any]:
    """Returns the cotangents of a product of a tangent, which a user's rule multiplied."""
    cts: list[Any] = [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in args]
    if isinstance(ct, ad.Zero):
        return cts
    (_, x, x_low, y, y_low, *extras), stored = operands.parted(args, kept)
    if ad.is_undefined_primal(x):
        cts[1] = _cotangent(program, 0, x, ct, Operand(y_low, stored[1]), extras)
    if ad.is_undefined_primal(y):
        cts[3] = _cotangent(program, 1, y, ct, Operand(x_low, stored[0]), extras)
    return cts


ad.primitive_jvps[linked_p] = _linked_jvp
ad.primitive_transposes[linked_p] = _linked_transpose
batching.primitive_batchers[linked_p] = _linked_batch


def product(
    name: str,
    params: dict[str, Any],
    x: tuple[jax.Array, jax.Array],
    y: tuple[jax.Array, jax.Array],
    extras: Sequence[jax.Array],
    *,
    how: Config,
    out_dtype: Any,
    amaxes: jax.Array | None = None,
    stored: Sequence[Any] = (None, None),
    wide: bool = False,
) -> jax.Array:
    """Returns one product of low operands, differentiable at any order.

    Args:
      name: the primitive: one of `PRODUCTS`.
      params: its parameters.
      x, y: each a carrier, which receives the gradient in its own dtype, and its low copy (for a
        quantised product, the copy that is quantised).
      extras: integer operands.
      how: the dtypes of the product and of the products of its derivative.
      out_dtype: the dtype of the result: low, or float32 where nothing low reads it.
      amaxes: f32[3], the maxima of earlier steps, if `how` records them; their cotangent is the
        maxima of this product.
      stored: for each operand its 8-bit values and their scales, if a weight is stored as these.
      wide: whether the product itself has a float32 result in the jaxpr, and is rounded after it:
        a checkpoint's policy then saves the rounded result by its name.
    """
    recorded = () if amaxes is None else (amaxes,)
    product = _product_of(name, bilinear.params_key(params), how, jnp.dtype(out_dtype), wide)
    return product(tuple(stored), *x, *y, *extras, *recorded)


@functools.lru_cache(maxsize=4096)
def _product_of(
    name: str, params: Any, how: Config, out_dtype: Any, wide: bool
) -> Callable[..., jax.Array]:
    """Returns a product as a function that JAX traces and differentiates once for each shape."""

    def linked_product(
        stored: Any, x: Any, x_low: Any, y: Any, y_low: Any, *extras: Any
    ) -> jax.Array:
        amaxes = extras[-1] if how.records else None
        if amaxes is not None:
            extras = (*extras[:-1], hidden(amaxes)) if how.is_delayed else extras[:-1]
        settles = name == "dot_general" and x_low.dtype == jnp.bfloat16 and not how.is_scaled
        program = bilinear.of(name, dict(params), [x_low, y_low, *extras], how)
        kept: Any = (None, None)
        if how.is_scaled:
            values = [hidden(x_low), hidden(y_low), *extras]
            kept = program.kept(values, stored)
            out = program.run(values, out_dtype, backends.TRACED, kept)
        else:
            values = [x_low, y_low, *extras]
            backend = replace(
                backends.WRITTEN_WIDE if wide else backends.WRITTEN,
                hides=functools.partial(hidden, settles=settles),
            )
            out = bilinear.low_product(name, dict(params), values, out_dtype, backend)
        carriers = compat.equally_varying(x, x_low, y, y_low)
        args, behind = operands.joined((out, *carriers, *extras), kept)
        how_lowered = None if how.is_scaled else settles
        out = linked_p.bind(
            *args, program=program, kept=behind, dtype=out_dtype, settles=how_lowered
        )
        if amaxes is None:
            return out
        seen = [how.read(x, role) for x, role in zip(values, how.roles[:2], strict=False)]
        return recorded(out, amaxes, seen, how.roles)

    return compat.inlined(linked_product)
