"""An editor's view of mpjax: `make types` checks this file, and nothing runs it.

A line that must be an error has an ignore comment; a comment that is not needed is an error too.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true
# ruff: noqa: B018

from typing import Any, assert_type, get_args

import jax
import jax.numpy as jnp
import optax

import mpjax
from mpjax._base.typing import KnownPolicy
from mpjax.train import Metrics, TrainState


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2)


params, x = {"w": jnp.ones((4, 2))}, jnp.ones((8, 4))

# Modules that are imported when they are first used are known, and a misspelt name is seen.
assert_type(mpjax.numerics.to_scalars({}), dict[str, float])
assert_type(mpjax.optim.with_kahan(optax.sgd(0.1)), optax.GradientTransformationExtraArgs)
_ = mpjax.linen.tabulate, mpjax.nnx.tabulate, mpjax.pods.check, mpjax.testing.assert_dtypes
mpjax.autocats  # pyright: ignore[reportAttributeAccessIssue]
mpjax.numerics.diagnos  # pyright: ignore[reportAttributeAccessIssue]

# A function keeps its types.
fast = mpjax.autocast(loss_fn, "bf16-mixed")
assert_type(fast(params, x), jax.Array)
fast(params)  # pyright: ignore[reportCallIssue]
differentiate = mpjax.value_and_grad(loss_fn, loss_scale=None)
assert_type(differentiate(params, x), tuple[jax.Array, dict[str, jax.Array]])
differentiate(params)  # pyright: ignore[reportCallIssue]
grads = mpjax.grad(loss_fn, loss_scale=None)(params, x)
assert_type(grads, dict[str, jax.Array])
grads.nothing  # pyright: ignore[reportAttributeAccessIssue]
mpjax.grad(loss_fn, loss_scale=None)(params, 3)  # pyright: ignore[reportArgumentType]


# Gradients have the type of what they are the gradients of, beside auxiliary results too.
def with_aux(w: jax.Array, x: jax.Array) -> tuple[jax.Array, int]:
    return jnp.sum(w * x), 1


both = mpjax.value_and_grad(with_aux, has_aux=True, loss_scale=8.0)
assert_type(both(x, x), tuple[tuple[jax.Array, int], jax.Array])
assert_type(mpjax.grad(with_aux, has_aux=True, loss_scale=8.0)(x, x), tuple[jax.Array, int])
other = mpjax.grad(loss_fn, argnums=1, loss_scale=None)  # of another argument: not known
assert_type(other(params, x), Any)
several = mpjax.value_and_grad(loss_fn, (0, 1), loss_scale=None)
assert_type(several(params, x), tuple[jax.Array, Any])

# Metrics are known by name.
step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "16-mixed")
state, metrics = step(step.init(params), x)
assert_type(state, TrainState)
assert_type(metrics, Metrics)
assert_type(metrics["loss"], jax.Array)
step(state, batch=x)  # pyright: ignore[reportArgumentType]
metrics["los"]  # pyright: ignore[reportGeneralTypeIssues]
mpjax.numerics.to_scalars(metrics)

# Policies: the names that an editor completes are all known.
for name in get_args(KnownPolicy):
    mpjax.get_policy(name)
assert_type(mpjax.get_policy("bf16-mixed"), mpjax.Policy)
assert_type(mpjax.get_policy(16), mpjax.Policy)
