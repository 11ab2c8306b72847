"""Loss scales: immutable pytrees that scale a loss, unscale gradients and adjust themselves.

float16 gradients below 2⁻²⁴ vanish. Multiplying the loss by a large number moves every gradient
up by as much; dividing the float32 gradients by it afterwards undoes it, exactly where it is a
power of two.
"""

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.errors import message
from mpjax._base.exported import exported, stored_by_flax, tell_flax
from mpjax._base.foreign_attributes import SCALE_ATTRIBUTES
from mpjax._base.foreign_errors import attribute_error
from mpjax._base.foreign_keywords import LOSS_SCALE, STATIC
from mpjax._base.gradient_tags import tag
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public
from mpjax._base.tree import as_pred, is_array, is_castable, map_with_path, to_full
from mpjax._base.typing import Array, ScalarLike
from mpjax._scaling.checks import (
    LARGEST,
    SMALLEST,
    check_bounds,
    check_counts,
    check_factors,
    check_scale,
)

T = TypeVar("T")

_OF_JMP = (
    "jmp",
    "counter=...",
    "growth_interval=...",
    "growth_factor=..., backoff_factor=...",
    "min_loss_scale=...",
)


@runtime_checkable
class LossScale(Protocol):
    """The interface of a loss scale. To write your own, make a pytree with the same methods.

    `value_and_grad`, `with_loss_scale` and `make_train_step` accept it. Its leaves are arrays, and
    `adjust` returns one of the same structure and dtypes.

    Example:
      >>> isinstance(mpjax.DynamicLossScale(), mpjax.LossScale)
      True
    """

    @property
    def loss_scale(self) -> ScalarLike:
        """The factor, f32[]."""
        ...

    def scale(self, tree: T) -> T:
        """Returns `tree` times the loss scale."""
        ...

    def unscale(self, tree: T) -> T:
        """Returns `tree` divided by the loss scale."""
        ...

    def adjust(self, grads_finite: ScalarLike) -> "LossScale":
        """Returns the loss scale of the next step."""
        ...


@stored_by_flax
@public
@jax.tree_util.register_static
class NoOpLossScale:
    """Multiplies by nothing and adds no operation to the program: for bfloat16 and float32.

    It has the methods of the other loss scales, so one train step serves every precision.

    Example:
      >>> mpjax.NoOpLossScale().scale(3.0)
      3.0
    """

    __slots__ = ()

    if not TYPE_CHECKING:
        __getattr__ = attribute_error(SCALE_ATTRIBUTES)

    @names_keywords(where="NoOpLossScale")
    def __init__(self) -> None:
        tell_flax()

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(self, grads_finite: ScalarLike) -> "NoOpLossScale":
        """Returns itself."""
        del grads_finite
        return self

    def __repr__(self) -> str:
        return "NoOpLossScale()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoOpLossScale)

    def __hash__(self) -> int:
        return hash(NoOpLossScale)


class ScalarFields:
    """A pytree whose leaves are the scalars named in `_fields`, in order."""

    __slots__ = ("_mark",)
    _fields: tuple[str, ...] = ()
    _mark: str | None  # `owned.OWNED`, or None: part of its tree's structure
    loss_scale: Array

    if not TYPE_CHECKING:  # or an editor would believe that there is any attribute
        __getattr__ = attribute_error(SCALE_ATTRIBUTES)

    def scale(self, tree: T) -> T:
        """Returns `tree` times the loss scale, floating leaves of up to 32 bits in float32.

        In float32 because a float16 loss of 3.0 times 65536 must be 196608, not inf.
        """
        return map_with_path(lambda _, x: _scaled(x, self.loss_scale, divide=False), tree)

    def unscale(self, tree: T) -> T:
        """Returns `tree` divided by the loss scale, floating leaves of up to 32 bits in float32.

        In float32 because a gradient that float16 held only thanks to the scale would vanish.
        """
        true = map_with_path(lambda _, x: _scaled(x, self.loss_scale, divide=True), tree)
        if self._mark is not None:
            tag(true, None)  # an optimizer that is given these would divide them once more
        return true

    def marked(self: T, mark: str | None) -> T:
        """Returns the same scale with this mark."""
        children, _ = jax.tree.flatten(self)
        return self.tree_unflatten(mark, children)  # type: ignore[attr-defined]  # T as below

    def _set(self, values: Any, mark: str | None = None) -> None:
        for field, value in zip(self._fields, values, strict=True):
            object.__setattr__(self, field, value)
        object.__setattr__(self, "_mark", mark)
        tell_flax()

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], str | None]:
        """Returns the fields and their keys, as `jax.tree_util` asks."""
        keys = map(jax.tree_util.GetAttrKey, self._fields)
        return tuple((key, getattr(self, key.name)) for key in keys), self._mark

    @classmethod
    def tree_unflatten(cls: type[T], aux: str | None, children: Any) -> T:
        """Returns the object with these fields, unchecked: they may be tracers or specs."""
        made = object.__new__(cls)
        made._set(children, aux)  # type: ignore[attr-defined]  # T is one of these classes
        return made

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        got = f"is immutable; got {name} = {value!r}."
        raise AttributeError(message(kind, got, f"Make another: mpjax.{kind}({name}=...)."))

    def __delattr__(self, name: str) -> None:
        kind = type(self).__name__
        raise AttributeError(message(kind, f"is immutable; cannot delete {name}."))

    def __repr__(self) -> str:
        fields = (f"{field}={_shown(getattr(self, field))}" for field in self._fields)
        return f"{type(self).__name__}({', '.join(fields)})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        fields = tuple(getattr(self, field) for field in self._fields)
        return _rebuild, (type(self), fields, self._mark)


def _rebuild(cls: type[ScalarFields], fields: tuple[Any, ...], mark: str | None) -> ScalarFields:
    return cls.tree_unflatten(mark, fields)


@exported
@public
@jax.tree_util.register_pytree_with_keys_class
class StaticLossScale(ScalarFields):
    """Scales by a constant.

    Args:
      loss_scale: the factor, positive and finite; a power of two makes unscaling exact.

    Raises:
      ValueError: it is not a finite number in [2⁻¹²⁶, 2¹²⁶].

    Dtypes:
      The factor is f32[]; scaled and unscaled values are float32 (float64 and complex stay).

    Transforms:
      All; the factor is a leaf of the pytree.

    Example:
      >>> mpjax.StaticLossScale(2**15).unscale(jnp.float32(65536.0))
      Array(2., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """

    __slots__ = ("loss_scale",)
    _fields = ("loss_scale",)

    @names_keywords(STATIC, "StaticLossScale")
    def __init__(self, loss_scale: ScalarLike = 2.0**15) -> None:
        check_scale("StaticLossScale(loss_scale)", loss_scale)
        self._set([jnp.asarray(loss_scale, jnp.float32)])

    def adjust(self, grads_finite: ScalarLike) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite
        return self


@exported
@public
@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(ScalarFields):
    """Scales by a factor that halves on overflow and doubles after a run of finite steps.

    `adjust(False)` gives `max(min_loss_scale, loss_scale * backoff_factor)` and counter 0;
    `adjust(True)` counts, and at `growth_interval` finite steps in a row gives
    `min(max_loss_scale, loss_scale * growth_factor)` and counter 0.

    All fields are leaves of the pytree, so each survives jit, scan and a checkpoint. The scale
    never becomes 0, inf or NaN. A scale that was restored as 0, inf or NaN is set to a bound. A
    large scale lifts small gradients above the smallest float16; the scale grows to find the
    largest factor without overflow.

    Args:
      loss_scale: the first scale, within the bounds.
      growth_factor: more than 1.
      backoff_factor: between 0 and 1, both excluded.
      growth_interval: finite steps in a row before the scale grows, at least 1.
      min_loss_scale, max_loss_scale: bounds within [2⁻¹²⁶, 2¹²⁶].
      counter: finite steps since the last change, at least 0.

    Raises:
      ValueError: an argument is out of its range; traced arguments are not checked.

    Dtypes:
      f32[] and, for `counter` and `growth_interval`, i32[]. Scaled and unscaled values are
      float32 (float64 and complex stay).

    Transforms:
      jit, scan, vmap, shard_map, pmap; one compilation, whatever the values.

    Example:
      >>> ls = mpjax.DynamicLossScale(4, backoff_factor=0.25, growth_interval=2)
      >>> for grads_finite in (True, True, False):
      ...     ls = ls.adjust(grads_finite)
      ...     print(float(ls.loss_scale), int(ls.counter))
      4.0 1
      8.0 0
      2.0 0

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """

    _fields = (
        "loss_scale",
        "counter",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "min_loss_scale",
        "max_loss_scale",
    )
    __slots__ = _fields
    counter: Array
    growth_factor: Array
    backoff_factor: Array
    growth_interval: Array
    min_loss_scale: Array
    max_loss_scale: Array

    @names_keywords(LOSS_SCALE, "DynamicLossScale", order=_OF_JMP)
    def __init__(
        self,
        loss_scale: ScalarLike = 2.0**15,
        *,
        growth_factor: ScalarLike = 2.0,
        backoff_factor: ScalarLike = 0.5,
        growth_interval: ScalarLike = 2000,
        min_loss_scale: ScalarLike = 1.0,
        max_loss_scale: ScalarLike = 2.0**24,
        counter: ScalarLike = 0,
    ) -> None:
        check_factors(growth_factor, backoff_factor)
        check_counts(growth_interval, counter)
        check_bounds(loss_scale, min_loss_scale, max_loss_scale)
        floats = (loss_scale, growth_factor, backoff_factor, min_loss_scale, max_loss_scale)
        start, growth, backoff, low, high = (jnp.asarray(x, jnp.float32) for x in floats)
        count, interval = (jnp.asarray(x, jnp.int32) for x in (counter, growth_interval))
        self._set((start, count, growth, backoff, interval, low, high))

    def adjust(self, grads_finite: ScalarLike) -> "DynamicLossScale":
        """Returns the loss scale of the next step.

        Args:
          grads_finite: bool[], whether this step's gradients were finite everywhere.

        Raises:
          ValueError: it is not a boolean scalar.
        """
        finite = as_pred(grads_finite, "DynamicLossScale.adjust(grads_finite)")
        # A checkpoint may have given back NumPy values or Python numbers; NumPy would warn of an
        # overflow here, and a Python number is weakly typed, which is another trace.
        values = (getattr(self, field) for field in self._fields)
        scale, counter, growth, backoff, interval, low, high = (
            jnp.asarray(x, _FIELD_DTYPES.get(field, jnp.float32))
            for field, x in zip(self._fields, values, strict=True)
        )
        # Not `counter + 1 >= interval`: a counter restored at the largest int32 would wrap.
        grows = counter >= interval - 1
        wanted = jnp.where(finite, jnp.where(grows, scale * growth, scale), scale * backoff)
        # The bounds too: they may have been restored as 0 or NaN.
        least = _bounded(low, SMALLEST, LARGEST)
        bounded = _bounded(wanted, least, _bounded(high, least, LARGEST))
        counted = jnp.where(finite & ~grows, counter + 1, jnp.zeros_like(counter))
        config = (growth, backoff, interval, low, high)
        return self.tree_unflatten(self._mark, (bounded, counted, *config))


_FIELD_DTYPES: dict[str, Any] = {"counter": jnp.int32, "growth_interval": jnp.int32}


def _bounded(x: Array, low: Array | float, high: Array | float) -> Array:
    """Returns `x` within the bounds. A NaN compares false, so that it too ends at the lower."""
    return jnp.where(x >= low, jnp.minimum(x, high), low)


def _scaled(x: Any, factor: Array, *, divide: bool) -> Any:
    """Returns `x` times or divided by `factor`; only floating and complex arrays are changed."""
    if not (is_array(x) or isinstance(x, (float, complex))):
        return x
    # float0, the gradient of integers, is no inexact type; 8-bit floats are never scaled.
    if is_array(x) and not (is_castable(x) or jnp.issubdtype(x.dtype, jnp.complexfloating)):
        return x
    x = to_full(jnp.asarray(x))  # NumPy's and Python's float64 become float32 with 64-bit types off
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # By parts: a complex quotient divides by |factor|², which may overflow.
        parts = (_scaled(part, factor, divide=divide) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    factor = jnp.asarray(factor, x.dtype)
    return x / factor if divide else x * factor


def scaled_by(x: Any, factor: Array) -> Any:
    """Returns `x` times `factor`, in float32 as `scale` does."""
    return _scaled(x, factor, divide=False)


def unscale_once_read(loss_scale: LossScale, tree: T) -> T:
    """Returns `loss_scale.unscale(tree)` in a form that a compiled step never writes to memory.

    Where XLA would write the quotients out, two more reads of every gradient, these are products
    with the reciprocal: the same for powers of two, else within two units in the last place.
    """
    if compat.QUOTIENTS_ARE_FUSED or not isinstance(loss_scale, ScalarFields):
        return loss_scale.unscale(tree)
    reciprocal = 1 / jnp.asarray(loss_scale.loss_scale)
    return map_with_path(lambda _, x: _scaled(x, reciprocal, divide=False), tree)


def _shown(x: Any) -> str:
    traced = isinstance(x, jax.core.Tracer) or not is_array(x) or x.ndim
    return repr(x) if traced else f"{x.item():g}"
