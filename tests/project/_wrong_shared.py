"""What rows of wrong uses are made of, and how many of them are written in one line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.errors import TraceContextError

import mpjax

PARAMS = {"w": jnp.ones((2, 2))}
X = jnp.ones((4, 2))
SGD = optax.sgd(0.1)
POLICY = "bf16-mixed"
T, V, A, W = TypeError, ValueError, AttributeError, mpjax.PolicyWarning
NAN, INF = float("nan"), float("inf")
VG = mpjax.value_and_grad

# The call, the error (or the warning), and what is said, in this order: phrases between bars.
Row = tuple[Callable[[], Any], type[Exception], str]


def each(call, error, said, *values):
    """Returns a row for each value; `{}` in what is said stands for it."""
    return told(call, error, said, *((value, repr(value)) for value in values))


def told(call, error, said, *values):
    """Returns a row for each value, which comes with the words that stand for it in a message."""
    return [(lambda v=value: call(v), error, said.replace("{}", word)) for value, word in values]


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def per_row(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2, axis=1)


def step(fun=loss_fn, tx=SGD, policy=None, **options):
    return mpjax.make_train_step(fun, tx, policy, **options)


def wrap(tx=SGD, scale=8.0, **options):
    return mpjax.with_loss_scale(tx, scale, **options)


def model():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def note_of(run):
    """Raises the notes of an error of JAX or Flax as an error."""
    try:
        run()
    except (jax.errors.ConcretizationTypeError, NotImplementedError, TraceContextError) as error:
        raise ValueError("\n".join(error.__notes__)) from None
