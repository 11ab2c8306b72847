"""`with_amax_history`: autocast for recipes whose scales are those of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._autocast import api
from mpjax._autocast.arguments import parameters
from mpjax._autocast.decide.decided import Settings
from mpjax._autocast.eight_bits import delayed
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import PolicySpec
from mpjax._jaxpr.op_rules import parse_rules
from mpjax._policies.policy import chosen_policy

_WHERE = "with_amax_history"


class WithAmaxHistory(NamedTuple):
    """The three functions that `with_amax_history` returns."""

    init: Callable[..., Any]
    apply: Callable[..., Any]
    update: Callable[..., Any]


@names_keywords(POLICIES_OF)
def with_amax_history(
    fun: Callable[..., Any], policy: PolicySpec, *, rules: Any = None, params: Any = None
) -> WithAmaxHistory:
    """Returns `fun` under `DelayedScaling`, with its amax histories as argument and result.

    For steps of your own; `mpjax.make_train_step` stores histories by itself. The gradient with
    respect to the history holds the largest values of this step, and `update` puts them in front.

    Args:
      fun: any function of arrays.
      policy: a policy with `DelayedScaling`, or a map that contains one.
      rules, params: as for `autocast`; the arguments of `params` are those of `fun`.

    Returns:
      A tuple of three functions.

      - `init(*args)` returns a history, plain containers of f32[3, steps] by product, with the
        lengths of scans in front. It starts with the largest values of these arguments' products,
        and of their gradients if the first result is a scalar.
      - `apply(history, *args)` returns the result of `fun(*args)`.
      - `update(history, seen, finite=True)` returns the next history, from the gradient of this
        one; unchanged where `finite` is false. An inf or NaN is never recorded.

    Raises:
      ValueError: `policy` has no recipe with a history, the function differentiates inside, or a
        history is of another function.
      TypeError: an argument is no history.

    Dtypes:
      As `autocast`; histories are float32.

    Transforms:
      As `autocast`. Gradients of histories are never scaled by `mpjax.value_and_grad`, and over
      its `axis_name` the largest counts. Products inside branches, `while` loops and `shard_map`s
      of `fun` keep none: they scale by the values at hand.

    Example:
      >>> def loss_fn(ws, x):
      ...     for w in ws:
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.sum(x)
      >>> policy = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=4))
      >>> fast = mpjax.with_amax_history(loss_fn, policy)
      >>> ws, x = [jnp.eye(64)] * 3, jnp.ones((8, 64))
      >>> history = fast.init(ws, x)
      >>> seen, grads = jax.grad(fast.apply, argnums=(0, 1))(history, ws, x)
      >>> history = fast.update(history, seen)
      >>> jax.tree.map(jnp.shape, history)
      {'_overwrite_with_gradient': {'_recorded_amax': {'1': (3, 4)}}}

    References:
      Transformer Engine, `DelayedScaling`
    """
    chosen = chosen_policy(policy, _WHERE)
    if not delayed.has_history(chosen):
        got = f"{chosen} has no recipe with a history."
        fix = "Type mpjax.autocast(fun, policy); or policy=QuantizedPolicy('bf16-mixed', "
        raise ValueError(message(_WHERE, got, fix + "DelayedScaling())."))
    overrides, widest = parse_rules(rules)
    named = parameters.checked(params, _WHERE)
    ordered = tuple(sorted(overrides.items()))
    settings = Settings(chosen, overrides=ordered, widest=widest, params=named)

    def init(*args: Any, **kwargs: Any) -> Any:
        return started(fun, args, kwargs, settings)

    def apply(history: Any, *args: Any, **kwargs: Any) -> Any:
        delayed.unwrapped(history)
        tracked = delayed.Tracked(None, delayed.amaxes_of(history))
        return api.call(fun, args, kwargs, settings, tracked, casts=True)

    def update(history: Any, seen: Any, finite: Any = True) -> Any:
        delayed.unwrapped(seen)
        newest = jax.tree.map(lambda x: x[..., 0], seen)
        return delayed.updated(history, newest, finite)

    return WithAmaxHistory(init, apply, update)


def started(
    fun: Callable[..., Any], args: Any, kwargs: Any, settings: Settings, seed: Any = 1.0
) -> Any:
    """Returns the histories of a function after one run, scaled by the values at hand.

    Args:
      fun: a function; if its first result is a scalar, that is the loss and gradients are recorded.
      args, kwargs: its arguments.
      settings: of its plan.
      seed: the loss scale; the recorded maxima of gradients are divided by it.
    """
    _, plan = api.planned(fun, args, kwargs, settings)
    zeros = delayed.zeros(delayed.sites(plan))

    def run(amaxes: Any) -> list[Any]:
        tracked = delayed.Tracked(None, amaxes, calibrates=True)
        outs = jax.tree.leaves(api.call(fun, args, kwargs, settings, tracked))
        return [x for x in outs if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

    outs, pullback = jax.vjp(run, jax.tree.map(lambda x: x[..., 0], zeros))
    is_loss = bool(outs) and jnp.ndim(outs[0]) == 0
    cts = [jnp.full_like(x, seed if i == 0 or not is_loss else 0) for i, x in enumerate(outs)]
    (seen,) = pullback(cts)
    one = jnp.ones((), FLOAT32)
    by_role = jnp.stack([one, one, one / seed if is_loss else 0 * one])
    return delayed.updated(zeros, jax.tree.map(lambda x: x * by_role, seen))
