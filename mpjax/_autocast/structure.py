"""Operations that hold programs: what they are called, and where the program is."""

from __future__ import annotations

from typing import Any

from mpjax import _compat

_SINGLE = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "shard_map": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_MANY = frozenset({"scan", "while", "cond"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})


def is_call(eqn: Any) -> bool:
    """Whether autocast goes inside an equation."""
    return eqn.primitive.name in _MANY or single_program(eqn) is not None


def single_program(eqn: Any) -> Any:
    """Returns the one jaxpr of a call, None for loops and branches."""
    name = eqn.primitive.name
    key = _SINGLE.get(name)
    if key is None:
        return None
    return eqn.params.get(key, eqn.params.get("jaxpr"))


def function_name(eqn: Any) -> str:
    """Returns the name of the function that an equation calls."""
    if "name" in eqn.params:
        return eqn.params["name"]
    info = getattr(_compat.closed(single_program(eqn)).jaxpr, "debug_info", None)
    return getattr(info, "func_name", "")
