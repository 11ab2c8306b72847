"""The policies in what a user gives as one: a `Policy` itself, or those of a `PolicyMap`."""

from typing import Any

from mpjax._policies.policy import Policy


def policies_in(policy: Any) -> tuple[Policy, ...]:
    """Returns the policies of a map, the default first; of a policy itself."""
    return (policy,) if isinstance(policy, Policy) else policy.policies


def default_of(policy: Any) -> Policy:
    """Returns the policy of the paths that no rule of a map matches; a policy itself."""
    return policy if isinstance(policy, Policy) else policy.default
