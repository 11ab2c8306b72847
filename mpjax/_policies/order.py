"""Refuses a policy that stands in the place of what it is for."""

from typing import Any

from mpjax._base.errors import message
from mpjax._policies.policy import Policy
from mpjax._policies.policy_map import PolicyMap


def is_policy(x: Any) -> bool:
    """Whether something is a policy, a map of them, or a text, which can only name one."""
    return isinstance(x, (str, Policy, PolicyMap))


def refuse_policy_first(first: Any, second: Any, where: str, meant: str) -> None:
    """Raises TypeError for a policy in the first place, that of `meant`, and none in the second."""
    if not is_policy(first) or is_policy(second):
        return
    shown = repr(first) if isinstance(first, str) else repr(str(first))
    got = f"got the policy {shown} where {meant} stands."
    allowed = f"Allowed, in this order: {where}({meant}, policy)."
    raise TypeError(message(where, got, allowed, f"Swap them: {where}({meant}, {shown})."))
