"""Warns of rules that decide nothing, when a function is traced: its modules are known then."""

from typing import Any

from mpjax._autocast.decide.decided import Settings
from mpjax._autocast.eight_bits import quantized
from mpjax._autocast.known import scopes
from mpjax._autocast.known.activations import warn_of_unused
from mpjax._base.errors import message, warn
from mpjax._base.tree import leaf_paths
from mpjax._policies.parts import policies_in
from mpjax._policies.policy import Policy


def stored_paths(policy: scopes.Policies, args: Any) -> list[str]:
    """Returns the paths of a step's parameters if policies differ in `param_dtype`, else none."""
    dtypes = {p.param_dtype for p in policies_in(policy)}
    return leaf_paths(args[0]) if args and len(dtypes) > 1 else []


def warn_of_rules(settings: Settings, jaxpr: Any, stored: list[str]) -> None:
    """Warns of a rule of the policy, or of `rules=`, that decides nothing in a function."""
    policy = settings.policy
    warn_of_unused(settings.rules, jaxpr)
    if isinstance(policy, Policy):
        return
    paths = scopes.paths(jaxpr.jaxpr)
    paths += quantized.weights(settings.given)  # a rule may name the weight of a product
    paths += stored
    # An argument that is a parameter itself has an empty path: '*' matches that, and names do not.
    can_match = any(path or policy.deciding(path) is not None for path in paths)
    if can_match or len(policy.policies) == 1:
        policy.warn_unused(paths, "autocast")
        return
    text = message(
        "autocast",
        f"no rule of {policy!r} can match: the function names no modules.",
        "Names come from Flax modules and from jax.named_scope; an NNX model that the function "
        "merges has none.",
        "Type `with jax.named_scope('encoder'):` around what a rule is for, or "
        "mpjax.nnx.name_operations(model) after nnx.merge.",
    )
    warn(text)
