"""A loss function in a policy's precision: autocast for a mixed one, casts for a "true" one."""

import functools
from collections.abc import Callable
from typing import Any

from mpjax._autocast.api import as_typed
from mpjax._base.dtypes import DType
from mpjax._base.tree import map_with_path, to_full
from mpjax._base.typing import PyTree
from mpjax._policies.parts import default_of, policies_in
from mpjax._policies.policy import Policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.quantized_policy import QuantizedPolicy


def under_policy(loss_fn: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Returns the loss function in the policy's precision.

    Under a mixed policy, whose parameters or outputs are wider than its compute dtype, autocast
    runs it: casts could not tell a target, which stays float32, from an input. Under a "true"
    policy everything has one dtype, so the arguments are cast, all but the extra state.
    """
    if is_autocast(policy):
        # In the dtypes that it returns: BatchNorm's means must not be rounded to a low output
        # dtype, and a float16 loss must be known as one when it is scaled.
        return as_typed(widened(loss_fn, policy), policy)
    default = default_of(policy)

    @functools.wraps(loss_fn)
    def wrapped(params: PyTree, *rest: Any) -> Any:
        *extra_state, batch = rest
        return loss_fn(policy.cast_to_compute(params), *extra_state, default.cast_to_compute(batch))

    return wrapped


def widened(fun: Callable[..., Any], policy: Policy | PolicyMap) -> Callable[..., Any]:
    """Returns `fun` for parameters in 16 bits, its first argument, which it reads in float32.

    "O2" keeps 16-bit parameters, and returns float32: its products read 16-bit operands, and the
    operations after them, as the loss with its targets, are float32.
    """
    narrow = any(p.param_dtype.itemsize < p.output_dtype.itemsize for p in policies_in(policy))
    if not narrow:
        return fun

    @functools.wraps(fun, updated=())
    def wrapped(params: PyTree, *rest: Any) -> Any:
        return fun(map_with_path(lambda _, x: to_full(x), params), *rest)

    return wrapped


def is_autocast(policy: Policy | PolicyMap) -> bool:
    """Whether parameters or outputs are wider than the compute dtype, or products narrower."""
    policies = policies_in(policy)
    narrower = any(p.compute_dtype.itemsize < p.param_dtype.itemsize for p in policies)
    narrower = narrower or any(map(_returns_wider, policies))
    return narrower or any(isinstance(p, QuantizedPolicy) for p in policies)


def _returns_wider(policy: Policy) -> bool:
    """Whether a policy computes in 16 bits and returns more."""
    low = policy.compute_dtype.itemsize
    return low == 2 and low < policy.output_dtype.itemsize


def param_dtypes(policy: Policy | PolicyMap) -> tuple[DType, ...]:
    """Returns the dtypes in which a policy keeps parameters."""
    return tuple(p.param_dtype for p in policies_in(policy))
