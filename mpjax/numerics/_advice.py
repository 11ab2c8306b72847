"""Advises another policy; each one is tried on the loss at hand before it is given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._policies.parts import default_of
from mpjax._policies.policy import shown_name
from mpjax._policies.policy_map import PolicyMap
from mpjax.numerics._report import Row
from mpjax.numerics._subject import Subject

_LOSS_OFF, _GRADIENT_OFF = 0.02, 0.5  # relative; a model that is cast by hand is off by .001, .2

_WIDER = "No policy mends that: look at the batch, the initial weights and the learning rate."


@dataclasses.dataclass(frozen=True)
class Compared:
    """Loss and gradients under a policy beside those in float32."""

    loss: float
    exact: float
    gradient_error: float  # relative, of all gradients together

    @property
    def agrees(self) -> bool:
        """Whether they differ by no more than roundings to 16 bits explain."""
        near = abs(self.loss - self.exact) <= _LOSS_OFF * max(abs(self.exact), 1e-3)
        return near and self.gradient_error <= _GRADIENT_OFF


def other_policies(
    rows: Sequence[Row], subject: Subject, compared: Callable[[Any], Compared]
) -> str:
    """Returns the policies to type so that some operations are right.

    Args:
      rows: the operations.
      subject: the loss, and its policy, under which they are not.
      compared: runs the loss under another policy.
    """
    policy = default_of(subject.policy)
    is_bfloat16 = jnp.dtype(policy.compute_dtype) == jnp.bfloat16
    mixed = ["bf16-mixed"] if is_bfloat16 else ["16-mixed", "bf16-mixed"]
    if jnp.dtype(policy.param_dtype).itemsize > 2:
        place, rules = _rules(rows, subject)
        by_rule = f"type mpjax.PolicyMap({shown_name(policy)!r}, {rules!r})"
        # A place without a name cannot be tried: the rule is for one that the user will give.
        can_try = not place
        tried = {place + by_rule: compared(PolicyMap(policy, rules)) if can_try else None}
        tried |= {} if is_bfloat16 else {"use 'bf16-mixed'": compared("bf16-mixed")}
    else:  # 16-bit parameters: a rule would have no float32 values to keep
        tried = {f"use {name!r}, whose parameters are float32": compared(name) for name in mixed}
    exact = [seen.exact for seen in tried.values() if seen]
    if exact and not math.isfinite(exact[0]):
        return f"{_WIDER} The loss in float32 is {exact[0]:.6g} too."
    good = [way for way, seen in tried.items() if seen and seen.agrees]
    good += [f"{way} (not tried)" for way, seen in tried.items() if seen is None]
    bad = [f"Do not {way}: {_off(s)}." for way, s in tried.items() if s and not s.agrees]
    return " ".join([_sentence(", or ".join(good) or "use 'float32'"), *bad])


def _rules(rows: Sequence[Row], subject: Subject) -> tuple[str, dict[str, str]]:
    """Returns the words on naming unnamed places, if any, and the rules for all places."""
    rules = {row.module: "float32" for row in rows if row.module}
    rules |= {p: shown_name(q) for p, q in getattr(subject.policy, "rules", ())}
    if not (unnamed := dict.fromkeys(row.where for row in rows if not row.module)):
        return "", rules
    place = f"name the place, `with jax.named_scope('here'):` around {' to '.join(unnamed)}, and "
    return place, {"here": "float32"} | rules


def _off(seen: Compared) -> str:
    error = seen.gradient_error
    gradient = f"off by {error:.2g} of its norm" if math.isfinite(error) else "not finite"
    return (
        f"its loss is {seen.loss:.6g}, where float32 gives {seen.exact:.6g}, and its gradient is "
        f"{gradient}"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
