"""A value while a plan runs: made in one dtype, cast to another when an equation first reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.core import Tracer

from mpjax._autocast.decide.states import Kind, State
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr.binding import cast


class Value:
    """One value and its forms: as made, in float32, and low copies, each cast once."""

    __slots__ = ("_forms", "_lazy", "is_low", "made", "stored")

    def __init__(
        self,
        array: Any,
        state: State,
        low_copy: Any = None,
        lazy: Callable[[Any], Any] | None = None,
    ) -> None:
        self.made = array
        self.stored: Any = None  # 8-bit values and scales, if this is a weight stored in 8 bits
        self.is_low = state.kind == Kind.LOW
        self._lazy = lazy
        self._forms: dict[Any, Any] = {}
        for form in (array if self.is_low else None, low_copy):
            if form is not None:
                self._forms[form.dtype] = form

    @property
    def full(self) -> Any:
        """The value in float32; a foreign one (an integer, a float64) as it is."""
        if not self.is_low:
            return self.made
        if FLOAT32 not in self._forms:
            self._forms[FLOAT32] = cast(self.made, FLOAT32)
        return self._forms[FLOAT32]

    def low(self, dtype: Any) -> Any:
        """The value in `dtype`, cast once and shared."""
        if dtype not in self._forms:
            self._forms[dtype] = self._lazy(dtype) if self._lazy else cast(self.full, dtype)
        return self._forms[dtype]

    def made_low(self, dtype: Any) -> Any:
        """The copy in `dtype` if there is one already, else None."""
        return self._forms.get(dtype)

    def cast(self, dtype: Any) -> Any:
        """The value in `dtype`, cast here, so that its gradient is summed in float32."""
        return self.made if self.made.dtype == dtype else cast(self.full, dtype)

    def carrier(self, dtype: Any) -> Any:
        """The form that receives the gradient of a product in `dtype`: float32 unless made low.

        A constant has no gradient: it gives its low form, so that the program does not also have a
        float32 constant.
        """
        if not isinstance(self.made, Tracer):
            return self.low(dtype)
        return self.made if self.made.dtype == dtype else self.full

    def form(self, state: State) -> Any:
        """The value in the dtype of `state`."""
        return self.cast(state.dtype) if state.kind == Kind.LOW else self.full
