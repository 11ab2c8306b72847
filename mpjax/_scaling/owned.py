"""Marks the loss scale of an optimizer that unscales gradients itself, so that nobody else does."""

from typing import Any

import jax

from mpjax._base.typing import ScalarLike
from mpjax._scaling.loss_scale import LossScale, NoOpLossScale, ScalarFields, T

OWNED = "unscaled by its optimizer"
"""The mark of a loss scale from `current_loss_scale`: part of its tree's structure."""


@jax.tree_util.register_pytree_with_keys_class
class OwnedLossScale:
    """A loss scale of the user's own class, marked as `current_loss_scale` marks ours."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def loss_scale(self) -> ScalarLike:
        """The factor, f32[]."""
        return self.inner.loss_scale

    def scale(self, tree: T) -> T:
        """Returns `tree` times the loss scale."""
        return self.inner.scale(tree)

    def unscale(self, tree: T) -> T:
        """Returns `tree` divided by the loss scale."""
        return self.inner.unscale(tree)

    def adjust(self, grads_finite: ScalarLike) -> "OwnedLossScale":
        """Returns the loss scale of the next step, marked too."""
        return OwnedLossScale(self.inner.adjust(grads_finite))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":  # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        """Returns the marked loss scale and its key, as `jax.tree_util` asks."""
        return ((jax.tree_util.GetAttrKey("inner"), self.inner),), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "OwnedLossScale":
        """Returns the mark around other fields."""
        del aux
        return cls(*children)

    def __repr__(self) -> str:
        return repr(self.inner)


def owned(scale: LossScale) -> LossScale:
    """Returns `scale`, marked as one with which an optimizer unscales the gradients it is given.

    The mark is static: it goes through jit and scan, and is no leaf that a checkpoint could hold.
    Marked and unmarked differ in their tree's structure, so that neither is taken for the other
    by a cache.
    """
    if isinstance(scale, NoOpLossScale) or is_owned(scale):
        return scale
    if isinstance(scale, ScalarFields):
        return scale.marked(OWNED)
    return OwnedLossScale(scale)


def is_owned(scale: LossScale) -> bool:
    """Whether `scale` came from an optimizer, which unscales by itself."""
    return isinstance(scale, OwnedLossScale) or getattr(scale, "_mark", None) is not None


def without_owner(scale: Any) -> Any:
    """Returns `scale` unmarked, as an optimizer's state holds it."""
    if isinstance(scale, OwnedLossScale):
        return scale.inner
    if isinstance(scale, ScalarFields):
        return scale.marked(None)
    return scale
