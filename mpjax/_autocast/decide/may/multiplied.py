"""Float32 results that products read, and nothing that rounding would hurt: they may be low.

Example: the float32 norm of `norm(x) @ w`. The product rounds what it reads in any case, so storing
the result low changes nothing for it, and halves its bytes.
"""

from __future__ import annotations

from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.states import Kind, State


def may_be_low(state: State, read: int) -> bool:
    """Whether a float32 result may be low where it is stored.

    Args:
      state: its state. A pure one stays: it may be a weight, whose gradient would be rounded.
      read: how it is read, in flags.
    """
    if state.kind != Kind.WIDE or state.pure or state.kept:
        return False
    return bool(read & read_flags.PRODUCT) and not read & (read_flags.SPOILED | read_flags.TURNS)
