"""What a benchmarked network is: one definition, written for any dtype, with its inputs."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

PyTree = Any
Loss = Callable[[PyTree, PyTree], jax.Array]  # loss(params, batch) -> scalar


BY_CUDNN = contextvars.ContextVar("BY_CUDNN", default=False)
"""Whether attention that is traced now asks JAX for cuDNN's kernel."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A model with its loss, at one size.

    `written(dtype)` is the model as someone writes it who places every cast by hand: parameters
    float32, modules with `dtype=dtype`, softmax, normalisation statistics and the loss in
    `full(dtype)`. `written(float32)` holds no cast at all, so it is the plain, unedited model.
    """

    name: str
    size: str
    numbers: dict[str, Any] = dataclasses.field(hash=False)  # of the size: batch, width, ...
    written: Callable[[Any], Loss]
    init: Callable[[jax.Array], PyTree]  # key -> parameters, float32
    sample: Callable[[jax.Array], PyTree]  # key -> a batch of random inputs and targets

    @functools.cached_property
    def loss(self) -> Loss:
        """Returns the float32 model."""
        return self.written(jnp.float32)

    def hand_cast(self, dtype: Any) -> Loss:
        """Returns the model with `dtype` written into it."""
        return self.written(dtype)

    def hand_cast_by_cudnn(self, dtype: Any) -> Loss:
        """Returns the hand cast that asks JAX for cuDNN's attention; it compiles for GPUs alone."""

        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            token = BY_CUDNN.set(True)
            try:
                return self.written(dtype)(params, batch)
            finally:
                BY_CUDNN.reset(token)

        return loss

    @functools.cached_property
    def params(self) -> PyTree:
        """Returns specs of the parameters; nothing is computed."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @functools.cached_property
    def batch(self) -> PyTree:
        """Returns specs of a batch; nothing is computed."""
        return jax.eval_shape(self.sample, jax.random.key(0))

    def values(self, seed: int = 0) -> tuple[PyTree, PyTree]:
        """Returns parameters and a batch as arrays."""
        for_params, for_batch = jax.random.split(jax.random.key(seed))
        return jax.jit(self.init)(for_params), jax.jit(self.sample)(for_batch)


def full(dtype: Any) -> Any:
    """Returns the dtype of what must not be rounded: float32, or float64 in a float64 model."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array, dtype: Any) -> jax.Array:
    """Returns the mean cross-entropy, computed in `full(dtype)`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(full(dtype)), labels)
    return jnp.mean(losses)


def labelled(
    name: str,
    size: str,
    numbers: dict[str, Any],
    model: Callable[[Any], nn.Module],
    sample: Callable[[jax.Array], PyTree],
) -> Network:
    """Returns a model of `x`, written for any dtype, with a label `y` for each of its outputs."""

    def written(dtype: Any) -> Loss:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            logits = model(dtype).apply({"params": params}, batch["x"])
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def init(key: jax.Array) -> PyTree:
        x = jax.eval_shape(sample, key)["x"]
        return model(jnp.float32).init(key, jnp.zeros((1, *x.shape[1:]), x.dtype))["params"]

    return Network(name, size, numbers, written, init, sample)


def language_model(
    name: str, size: str, numbers: dict[str, Any], model: Callable[[Any], nn.Module]
) -> Network:
    """Returns a decoder with the loss of its next token."""

    def sample(key: jax.Array) -> PyTree:
        shape = (numbers["batch"], numbers["time"] + 1)
        tokens = jax.random.randint(key, shape, 0, numbers["vocab"], jnp.int32)
        return {"x": tokens[:, :-1], "y": tokens[:, 1:]}

    return labelled(name, size, numbers, model, sample)


def image_classifier(
    name: str, size: str, numbers: dict[str, Any], model: Callable[[Any], nn.Module]
) -> Network:
    """Returns a classifier of square images; new running statistics are vectors, and dropped."""
    shape = (numbers["batch"], numbers["pixels"], numbers["pixels"], 3)

    def written(dtype: Any) -> Loss:
        def loss(params: PyTree, batch: PyTree) -> jax.Array:
            variables = {"params": params}
            logits, _ = model(dtype).apply(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["y"], dtype)

        return loss

    def sample(key: jax.Array) -> PyTree:
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, shape, jnp.float32)
        return {"x": x, "y": jax.random.randint(k2, shape[:1], 0, numbers["classes"], jnp.int32)}

    def init(key: jax.Array) -> PyTree:
        return model(jnp.float32).init(key, jnp.zeros((1, *shape[1:]), jnp.float32))["params"]

    return Network(name, size, numbers, written, init, sample)
