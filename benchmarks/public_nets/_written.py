"""What every public model's module needs: its switch, its float64 reference, random inputs."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from networks import Network
from networks._network import cross_entropy, full

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]
__all__ = ["cross_entropy", "full", "mean_square", "removed_arguments", "switched", "unswitched"]


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Returns a tree with its floating arrays in a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def switched(
    name: str,
    size: str,
    written: Callable[[Any], Loss],
    init: Callable[[jax.Array], PyTree],
    sample: Callable[[jax.Array], PyTree],
) -> Network:
    """Returns a model whose package has a switch: `written(dtype)` is the loss with it set.

    With float64 it is the reference: inputs are float64 then, too.
    """

    def of(dtype: Any) -> Loss:
        loss = written(dtype)
        if jnp.dtype(dtype) != jnp.float64:
            return loss
        return lambda params, batch: loss(params, cast(batch, jnp.float64))

    return Network(name, size, {}, of, init, sample)


def unswitched(
    name: str,
    size: str,
    loss: Loss,
    init: Callable[[jax.Array], PyTree],
    sample: Callable[[jax.Array], PyTree],
) -> Network:
    """Returns a model whose package has no switch: it is float32, or the float64 reference."""

    def written(dtype: Any) -> Loss:
        if jnp.dtype(dtype).itemsize < 4:
            raise ValueError(f"{name}: its package has no switch to {jnp.dtype(dtype).name}.")
        return loss

    return switched(name, size, written, init, sample)


def mean_square(out: jax.Array, target: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the mean squared difference, computed in `full(dtype)`."""
    return jnp.mean(jnp.square(out.astype(full(dtype)) - target))


@contextlib.contextmanager
def removed_arguments() -> Iterator[None]:
    """Gives `jnp.clip` back the names of arguments that JAX has removed and packages still type."""
    clip = jnp.clip

    def with_old_names(x: Any, min: Any = None, max: Any = None, **old: Any) -> jax.Array:
        return clip(x, old.pop("a_min", min), old.pop("a_max", max), **old)

    jnp.clip = with_old_names
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the package's own code calls
            yield
    finally:
        jnp.clip = clip
