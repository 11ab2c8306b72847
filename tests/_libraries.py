"""The public layers of Flax linen, Flax NNX and Equinox, each as a function of arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import _equinox_layers
import _linen_layers
import _nnx_layers
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _differential import Named, named
from flax import nnx


def drawn(path: Any, leaf: Any) -> Any:
    """A value for a variable of which only the shape is known: nothing is compiled for it."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    name = jax.tree_util.keystr(path)
    values = 0.5 * np.random.default_rng(len(name)).normal(size=leaf.shape)
    positive = any(word in name for word in ("var", "scale", "sigma"))
    return jnp.asarray(np.abs(values) + 0.5 if positive else values, leaf.dtype)


def of_linen(name: str) -> Named:
    """Returns a layer as a function of its variables and inputs, giving its state too."""
    layer, args = _linen_layers.LAYERS[name]
    made: list[Any] = []  # the function; the variables are traced

    def initial() -> Any:
        fun, variables = _linen_layers.applied(layer, args)
        made.append(fun)
        return variables

    variables = jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(initial))
    return named(f"nn.{name}", made[0], variables, *args)


def of_nnx(name: str) -> Named:
    layer, args = _nnx_layers.LAYERS[name]()
    graph, state = nnx.split(layer)

    def fun(state: Any, *args: Any) -> Any:
        copy = nnx.merge(graph, state)
        return copy(*args), nnx.state(copy)

    return named(f"nnx.{name}", fun, state, *args)


def of_equinox(name: str) -> Named:
    layer, args = _equinox_layers.LAYERS[name]()
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)
    fun = lambda arrays, *args: eqx.combine(arrays, static)(*args)  # noqa: E731 - one expression
    return named(f"eqx.nn.{name}", fun, arrays, *args)


@dataclasses.dataclass(frozen=True)
class Library:
    """Where a library's layers are, what all are made of, and each as a function of arrays."""

    module: Any
    base: type
    layers: Mapping[str, Any]
    others: Mapping[str, str]  # modules that are no layers, and why
    program: Callable[[str], Named]


LIBRARIES = {
    "linen": Library(nn, nn.Module, _linen_layers.LAYERS, _linen_layers.NOT_LAYERS, of_linen),
    "nnx": Library(nnx, nnx.Module, _nnx_layers.LAYERS, _nnx_layers.NOT_LAYERS, of_nnx),
    "equinox": Library(
        eqx.nn, eqx.Module, _equinox_layers.LAYERS, _equinox_layers.NOT_LAYERS, of_equinox
    ),
}
