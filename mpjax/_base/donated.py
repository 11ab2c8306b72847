"""Refuses a state whose memory a step has taken; the error says which state to use instead."""

import jax

from mpjax._base.errors import message
from mpjax._base.tree import is_deleted
from mpjax._base.typing import PyTree


def is_donated(tree: PyTree) -> bool:
    """Whether the memory of an array in a tree was given to a step, or freed."""
    return any(map(is_deleted, jax.tree.leaves(tree)))


def refuse_donated(tree: PyTree, where: str) -> None:
    """Raises ValueError for a state, or a part of one, that a step has taken."""
    if is_donated(tree):
        got = "the state that it was given has been donated to an earlier step, and is gone."
        allowed = "Allowed: the state that the last step returned."
        fix = "Type state, metrics = step(state, batch); to keep old ones: donate=False."
        raise ValueError(message(where, got, allowed, fix)) from None
