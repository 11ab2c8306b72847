"""Products in 8 bits for `_differential`: in NumPy as they are, and in float64 with their noise."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from _evaluate import Exact
from _products import backends, operands
from _rounding import Noisy

# Student's t of 40 degrees of freedom is beyond it once in 10⁹: see `_rounding.QUANTILE`.
SAMPLES, QUANTILE = 16, 12.6
# Of uniform errors of half a step: of values that are scaled to a largest one, and relative ones.
_UNIFORM = 1 / np.sqrt(3)
_FORMATS = {  # half the relative step, half the least step, the largest value
    "int8": (0.0, 0.5, 127.0),
    "e4m3": (2.0**-4, 2.0**-10, 448.0),
    "e5m2": (2.0**-3, 2.0**-17, 57344.0),
}


class EightBit(Exact):
    """Evaluates what autocast makes of a program, products of derivatives in 8 bits included."""

    def _low_product(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = eqn.params["program"]
        if not program.config.is_scaled:
            return super()._low_product(eqn, values)
        out = eqn.outvars[0].aval
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

        def product(*args: Any) -> Any:
            arrays, stored = operands.parted(args, eqn.params["kept"])
            return program.run(arrays, out.dtype, backends.TRACED, stored)

        return self.run(jax.make_jaxpr(product)(*structs), values)

    def operation(self, eqn: Any, values: list[Any], flags: Any, out: Any) -> list[Any]:
        if eqn.primitive.name == "dot_general" and values[0].dtype == np.int8:
            values = [v.astype(np.int32) for v in values]  # NumPy adds up in the operands' dtype
        return super().operation(eqn, values, flags, out)


def evaluate(program: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr, every operation in its own dtype."""
    exact = EightBit()
    with np.errstate(all="ignore"):
        return exact.run(program, exact.inputs(program, args))


class NoisyProducts(Noisy):
    """Float64 with noise, and that of 8 bits in the operands of each product."""

    def __init__(self, *args: Any, recipe: Any) -> None:
        super().__init__(*args)
        self._recipe = recipe

    def operation(self, eqn: Any, values: list[Any], flags: Any, out: Any) -> list[Any]:
        if eqn.primitive.name == "dot_general" and self.scale:
            dims = eqn.params["dimension_numbers"]
            operands = zip(values[:2], *dims, strict=True)
            values = [self._eight_bit(v, summed, kept) for v, summed, kept in operands]
        return super().operation(eqn, values, flags, out)

    def _eight_bit(self, value: Any, summed: Any, kept: Any) -> Any:
        if not self._floating(value) or not summed:
            return value
        names = {name for pair in self._recipe.products.values() for name in pair or ()}
        relative, absolute, largest = np.max([_FORMATS[name] for name in names], axis=0)
        if "e5m2" in names:  # each value is as wrong as that of the coarser of both is
            absolute, largest = _FORMATS["e4m3"][1:]
        shared = tuple(summed)
        if self._recipe.granularity == "tensor":
            shared = tuple(i for i in range(value.ndim) if i not in kept)
        amax = np.abs(value).max(axis=shared, keepdims=True, initial=0.0)
        deviation = relative * np.abs(value) + absolute * amax / largest
        noise = self._rng.standard_normal(value.shape)
        return value + self.scale * _UNIFORM * deviation * noise


def spread_options(recipe: Any) -> dict[str, Any]:
    """Returns the options of `float64_spread` for products under a recipe."""
    kind = functools.partial(NoisyProducts, recipe=recipe)
    return {"kind": kind, "count": SAMPLES, "quantile": QUANTILE}
