"""Translates a user's checkpoint policy to the program after autocast.

A policy such as `dots_saveable` would save the float32 result of a low product. So inside a
checkpointed function every product's rounded result carries a name. When JAX asks about that name,
the policy is asked about the original product: the value that it saves is the low one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_PREFIX = "mpjax_product_"
_OURS = frozenset(
    {"linked_product", "low_product", "hidden_operand", "settled_operand", "settled_result"}
    | {"rounded_result", "stored", "stored_cotangent", "cotangent_stored_low", "low_sum"}
    | {"recorded_amax", "recorded_amax_tangent", "spread_scale", "multiplied_alone"}
    | {"reattached_value"}
)

Policy = Callable[..., Any]


class NamedProducts:
    """The product equations in a checkpointed function, by the names of their results."""

    def __init__(self) -> None:
        self._eqns: dict[str, Any] = {}

    def named(self, eqn: Eqn, out: jax.Array) -> jax.Array:
        """Returns the rounded result of a product equation under a new name."""
        name = f"{_PREFIX}{len(self._eqns)}"
        self._eqns[name] = eqn
        return checkpoint_name(out, name)

    def translated(self, policy: Policy | None) -> Policy | None:
        """Returns a policy for the program after autocast that answers as `policy` does."""
        if policy is None:
            return None

        def ask(primitive: Any, *avals: Any, **params: Any) -> Any:
            if primitive.name == "name" and params["name"] in self._eqns:
                eqn = self._eqns[params["name"]]
                return policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
            if _is_ours(primitive.name, avals, params):
                return False
            return policy(primitive, *avals, **params)

        return ask


def _is_ours(name: str, avals: Any, params: Any) -> bool:
    if name in _OURS:
        return True
    if name not in PRODUCTS:
        return False
    narrow = avals[0].dtype.itemsize
    return narrow == 1 or (narrow < 4 and params["preferred_element_type"] == "float32")
