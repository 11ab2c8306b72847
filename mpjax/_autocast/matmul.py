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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from mpjax import _compat
from mpjax._autocast import backends, convolutions, tpu_warning

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


@dataclass(frozen=True, eq=False, repr=False)
class Bilinear:
    """A float32 program of two arrays (and integer extras) that is linear in each.

    Batched and transposed forms are found by tracing `jax.vmap` and the transpose of the program,
    so that convolutions need no formulas here. Compared by identity: the caches below give the
    same object for the same product, which is what keeps `jit` from tracing again.
    """

    traced: Any
    low: Any  # the dtype of the products' operands
    convolved: Any = None  # the same program as a convolution, where a GPU runs that better

    def run(
        self, args: Sequence[jax.Array], out_dtype: Any, backend: backends.Backend
    ) -> jax.Array:
        """Returns the product of two arrays, rounded to `low`, as `out_dtype`."""
        a, b, *extras = args
        operands = [x.astype(self.low) for x in (a, b)]
        traced = self.convolved if backend.low_results and self.convolved else self.traced
        made = out_dtype if _only_moves(traced) else jnp.dtype(jnp.float32)
        return _eval_low(traced, [*operands, *extras], made, backend).astype(out_dtype)

    def __repr__(self) -> str:
        ops = "+".join(eqn.primitive.name for eqn in _live_equations(self.traced.jaxpr))
        return f"<{ops} in {self.low}>"


def _eval_low(jaxpr: Any, args: Sequence[Any], out_dtype: Any, backend: backends.Backend) -> Any:
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env |= dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    live = _live_equations(jaxpr.jaxpr)
    for eqn in live:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "jit":
            outs = [_eval_low(_compat.closed(eqn.params["jaxpr"]), values, out_dtype, backend)]
        elif eqn.primitive.name in PRODUCTS:
            outs = [low_product(eqn.primitive.name, eqn.params, values, out_dtype, backend)]
        else:
            if eqn.primitive.name == "pad":  # with a zero that was written in float32
                values[1] = jnp.asarray(values[1], values[0].dtype)
            bound = eqn.primitive.bind(*values, **eqn.params)
            outs = bound if eqn.primitive.multiple_results else [bound]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.jaxpr.outvars[0])


_MOVES = frozenset({"transpose", "reshape", "squeeze", "rev", "pad", "slice", "expand_dims"})


@functools.lru_cache(maxsize=4096)
def _only_moves(jaxpr: Any) -> bool:
    """Whether a program does nothing to its product that rounding it at once would change."""
    return all(
        _only_moves(_compat.closed(eqn.params["jaxpr"]))
        if eqn.primitive.name == "jit"
        else eqn.primitive.name in PRODUCTS | _MOVES
        for eqn in _live_equations(jaxpr.jaxpr)
    )


def _live_equations(jaxpr: Any) -> list[Any]:
    needed = set(map(id, jaxpr.outvars))
    live: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            needed.update(map(id, eqn.invars))
            live.append(eqn)
    return live[::-1]


def low_product(
    name: str,
    params: dict[str, Any],
    values: Sequence[Any],
    out_dtype: Any,
    backend: backends.Backend,
) -> Any:
    """Returns the product of two low operands, accumulated in float32, as `out_dtype`.

    Args:
      name: the primitive.
      params: its parameters; the dtype of the result is replaced.
      values: low operands, then integer extras.
      out_dtype: the dtype of the result.
      backend: what the product is bound for.
    """
    algorithm = isinstance(params.get("precision"), (lax.DotAlgorithm, lax.DotAlgorithmPreset))
    made = out_dtype if backend.low_results and not algorithm else jnp.dtype(jnp.float32)
    kwargs = dict(params, preferred_element_type=made)
    if name == "ragged_dot_general":
        kwargs.pop("group_offset", None)
        return backends.rounded(lax.ragged_dot_general(*values, **kwargs), out_dtype)
    x, y = values
    if name == "conv_general_dilated":
        return backends.convolved(x, y, kwargs, out_dtype, backend)
    if backend.ordered:
        x, y, kwargs["dimension_numbers"] = backends.plain_layout(x, y, kwargs["dimension_numbers"])
    if x.dtype != jnp.bfloat16:
        return backends.rounded(lax.dot_general(x, y, **kwargs), out_dtype)
    out = lax.dot_general(backend.operand(x), backend.operand(y), **kwargs)
    return backends.rounded(backend.result(out), out_dtype)


def with_precision(params: dict[str, Any], precision: Any) -> dict[str, Any]:
    """Returns a product's parameters with `precision` where they were left at the default."""
    given = params.get("precision")
    both = given if isinstance(given, tuple) else (given,)
    if any(p not in (None, lax.Precision.DEFAULT) for p in both):
        return params
    return {**params, "precision": precision}


# -- the programs: one a product, its batched forms and its transposes -----------------------


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=_compat.explicit_sharding(aval))


def _key(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def bilinear(name: str, params: dict[str, Any], values: Sequence[Any], low: Any) -> Bilinear:
    """Returns the program of one product equation."""
    return _bilinear(name, _key(params), tuple(_struct(jax.typeof(v)) for v in values), low)


@functools.lru_cache(maxsize=4096)
def _bilinear(
    name: str, params: Any, structs: tuple[jax.ShapeDtypeStruct, ...], low: Any
) -> Bilinear:
    kwargs = dict(params)
    fun: Callable[..., Any]
    if name == "ragged_dot_general":
        kwargs.pop("group_offset", None)
        fun = functools.partial(lax.ragged_dot_general, **kwargs)
    else:
        fun = functools.partial(getattr(lax, name), **kwargs)
    traced = jax.make_jaxpr(fun)(*structs)
    if name != "conv_general_dilated" or not convolutions.is_pointwise(kwargs, structs):
        return Bilinear(traced, low)
    return Bilinear(jax.make_jaxpr(convolutions.pointwise(kwargs))(*structs), low, traced)


@functools.lru_cache(maxsize=4096)
def _transposed(_mesh: Any, program: Bilinear, wrt: int) -> Bilinear:
    """The program of (cotangent, other operand) → cotangent of operand `wrt`."""
    # A kernel's gradient leaves a product in float32; an image's a convolution, which also adds.
    convolved = program.convolved if wrt == 0 else None
    return Bilinear(
        _untransposed(_pullback(program.traced, wrt)),
        program.low,
        convolved and _pullback(convolved, wrt),
    )


def _pullback(program: Any, wrt: int) -> Any:
    eval_jaxpr = jaxpr_as_fun(program)
    structs = [_struct(v.aval) for v in program.jaxpr.invars]
    out = _struct(program.jaxpr.outvars[0].aval)
    mine, other, extras = structs[wrt], structs[1 - wrt], structs[2:]

    def pullback(ct: jax.Array, fixed: jax.Array, *rest: jax.Array) -> jax.Array:
        def partial(x: jax.Array) -> jax.Array:
            pair = (x, fixed) if wrt == 0 else (fixed, x)
            return eval_jaxpr(*pair, *rest)[0]

        # `jax.linear_transpose` asserts inside a `shard_map` that tracks varying axes.
        zeros = jnp.zeros(mine.shape, mine.dtype, out_sharding=mine.sharding)
        return jax.vjp(partial, zeros)[1](ct)[0]

    return jax.make_jaxpr(pullback)(out, other, *extras)


def _untransposed(program: Any) -> Any:
    """Returns the program whose product has the order of dimensions that a transpose gave it.

    JAX writes a weight gradient as `(ctᵀ x)ᵀ`, and XLA:CPU stores both.
    """
    live = _live_equations(program.jaxpr)
    if [eqn.primitive.name for eqn in live] != ["dot_general", "transpose"]:
        return program
    product, transpose = live
    x, y = product.invars
    kwargs = dict(product.params)
    (contract_x, contract_y), (batch_x, batch_y) = kwargs["dimension_numbers"]
    batch, ndim = len(batch_x), product.outvars[0].aval.ndim
    second = x.aval.ndim - len(contract_x)  # where the free dimensions of `y` begin
    swapped = (*range(batch), *range(second, ndim), *range(batch, second))
    if transpose.params["permutation"] != swapped or kwargs.get("out_sharding") is not None:
        return program
    kwargs["dimension_numbers"] = ((contract_y, contract_x), (batch_y, batch_x))

    def in_order(*args: jax.Array) -> jax.Array:
        env = dict(zip(program.jaxpr.invars, args, strict=True))
        return lax.dot_general(env[y], env[x], **kwargs)

    return jax.make_jaxpr(in_order)(*(_struct(v.aval) for v in program.jaxpr.invars))


@functools.lru_cache(maxsize=4096)
def _batched(_mesh: Any, program: Bilinear, size: int, in_axes: tuple[int | None, ...]) -> Bilinear:
    fun = jax.vmap(jaxpr_as_fun(program.traced), in_axes=in_axes, axis_size=size)

    def widen(struct: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        if axis is None:
            return struct
        shape = (*struct.shape[:axis], size, *struct.shape[axis:])
        return jax.ShapeDtypeStruct(shape, struct.dtype)

    structs = [_struct(v.aval) for v in program.traced.jaxpr.invars]
    args = [widen(s, axis) for s, axis in zip(structs, in_axes, strict=True)]
    return Bilinear(jax.make_jaxpr(lambda *xs: fun(*xs)[0])(*args), program.low)


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
            _transposed(jax.sharding.get_abstract_mesh(), program, wrt),
            mine.aval.dtype,
            ct,
            other,
            *extras,
        )
    cts: list[Any] = [None] * (2 + len(extras))
    cts[wrt] = found
    return cts


def _product_batch(args: Any, dims: Any, *, program: Bilinear, out_dtype: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if _compat.is_batched(d))
    in_axes = tuple(d if _compat.is_batched(d) else None for d in dims)
    wider = _batched(jax.sharding.get_abstract_mesh(), program, size, in_axes)
    return product_p.bind(*args, program=wider, out_dtype=out_dtype), 0


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
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if _compat.is_batched(d))
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
    wider = _batched(jax.sharding.get_abstract_mesh(), program, size, (axes[0], axes[2], *axes[4:]))
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
        cts[1] = _product(_transposed(mesh, program, 0), x.aval.dtype, ct, y_low, *extras)
    if ad.is_undefined_primal(y):
        cts[3] = _product(_transposed(mesh, program, 1), y.aval.dtype, ct, x_low, *extras)
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
    low: Any,
    out_dtype: Any,
) -> jax.Array:
    """Returns one product of low operands, accumulated in float32, differentiable at any order.

    Args:
      name: the primitive: one of `PRODUCTS`.
      params: its parameters.
      x, y: each a carrier, which receives the gradient in its own dtype, and its low copy.
      extras: integer operands.
      low: the dtype of the operands.
      out_dtype: the dtype of the result: `low`, or float32 where nothing low reads it.
    """
    return _product_of(name, _key(params), low, out_dtype)(*x, *y, *extras)


@functools.lru_cache(maxsize=4096)
def _product_of(name: str, params: Any, low: Any, out_dtype: Any) -> Callable[..., jax.Array]:
    """Returns the product as one function, which JAX traces and differentiates once a shape."""

    def linked_product(x: Any, x_low: Any, y: Any, y_low: Any, *extras: Any) -> jax.Array:
        values = [hidden_p.bind(x_low), hidden_p.bind(y_low), *extras]
        program = bilinear(name, dict(params), [x_low, y_low, *extras], low)
        out = low_product(name, dict(params), values, out_dtype, backends.TRACED)
        carriers = _compat.equally_varying(x, x_low, y, y_low)
        return linked_p.bind(out, *carriers, *extras, program=program)

    return _compat.inlined(linked_product)
