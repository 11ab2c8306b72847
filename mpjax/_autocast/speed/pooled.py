"""Max and min pooling with a derivative that a GPU computes without a scatter.

XLA:GPU expands JAX's derivative into a reduction that also gives the winner and its index in each
dimension, each in 32 bits, and a scatter of atomic additions. Here the winner of a window is one
byte, which the kernel of the forward pass writes beside the result. The kernels that read the
image's cotangent compute it element by element. On other platforms, and in forward mode, this is
JAX's own derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax._autocast.speed import windows
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._base.own_primitives import GPUS, own_primitive
from mpjax._jaxpr import binding
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.identity import lower_on

_SELECTS = {"reduce_window_max": lax.ge_p, "reduce_window_min": lax.le_p}
_WINDOW = ("window_dimensions", "window_strides", "padding")


@hint("pooled", binding.moved)
def bind(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation; those of a pooling have the derivative of this file."""
    if eqn.primitive.name not in _SELECTS:
        return binding.moved(eqn, values)
    (image,), params = values, eqn.params
    window = {key: params[key] for key in _WINDOW}
    # JAX has no backward pass for dilated windows.
    is_dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    if is_dilated or not windows.Windows(**window).is_supported(image.shape):
        return binding.bind(eqn, values)
    return [_pool(eqn, window | {"select_prim": _SELECTS[eqn.primitive.name]})(image)]


def _pool(eqn: Eqn, window: dict[str, Any]) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_jvp
    def pool(image: jax.Array) -> jax.Array:
        return binding.bind(eqn, [image])[0]

    @pool.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return pool(*primals), _tangent_p.bind(*tangents, *primals, **window)

    return pool


# -- JAX's own derivative, as two primitives: each is the transpose of the other -------------------

_tangent_p = own_primitive("pooled_tangent", computes=True)
_cotangent_p = own_primitive("pooled_cotangent", computes=True)


def _tangent(t: jax.Array, image: jax.Array, **window: Any) -> jax.Array:
    ones = (1,) * image.ndim
    window |= {"base_dilation": ones, "window_dilation": ones}
    return lax.select_and_gather_add_p.bind(t, image, **window)


def _cotangent(ct: jax.Array, image: jax.Array, **window: Any) -> jax.Array:
    return lax.select_and_scatter_add_p.bind(ct, image, **window)


@_tangent_p.def_abstract_eval
def _(t: Any, image: Any, *, select_prim: Any, **window: Any) -> Any:
    del select_prim
    shape = lax.reduce_window_shape_tuple(image.shape, *(window[key] for key in _WINDOW))
    return image.update(shape=shape, dtype=t.dtype, weak_type=False)


@_cotangent_p.def_abstract_eval
def _(ct: Any, image: Any, **_: Any) -> Any:
    return image.update(dtype=ct.dtype, weak_type=False)


def _batched(primitive: Primitive, args: Any, dims: Any, **window: Any) -> Any:
    window |= {key: (1, *window[key]) for key in _WINDOW[:2]}
    window["padding"] = ((0, 0), *window["padding"])
    return primitive.bind(*compat.all_batched(args, dims), **window), 0


def _transposed(other: Primitive, ct: Any, t: Any, image: Any, **window: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(t.aval), None]
    return [other.bind(ct, image, **window), None]


def _moved(primitive: Primitive, t: Any, _: Any, image: Any, **window: Any) -> Any:
    return primitive.bind(t, image, **window)


for _primitive, _fun, _other in (
    (_tangent_p, _tangent, _cotangent_p),
    (_cotangent_p, _cotangent, _tangent_p),
):
    _primitive.def_impl(_fun)
    mlir.register_lowering(_primitive, mlir.lower_fun(_fun, multiple_results=False))
    batching.primitive_batchers[_primitive] = functools.partial(_batched, _primitive)
    ad.primitive_transposes[_primitive] = functools.partial(_transposed, _other)
    ad.defjvp(_primitive, functools.partial(_moved, _primitive), None)


lower_on(_cotangent_p, dict.fromkeys(GPUS, windows.cotangent))
