"""A product on low operands whose derivative is such products again.

The forward product is a plain `dot_general`, visible to checkpoint policies and to sharding. What
JAX would derive from it multiplies a float32 cotangent by a low operand (slow), and rounds the
gradient of a weight to the low dtype. So its operands are hidden from differentiation, and the
result passes through `linked`, an identity whose tangents are products of our own. They take the
float32 *carrier* of each operand for its tangent and the low copy for its value: a weight is cast
once, and its gradient leaves a float32 accumulator unrounded (but for `backends.convolved`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax import _compat
from mpjax._autocast import backends, tpu_warning
from mpjax._autocast.product import bilinear
from mpjax._autocast.product.bilinear import Bilinear
from mpjax._autocast.product.config import Config
from mpjax._autocast.product.recorded import recorded


def with_precision(params: dict[str, Any], precision: Any) -> dict[str, Any]:
    """Returns a product's parameters with `precision` where they were left at the default."""
    given = params.get("precision")
    both = given if isinstance(given, tuple) else (given,)
    if any(p not in (None, lax.Precision.DEFAULT) for p in both):
        return params
    return {**params, "precision": precision}


# -- `product_p`: what tangents and cotangents are multiplied by -------------------------------

product_p = Primitive("low_product")


def _product(program: Bilinear, out_dtype: Any, a: Any, b: Any, *extras: Any) -> Any:
    a, b = _compat.equally_varying(a, b)
    return product_p.bind(a, b, *extras, program=program, out_dtype=jnp.dtype(out_dtype))


@functools.lru_cache(maxsize=4096)
def _compiled(program: Bilinear, out_dtype: Any) -> Callable[..., Any]:
    return jax.jit(lambda *args: product_p.bind(*args, program=program, out_dtype=out_dtype))


@product_p.def_impl
def _product_impl(*args: Any, program: Bilinear, out_dtype: Any) -> Any:
    if jax.config.jax_disable_jit:  # `_compiled` would only come back here
        return program.run(args, out_dtype, backends.TRACED)
    return _compiled(program, out_dtype)(*args)


@product_p.def_abstract_eval
def _product_abstract(a: Any, b: Any, *extras: Any, program: Bilinear, out_dtype: Any) -> Any:
    out = program.traced.jaxpr.outvars[0].aval
    return _compat.like_varying(out.update(dtype=out_dtype, weak_type=False), a)


def _lowering(backend: Callable[[], backends.Backend]) -> Any:
    def run(*args: Any, program: Bilinear, out_dtype: Any) -> Any:
        return program.run(args, out_dtype, backend())

    return mlir.lower_fun(run, multiple_results=False)


mlir.register_lowering(product_p, _lowering(lambda: backends.OTHER))
mlir.register_lowering(product_p, _lowering(backends.cpu), platform="cpu")
mlir.register_lowering(product_p, _lowering(lambda: backends.TPU), platform="tpu")
for _platform in backends.GPUS:
    mlir.register_lowering(product_p, _lowering(lambda: backends.GPU), platform=_platform)


def _product_jvp(primals: Any, tangents: Any, *, program: Bilinear, out_dtype: Any) -> Any:
    out = product_p.bind(*primals, program=program, out_dtype=out_dtype)
    return out, _tangent(program, out, *primals[:2], *tangents[:2], *primals[2:])


def _tangent(program: Bilinear, out: Any, a: Any, b: Any, ta: Any, tb: Any, *extras: Any) -> Any:
    zeros = [isinstance(t, ad.Zero) for t in (ta, tb)]
    if all(zeros):
        return ad.Zero(jax.typeof(out).to_tangent_aval())
    parts = []
    if not zeros[0]:
        parts.append(_product(program, out.dtype, ta, b, *extras))
    if not zeros[1]:
        parts.append(_product(program, out.dtype, a, tb, *extras))
    return functools.reduce(jnp.add, parts)


def _product_transpose(
    ct: Any, a: Any, b: Any, *extras: Any, program: Bilinear, out_dtype: Any
) -> list[Any]:
    wrt = 0 if ad.is_undefined_primal(a) else 1
    mine, other = (a, b) if wrt == 0 else (b, a)
    if isinstance(ct, ad.Zero):
        found: Any = ad.Zero(mine.aval)
    else:
        found = _product(
            bilinear.transposed(jax.sharding.get_abstract_mesh(), program, wrt),
            mine.aval.dtype,
            ct,
            other,
            *extras,
        )
    cts: list[Any] = [None] * (2 + len(extras))
    cts[wrt] = found
    return cts


def _product_batch(args: Any, dims: Any, *, program: Bilinear, out_dtype: Any) -> Any:
    if program.config.is_delayed:
        args, dims = _sharing_amaxes(args, dims)
    size = _compat.batch_size(args, dims)
    in_axes = tuple(d if _compat.is_batched(d) else None for d in dims)
    wider = bilinear.batched(jax.sharding.get_abstract_mesh(), program, size, in_axes)
    return product_p.bind(*args, program=wider, out_dtype=out_dtype), 0


def _sharing_amaxes(args: Any, dims: Any) -> Any:
    """Returns operands of which those that are mapped over share scales: those of the largest."""
    *rest, amaxes = args
    *places, place = dims
    if _compat.is_batched(place):
        amaxes, place = jnp.max(amaxes, axis=place), None
    return (*rest, amaxes), (*places, place)


ad.primitive_jvps[product_p] = _product_jvp
ad.primitive_transposes[product_p] = _product_transpose
batching.primitive_batchers[product_p] = _product_batch


# -- `hidden_p`: an operand of the forward product, which nothing is derived from ---------------

# `stop_gradient` has no transpose: a product of tangents inside a custom rule needs one.
hidden_p = Primitive("hidden_operand")
hidden_p.def_impl(lambda x: x)
hidden_p.def_abstract_eval(lambda x: x.update(weak_type=False))
mlir.register_lowering(hidden_p, tpu_warning.lower_operand)
batching.primitive_batchers[hidden_p] = lambda args, dims: (hidden_p.bind(*args), dims[0])


def _hidden_jvp(primals: Any, tangents: Any) -> Any:
    out = hidden_p.bind(*primals)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


ad.primitive_jvps[hidden_p] = _hidden_jvp
ad.primitive_transposes[hidden_p] = lambda ct, x: [ad.Zero(x.aval)]


def hidden(x: jax.Array) -> jax.Array:
    """Returns a value that nothing is derived from."""
    return hidden_p.bind(x)


# -- `linked_p`: the result of the forward product, with the derivative above ------------------

linked_p = Primitive("linked_product")
linked_p.def_impl(lambda out, *_, program: out)
mlir.register_lowering(linked_p, lambda ctx, out, *_, program: [out])


@linked_p.def_abstract_eval
def _linked_abstract(out: Any, *_: Any, program: Bilinear) -> Any:
    return out.update(weak_type=False)


def _linked_jvp(primals: Any, tangents: Any, *, program: Bilinear) -> Any:
    _, _, x_low, _, y_low, *extras = primals
    out = linked_p.bind(*primals, program=program)
    # The low copies are read at this level, so that their own tangents give second derivatives.
    return out, _tangent(program, out, x_low, y_low, tangents[1], tangents[3], *extras)


def _linked_batch(args: Any, dims: Any, *, program: Bilinear) -> Any:
    size = _compat.batch_size(args, dims)
    if program.config.is_delayed:
        args, dims = _sharing_amaxes(args, dims)
    out, *rest = (
        jnp.moveaxis(x, d, 0) if _compat.is_batched(d) else x
        for x, d in zip(args, dims, strict=True)
    )
    batched = [_compat.is_batched(d) for d in dims[1:]]
    if not _compat.is_batched(dims[0]):
        out = jnp.broadcast_to(out, (size, *out.shape))
    for pair in ((0, 1), (2, 3)):  # a carrier and its low copy are batched together
        if batched[pair[0]] != batched[pair[1]]:
            for i in pair:
                rest[i] = (
                    rest[i] if batched[i] else jnp.broadcast_to(rest[i], (size, *rest[i].shape))
                )
                batched[i] = True
    axes = [0 if b else None for b in batched]
    wider = bilinear.batched(
        jax.sharding.get_abstract_mesh(), program, size, (axes[0], axes[2], *axes[4:])
    )
    return linked_p.bind(out, *rest, program=wider), 0


def _linked_transpose(
    ct: Any, out: Any, x: Any, x_low: Any, y: Any, y_low: Any, *extras: Any, program: Bilinear
) -> list[Any]:
    """Where a rule multiplies a tangent, the product itself is what is transposed."""
    args = (out, x, x_low, y, y_low, *extras)
    cts: list[Any] = [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in args]
    if isinstance(ct, ad.Zero):
        return cts
    mesh = jax.sharding.get_abstract_mesh()
    if ad.is_undefined_primal(x):
        cts[1] = _product(bilinear.transposed(mesh, program, 0), x.aval.dtype, ct, y_low, *extras)
    if ad.is_undefined_primal(y):
        cts[3] = _product(bilinear.transposed(mesh, program, 1), y.aval.dtype, ct, x_low, *extras)
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
) -> jax.Array:
    """Returns one product of low operands, differentiable at any order.

    Args:
      name: the primitive: one of `PRODUCTS`.
      params: its parameters.
      x, y: each a carrier, which receives the gradient in its own dtype, and its low copy (any
        copy that is to be read, where the product is quantised).
      extras: integer operands.
      how: what it and the products of its derivative read.
      out_dtype: the dtype of the result: low, or float32 where nothing low reads it.
      amaxes: f32[3], the largest values of earlier steps, where `how` records them; those of this
        one are its cotangent.
      stored: for each operand its 8-bit values and their scales, where it is kept as these.
    """
    recorded = () if amaxes is None else (amaxes,)
    product = _product_of(name, bilinear.hashable(params), how, out_dtype)
    return product(tuple(stored), *x, *y, *extras, *recorded)


@functools.lru_cache(maxsize=4096)
def _product_of(name: str, params: Any, how: Config, out_dtype: Any) -> Callable[..., jax.Array]:
    """Returns the product as one function, which JAX traces and differentiates once a shape."""

    def linked_product(
        stored: Any, x: Any, x_low: Any, y: Any, y_low: Any, *extras: Any
    ) -> jax.Array:
        amaxes = extras[-1] if how.records else None
        if amaxes is not None:
            extras = (*extras[:-1], hidden(amaxes)) if how.is_delayed else extras[:-1]
        values = [hidden(x_low), hidden(y_low), *extras]
        program = bilinear.of(name, dict(params), [x_low, y_low, *extras], how)
        if how.is_scaled:
            out = program.run(values, out_dtype, backends.TRACED, stored)
        else:
            out = bilinear.low_product(
                name, dict(params), values, out_dtype=out_dtype, backend=backends.TRACED
            )
        carriers = _compat.equally_varying(x, x_low, y, y_low)
        out = linked_p.bind(out, *carriers, *extras, program=program)
        return out if amaxes is None else recorded(out, amaxes, values[:2], how.roles)

    return _compat.inlined(linked_product)
