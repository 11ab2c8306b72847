"""Translates a user's checkpoint policy to the program after autocast.

A policy such as `dots_saveable` would save the float32 result of a low product. So inside a
checkpointed function every product's rounded result carries a name. When JAX asks about that name,
the policy is asked about the original product: the value that it saves is the low one. Of an
attention, which is one operation, the policy is asked about the last product.

Nothing is saved of the operations that autocast adds around a product, whatever the policy answers
to names that it cannot know: "all but `dot_general`" would save each product as a `linked_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from mpjax._autocast.known.named_attention import FORWARD
from mpjax._autocast.product.primitives import product_p
from mpjax._base.own_primitives import returns_operands
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_PREFIX = "mpjax_product_"
_CONSTANT = (
    None,
    jax.checkpoint_policies.everything_saveable,  # by this very object JAX knows that it may
    jax.checkpoint_policies.nothing_saveable,  # leave a checkpoint out, or its policy
)

Policy = Callable[..., Any]


class NamedProducts:
    """The product equations in a checkpointed function, by the names of their results."""

    def __init__(self) -> None:
        self._eqns: dict[str, Eqn] = {}

    def named(self, eqn: Eqn, out: jax.Array) -> jax.Array:
        """Returns the rounded result of a product equation under a new name."""
        name = f"{_PREFIX}{len(self._eqns)}"
        self._eqns[name] = eqn
        return checkpoint_name(out, name)

    def translated(self, policy: Policy | None) -> Policy | None:
        """Returns a policy for the program after autocast that answers as `policy` does."""
        if policy in _CONSTANT:
            return policy

        def ask(primitive: Any, *avals: Any, **params: Any) -> Any:
            if (eqn := self._original(primitive, params)) is not None:
                return policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
            if _is_ours(primitive, avals, params):
                return False
            return policy(primitive, *avals, **params)

        return ask

    def _original(self, primitive: Any, params: Any) -> Eqn | None:
        """Returns the user's product that an operation stands for."""
        if primitive.name == "name":
            return self._eqns.get(params["name"])
        # A `product_p` is asked about where a derivative is differentiated again.
        return params["program"].product if primitive in (product_p, FORWARD) else None


def _is_ours(primitive: Any, avals: Any, params: Any) -> bool:
    """Whether an operation is part of a product whose result has a name."""
    if returns_operands(primitive):
        return True
    if primitive.name not in PRODUCTS:
        return False
    narrow = avals[0].dtype.itemsize
    return narrow == 1 or (narrow < 4 and params["preferred_element_type"] == "float32")
