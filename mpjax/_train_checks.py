"""What `make_train_step` and its step refuse, and what they say to type instead."""

from typing import Any

import jax

from mpjax._adopt import kind_of
from mpjax._dtypes import describe
from mpjax._errors import message
from mpjax._optim_state import find_states
from mpjax._policy import Policy
from mpjax._policy_map import PolicyMap
from mpjax._tree import is_array, leaf_paths
from mpjax._typing import PyTree


def check_accumulate(accumulate: Any) -> None:
    is_count = isinstance(accumulate, int) and not isinstance(accumulate, bool)
    if not (is_count and accumulate >= 1):
        got = f"must be a whole number of at least 1; got {accumulate!r}."
        raise ValueError(message("make_train_step(accumulate)", got, "Type, for example, 4."))


def check_own(
    policy: Policy | PolicyMap, params: PyTree, wanted: PyTree, opt_state: PyTree, fresh: PyTree
) -> None:
    """Refuses, while tracing, the state of another policy: it would train in that one.

    Args:
      policy: the step's.
      params, opt_state: of the state that was given.
      wanted, fresh: what the step itself would make of these parameters.
    """
    fix = "A checkpoint of another policy: step.adopt(state). Else start with step.init(params)."
    pairs = zip(leaf_paths(wanted), *map(jax.tree.leaves, (wanted, params)), strict=True)
    for path, ours, theirs in pairs:
        if is_array(theirs) and ours.dtype != theirs.dtype:
            got = f"the state is of another policy; parameter {path!r} is {describe(theirs)}"
            got += f", and {policy} keeps {describe(ours)}."
            raise ValueError(message("train step", got, fix))
    ours, theirs = map(find_states, (fresh, opt_state))
    kinds = [[kind_of(found) for _, found in states] for states in (ours, theirs)]
    if theirs and kinds[0] != kinds[1]:
        got = f"the state has {kinds[1][0]} loss scale, and this step {kinds[0][0]} loss scale."
        raise ValueError(message("train step", got, fix))


def pair(out: Any, wanted: str) -> tuple[Any, Any]:
    if isinstance(out, tuple) and len(out) == 2:
        return out
    got = f"the loss function must return {wanted}; got {describe(out)}."
    fix = "Return that tuple, or change has_aux= or what step.init was given."
    raise TypeError(message("make_train_step", got, fix))
