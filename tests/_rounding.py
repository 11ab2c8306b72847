"""How far rounding to a low dtype can move the outputs of a program, from float64 and noise.

* `reached`: which outputs depend on a matrix product. What does not must keep every bit.
* `float64_spread`: the float64 value of every output, and the standard deviation that rounding to
  the compute dtype would cause in it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _evaluate import Exact, Flags, called, is_float, is_key, open_program, scan_counts
from jax.extend.core import Literal

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# Exact where every operand has the same dtype: these round only what was not low yet.
_SELECTING_NAMES = """
max min select_n clamp concatenate pad dynamic_update_slice scatter scatter-max scatter-min stack
"""
_SELECTING = frozenset(_SELECTING_NAMES.split())
# Exact: they move values or pick them.
_MOVING_NAMES = """
abs neg sign copy copy_p reshape squeeze expand_dims transpose rev broadcast_in_dim slice
dynamic_slice gather split tile reduce_max reduce_min reduce_window_max reduce_window_min cummax
cummin sort top_k stop_gradient name optimization_barrier real imag reduce_precision argmax argmin
eq ne lt le gt ge is_finite
"""
_MOVING = frozenset(_MOVING_NAMES.split())
_STEPS = frozenset({"floor", "ceil", "round", "sign"})  # jump where an operand crosses a value


# -- what depends on a product -----------------------------------------------------------------


class Reach:
    """Which values depend on a matrix product, found once for a program and its operands' flags."""

    def __init__(self, everything: bool = False) -> None:
        """With `everything`, what depends on any floating argument or constant, samples apart."""
        self._everything = everything
        self._known: dict[Any, tuple[list[tuple[Flags, Flags]], Flags]] = {}
        self.bound: dict[Any, tuple[Any, Any]] = {}  # what binding gave that no float changes

    def of(self, program: Any, flags: Flags) -> tuple[list[tuple[Flags, Flags]], Flags]:
        """Returns (operands', results') flags for each equation, and those of the outputs."""
        jaxpr, _ = open_program(program)
        found = self._known.get((id(jaxpr), flags))
        if found is None:
            env: dict[Any, bool] = {
                v: self._everything and is_float(v.aval.dtype) for v in jaxpr.constvars
            }
            env |= dict(zip(jaxpr.invars, flags, strict=True))
            rows = []
            for eqn in jaxpr.eqns:
                operands = tuple(self._flag(env, atom) for atom in eqn.invars)
                results = self._results(eqn, operands)
                env.update(zip(eqn.outvars, results, strict=True))
                rows.append((operands, results))
            found = rows, tuple(self._flag(env, atom) for atom in jaxpr.outvars)
            self._known[id(jaxpr), flags] = found
        return found

    def _flag(self, env: dict[Any, bool], atom: Any) -> bool:
        return not isinstance(atom, Literal) and env[atom]

    def _results(self, eqn: Any, flags: Flags) -> Flags:
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, flags)[1]
        if name == "while":
            return self.loop(eqn, flags)[1]
        if name == "cond":
            branches = [self.of(branch, flags[1:])[1] for branch in eqn.params["branches"]]
            return tuple(flags[0] or any(each) for each in zip(*branches, strict=True))
        program = called(eqn)
        if program is not None:
            return self.of(program, flags)[1]
        product = name in PRODUCTS and is_float(eqn.outvars[0].aval.dtype)
        return (product or any(flags),) * len(eqn.outvars)

    def scan(self, eqn: Any, flags: Flags) -> tuple[Flags, Flags]:
        """Returns the flags of the body's operands, and of the results of a scan."""
        consts, carry = scan_counts(eqn)
        while True:
            out = self.of(eqn.params["jaxpr"], flags)[1]
            grown = tuple(a or b for a, b in zip(flags[consts:], out[:carry], strict=False))
            grown = (*flags[:consts], *grown, *flags[consts + carry :])
            if grown == flags:
                return flags, out
            flags = grown

    def loop(self, eqn: Any, flags: Flags) -> tuple[Flags, Flags]:
        """Returns the flags of all operands of a while loop, and of its results."""
        first = eqn.params["cond_nconsts"]
        start = first + eqn.params["body_nconsts"]
        while True:
            out = self.of(eqn.params["body_jaxpr"], flags[first:])[1]
            decides = self.of(eqn.params["cond_jaxpr"], (*flags[:first], *flags[start:]))[1][0]
            carry = tuple(a or b or decides for a, b in zip(flags[start:], out, strict=True))
            if carry == flags[start:]:
                return flags, carry
            flags = (*flags[:start], *carry)


def reached(program: Any) -> Flags:
    """Returns, for each output, whether it depends on a matrix product."""
    return Reach().of(program, (False,) * len(program.jaxpr.invars))[1]


# -- float64 with noise ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """What rounding to a dtype does: a relative error, an absolute one where it is subnormal."""

    relative: float
    absolute: float

    @classmethod
    def to(cls, dtype: Any) -> "Rounding":
        """Returns the largest errors of rounding to nearest."""
        info = jnp.finfo(dtype)
        return cls(relative=float(info.eps) / 2, absolute=float(info.smallest_subnormal) / 2)


# The float32 program that is compared is itself only this near to float64: XLA's polynomials.
_FLOAT32 = Rounding(relative=2.0**-21, absolute=2.0**-149)
_NO_ROUNDING = Rounding(relative=0.0, absolute=0.0)


class Noisy(Exact):
    """Float64, with independent normal noise wherever autocast is free to round.

    Values that depend on a product carry noise of `low` where an operation made them, and more
    where one reads them: one reader may see the value and another its low copy. What does not
    depend on one carries that of float32 alone, and a single low copy where an operation that
    does depend on one reads it: a weight is cast once. What moves or picks values adds nothing.
    """

    def __init__(self, rng: np.random.Generator, low: Rounding, full: Rounding, reach: Reach):
        self._rng, self._low, self._full, self._reach = rng, low, full, reach
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.decisions: list[Any] = []  # every integer or boolean, and every step, found by floats
        self.scale = 0.0  # how many deviations of noise there are
        self.peak = 0.0  # the largest magnitude that autocast may have to hold in the low dtype

    def dtype(self, dtype: Any) -> Any:
        return np.dtype(np.float64) if not is_key(dtype) and is_float(dtype) else dtype

    def rows(self, program: Any, flags: Flags) -> list[tuple[Flags, Flags]]:
        return self._reach.of(program, flags)[0]

    def equation(self, eqn: Any, values: list[Any], flags: Flags, out: Flags) -> list[Any]:
        name = eqn.primitive.name
        if name == "scan":  # a carry that becomes low is low from its first value on
            now = self._reach.scan(eqn, flags)[0]
        elif name == "while":
            now = self._reach.loop(eqn, flags)[0]
        else:
            return self._agreed(eqn, super().equation(eqn, values, flags, out), out)
        values = [
            self._copy(v) if late and not early else v
            for v, early, late in zip(values, flags, now, strict=True)
        ]
        return super().equation(eqn, values, now, out)

    def _agreed(self, eqn: Any, outs: list[Any], flags: Flags) -> list[Any]:
        # A branch that returns an operand as it is rounds it when another branch returns a low one.
        if eqn.primitive.name != "cond":
            return outs
        return [self._copy(v) if flag else v for v, flag in zip(outs, flags, strict=True)]

    def operation(self, eqn: Any, values: list[Any], flags: Flags, out: Flags) -> list[Any]:
        name = eqn.primitive.name
        low = bool(out) and out[0]
        moving = name in _MOVING
        if low and not moving:
            fresh = name not in _SELECTING
            order = values[:1] if name == "polygamma" else []  # which derivative: a whole number
            values = [
                (self._noise(v, self._low) if fresh else v) if flag else self._copy(v)
                for v, flag in zip(values, flags, strict=True)
            ]
            values[: len(order)] = order
        outs = super().operation(eqn, values, flags, out)
        if name in _STEPS or any(not self._floating(o) for o in outs):
            if any(self._floating(v) for v in values):
                self.decisions.extend(outs)
        elif name == "rem":
            self.decisions.append(np.trunc(values[0] / values[1]))
        if moving or name in _SELECTING:
            return outs
        if low:
            self._measure(outs)
        rounding = self._low if low else self._full
        return [
            self._noise(o, self._asked(v.aval.dtype, rounding))
            for o, v in zip(outs, eqn.outvars, strict=True)
        ]

    def _asked(self, dtype: Any, rounding: Rounding) -> Rounding:
        """Returns the coarser of a rounding and that of a 16-bit dtype that the program names."""
        if rounding is _NO_ROUNDING or is_key(dtype) or not is_float(dtype) or dtype.itemsize > 2:
            return rounding
        return max(rounding, Rounding.to(dtype), key=lambda r: r.relative)

    def bound(self, eqn: Any, values: list[Any]) -> Any:
        """Binds an operation; what reads no floats, as random bits do, once for all runs."""
        if any(self._floating(v) for v in values):
            return self._in_64_bits(eqn, values)
        arrays = [jax.random.key_data(v) if is_key(v.dtype) else v for v in values]
        same = (id(eqn), *(np.asarray(a).tobytes() for a in arrays))
        if same not in self._reach.bound:  # beside its equation: the id is not given to another
            self._reach.bound[same] = self._in_64_bits(eqn, values), eqn
        return self._reach.bound[same][0]

    def _in_64_bits(self, eqn: Any, values: list[Any]) -> Any:
        with jax.enable_x64(True):
            return super().bound(eqn, values)

    @staticmethod
    def _floating(value: Any) -> bool:
        return not is_key(value.dtype) and value.dtype.kind == "f"

    def _noise(self, value: Any, rounding: Rounding) -> Any:
        if rounding is _NO_ROUNDING or not self._floating(value):
            return value
        first, second = self._rng.standard_normal((2, *value.shape))
        return value * (1 + rounding.relative * first) + rounding.absolute * second

    def _copy(self, value: Any) -> Any:
        if self._low is _NO_ROUNDING or not self._floating(value):
            return value
        kept = self._copies.get(id(value))
        if kept is None:  # the value itself is kept too: its id must not be given to another
            kept = self._copies[id(value)] = value, self._noise(value, self._low)
        return kept[1]

    def _measure(self, outs: list[Any]) -> None:
        for out in outs:
            if self._floating(out) and out.size:
                peak = float(np.abs(out).max())
                self.peak = max(self.peak, math.inf if math.isnan(peak) else peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Float64 outputs of a program with what rounding does to them."""

    values: list[Any]
    deviations: list[Any]  # one standard deviation, element by element
    decided: bool  # no integer, boolean or step depends on how values are rounded
    peak: float


SAMPLES = 12
# |error| / (root mean square of SAMPLES normal samples of the same deviation) follows Student's t
# with SAMPLES degrees of freedom, if errors are normal; roundings are bounded by one unit, where
# the noise has one unit as its deviation, so they stay below it. Exceeded once in 10⁹ elements.
QUANTILE = 16.9


def float64_spread(
    program: Any,
    args: Sequence[Any],
    low: Any,
    *,
    all_low: bool = False,
    seed: int = 0,
    kind: Any = Noisy,
    count: int = SAMPLES,
    quantile: float = QUANTILE,
) -> Spread:
    """Returns the float64 outputs of a program and the deviation that rounding to `low` causes.

    Each rounding δ contributes a·δ to an output, a being the output's derivative times the value.
    Normal noise of one unit roundoff in place of each δ gives the output a deviation of ‖a‖·unit
    to first order, whatever the program; `count` runs estimate it. Two more runs with `quantile`
    times the noise tell whether a comparison could come out differently. With `all_low`, what
    depends on no product may be rounded too: the cotangent of a low value is low. `kind` makes the
    noise.
    """
    rng = np.random.default_rng(seed)
    rounding = Rounding.to(low)
    reach = Reach(everything=all_low)
    flags = tuple(all_low and is_float(v.aval.dtype) for v in program.jaxpr.invars)

    def run(scale: float) -> tuple[list[Any], Noisy]:
        noise = (_NO_ROUNDING, _NO_ROUNDING)
        if scale:
            pair = (rounding, _FLOAT32)
            noise = tuple(
                Rounding(relative=r.relative * scale, absolute=r.absolute * scale) for r in pair
            )
        noisy = kind(rng, *noise, reach)
        noisy.scale = scale
        outs = noisy.run(program, noisy.inputs(program, args), flags)
        return outs, noisy

    with np.errstate(all="ignore"):
        values, plain = run(0)
        samples = [run(1) for _ in range(count)]
        wide = [run(quantile) for _ in range(2)]
    decided = all(_same(plain.decisions, other.decisions) for _, other in samples + wide)
    columns = zip(*(outs for outs, _ in samples), strict=True)
    deviations = [_deviation(v, column) for v, column in zip(values, columns, strict=True)]
    return Spread(values=values, deviations=deviations, decided=decided, peak=plain.peak)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _deviation(value: Any, column: Sequence[Any]) -> Any:
    if is_key(value.dtype) or value.dtype.kind != "f":
        return None
    return np.sqrt(np.mean([np.square(sample - value) for sample in column], axis=0))
