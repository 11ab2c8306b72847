"""Numbers values by what they are computed of: equal values have one number.

A program is walked as if calls were inlined and moves were absent: a value that was reshaped, or
padded and cut out again, has the number that it had. Loops on the same operands with the same
bodies give the same results, and what one loop stacks is, row by row, the same in a later loop, as
in the one that JAX differentiates it by. Random bits of one key are equal, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._autocast.decide.decided import Decided, Decision
from mpjax._autocast.known import arrays, contraction, scopes, traits
from mpjax._base import compat
from mpjax._jaxpr import keys, structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS, hands_on_each, has_effects
from mpjax._jaxpr.sizes import is_float32, size

_PUT_AMONG_OTHERS = frozenset({"pad", "dynamic_update_slice", "scatter"})
_MAY_GIVE_BACK = MOVES - {"neg", "abs", "sign"} | traits.JOINS | _PUT_AMONG_OTHERS
"""They may give back the elements that they were given, in the same places."""
_EMPTY = frozenset({"empty", "empty2"})
_RESHAPES = traits.RESHAPES | {"broadcast_in_dim"}

_COMBINES = traits.SHIFTS | traits.SCALES
"""Where two copies may cancel: with opposite signs, as in `a - b`, `a + (-b)` and `a * (1 / b)`."""
_INVERTS = frozenset({"neg", "rsqrt"})
_MAY_INVERT = traits.SCALES | {"pow"}  # by something negative, unless it is a known number
_BACK = {"row": "rows", "rows": "row"}
_EVEN = frozenset({"abs", "square", "cos", "cosh"})


class Copy(NamedTuple):
    """A product that is computed at several places, as a value is made of it."""

    number: int
    place: int  # in the walk
    opposite: bool | None = False  # negated, or divided by; None: scaled by an unknown number


Copies = frozenset[Copy]
_NONE: Copies = frozenset()


class Numbered(NamedTuple):
    """A value: its number, and the products that it is made of which are computed twice."""

    number: int
    copies: Copies = _NONE


class Visit(NamedTuple):
    """A product, as the walk comes by."""

    number: int
    decision: Decision
    operands: tuple[int, ...]
    read: int  # in flags


class Numbering:
    """One walk over a program that is decided about.

    Args:
      repeated: the numbers of products that are computed twice; it is told where copies meet.
    """

    def __init__(self, repeated: frozenset[int] = frozenset()) -> None:
        self.visits: list[Visit] = []
        self._reads: dict[int, dict[Any, int]] = {}  # by number: how each variable of it is read
        self.meeting: set[Any] = set()  # variables of which one is subtracted from its copy
        self.subtracts_backward = False  # as an author's rule does, and transposition does not
        self._repeated = repeated
        self._in_derivative = 0
        self._numbers: dict[Hashable, int] = {}
        self._constants: set[int] = set()
        self._uniform: set[int] = set()  # one number, or copies of it
        self._empty: set[int] = set()  # zeros, or what JAX leaves in place of a branch's values
        self._given: dict[int, int] = {}  # inputs, and parts of them: of which input
        self._turned_back: dict[tuple[str, int], int] = {}  # what a loop's rows are of
        self._moved: dict[int, dict[Any, int]] = {}  # what it was moved from, by shape
        self._placed: dict[int, tuple[bool, list[int]]] = {}  # whether it was cut out, and where

    def walk(self, decided: Decided) -> None:
        """Numbers the values of a whole program."""
        inputs = [self._fresh() for _ in decided.jaxpr.jaxpr.invars]
        self._given = {v.number: v.number for v in inputs}
        self._plan(decided, inputs)

    def given(self, number: int) -> int | None:
        """Returns the input of the whole program that a value is, or a part of; None for others."""
        while ("rows", number) in self._turned_back:
            number = self._turned_back["rows", number]
        return self._given.get(number)

    def reads(self) -> list[dict[Any, int]]:
        """Returns how the variables are read that have one value, where several have."""
        several = [(n, flags) for n, flags in self._reads.items() if len(flags) > 1]
        return [flags for n, flags in several if n not in self._constants]

    def _fresh(self) -> Numbered:
        return Numbered(self._of(object()))

    def _of(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _plan(self, decided: Decided, inputs: Sequence[Numbered]) -> list[Numbered]:
        """Numbers the values of a program; returns its outputs."""
        decisions = {d.eqn.outvars[0]: d for d in decided.decisions if d.eqn.outvars}
        return self._program(decided.jaxpr, inputs, decisions, decided.reads)

    def _program(
        self,
        program: Any,
        inputs: Sequence[Numbered],
        decisions: Mapping[Any, Decision],
        flags: Mapping[Any, int],
    ) -> list[Numbered]:
        closed = compat.closed(program)
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, value in zip(jaxpr.constvars, closed.consts, strict=True):
            # Programs inside hold the same object, and what is traced again may hold an equal one.
            env[v] = Numbered(self._of(("constant", arrays.name(value))))
        literal = self._literal
        for eqn in jaxpr.eqns:
            operands = [literal(v) if compat.is_literal(v) else env[v] for v in eqn.invars]
            made = self._equation(eqn, operands, decisions, flags)
            for v, value in zip(eqn.outvars, made, strict=True):
                env[v] = value
                if (read := flags.get(v)) is not None:
                    self._reads.setdefault(value.number, {})[v] = read
        return [literal(v) if compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    def _literal(self, atom: Any) -> Numbered:
        aval = atom.aval
        number = self._of((aval.dtype, aval.shape, np.asarray(atom.val).tobytes()))
        self._constants.add(number)
        if not aval.shape:
            self._uniform.add(number)
        if not np.any(atom.val):
            self._empty.add(number)
        return Numbered(number)

    def _equation(
        self,
        eqn: Eqn,
        operands: list[Numbered],
        decisions: Mapping[Any, Decision],
        flags: Mapping[Any, int],
    ) -> Sequence[Numbered]:
        name = eqn.primitive.name
        if structure.is_call(eqn):
            decision = decisions.get(eqn.outvars[0]) if eqn.outvars else None
            return self._call(eqn, operands, decision)
        if has_effects(eqn) or not eqn.outvars:
            return [self._fresh() for _ in eqn.outvars]
        if _is_barrier(eqn):
            return operands
        numbers = self._results(eqn, [v.number for v in operands])
        self.subtracts_backward |= name == "sub" and self._is_backward(eqn)
        if name in MOVES and (given := self._part_of(eqn, operands)) is not None:
            self._given.update(dict.fromkeys(numbers, given))
        if name in PRODUCTS and (decision := decisions.get(eqn.outvars[0])) is not None:
            of = tuple(v.number for v in operands[:2])
            self.visits.append(Visit(numbers[0], decision, of, flags.get(eqn.outvars[0], 0)))
        if not self._repeated:
            return list(map(Numbered, numbers))
        copies = self._copies(eqn, numbers, operands)
        return [
            Numbered(n, copies if is_float32(v) else _NONE)
            for n, v in zip(numbers, eqn.outvars, strict=True)
        ]

    def _is_backward(self, eqn: Eqn) -> bool:
        return self._in_derivative > 0 or scopes.is_transposed(eqn)

    def _part_of(self, eqn: Eqn, operands: Sequence[Numbered]) -> int | None:
        """Returns the one input that all operands are parts of, but for indices and constants."""
        pairs = zip(eqn.invars, operands, strict=True)
        moved = {v.number for atom, v in pairs if is_float32(atom)} - self._constants
        inputs = set(map(self.given, moved))
        return inputs.pop() if len(inputs) == 1 else None

    def _results(self, eqn: Eqn, operands: list[int]) -> list[int]:
        """Returns the numbers of an operation's results."""
        name, outs = eqn.primitive.name, eqn.outvars
        shape = outs[0].aval.shape if outs else ()
        first = self._of((name, *keys.printed_params(eqn), shape, *operands))
        numbers = [first, *(self._of((first, i)) for i in range(1, len(outs)))]
        if self._constants.issuperset(operands):
            if name == "rev":  # a convolution's gradient reads the kernel so
                return operands
            self._constants.update(numbers)
            if name in _EMPTY or (name in MOVES and self._empty.issuperset(operands)):
                self._empty.update(numbers)
            if name == "broadcast_in_dim" and self._uniform.issuperset(operands):
                self._uniform.update(numbers)
        elif name in _MAY_GIVE_BACK and (one := self._one(eqn, operands)) is not None:
            if self._is_shifted(eqn, operands, first, one[0]):
                return numbers
            if name in _RESHAPES and size(shape) == size(one[1]):
                numbers = [self._of(("reshaped", one[0], shape))]
            return [
                self._as_moved(n, *one, v) if is_float32(v) else n
                for n, v in zip(numbers, outs, strict=True)
            ]
        return numbers

    def _one(self, eqn: Eqn, operands: Sequence[int]) -> tuple[int, Any] | None:
        """Returns the one value that an operation moves, with its shape; None for several."""
        one = None
        for atom, number in zip(eqn.invars, operands, strict=True):
            if atom.aval.dtype == np.bool_ and number not in self._uniform:
                return None  # some elements are chosen
            if number in self._constants or not is_float32(atom):
                continue
            if one is not None and one[0] != number:
                return None
            one = number, atom.aval.shape
        return one

    def _is_shifted(self, eqn: Eqn, operands: Sequence[int], made: int, of: int) -> bool:
        """Whether a value is padded and cut out again, or the reverse, at another place.

        Such are the neighbours in a window, and tokens that are one later.
        """
        if eqn.primitive.name == "slice":
            place = True, list(eqn.params["start_indices"])
        elif eqn.primitive.name == "pad":
            place = False, [low for low, _, _ in eqn.params["padding_config"]]
        elif eqn.primitive.name == "concatenate":
            before = eqn.invars[: list(operands).index(of)]
            along, starts = eqn.params["dimension"], [0] * eqn.outvars[0].aval.ndim
            starts[along] = sum(v.aval.shape[along] for v in before)
            place = False, starts
        else:
            return False
        self._placed[made] = place
        is_cut, earlier = self._placed.get(of, place)
        return is_cut != place[0] and earlier != place[1]

    def _as_moved(self, number: int, of: int, shape: Any, out: Any) -> int:
        """Returns a moved value's number: the old one if it is moved back to an earlier shape."""
        before = self._moved.get(of, {})
        if out.aval.shape == shape:
            return of
        if out.aval.shape in before:
            return before[out.aval.shape]
        self._moved.setdefault(number, {**before, shape: of})
        return number

    # -- programs inside ---------------------------------------------------------------------------

    def _call(
        self, eqn: Eqn, operands: list[Numbered], decision: Decision | None
    ) -> list[Numbered]:
        plans = decision.call.programs if decision is not None and decision.call else None
        made: list[list[Numbered]] = []
        is_loop = eqn.primitive.name in structure.LOOPS
        self._in_derivative += scopes.is_transposed(eqn)  # what is computed again there, too
        for i, part in enumerate(structure.parts(eqn)):
            inputs = [operands[place] for place in part.operands]
            if is_loop:
                inputs = self._entering(eqn, part, inputs)
            if plans is not None:
                outs = self._plan(plans[i], inputs)
            else:
                outs = self._program(part.program, inputs, {}, {})
            made.append(outs)
        self._in_derivative -= scopes.is_transposed(eqn)
        if is_loop:
            return self._leaving(eqn, operands, made)
        first, *others = made
        if not others:
            return first
        return [self._chosen(operands[0], each) for each in zip(*made, strict=True)]

    def _chosen(self, by: Numbered, branches: Sequence[Numbered]) -> Numbered:
        numbers = {v.number for v in branches}
        made = numbers - self._empty
        numbers = made if len(made) == 1 else numbers
        key = ("one of", by.number, *(v.number for v in branches))
        return Numbered(numbers.pop() if len(numbers) == 1 else self._of(key), _union(branches))

    def _entering(self, eqn: Eqn, part: structure.Part, inputs: list[Numbered]) -> list[Numbered]:
        """Returns the inputs of a loop's body: carries and rows differ by turn, if it has many."""
        before = [eqn.invars[place] for place in part.operands]
        inside = compat.closed(part.program).jaxpr.invars
        start, stop = part.carried.start, part.carried.stop
        all_of = self._of(("operands", *_turns(eqn), *(v.number for v in inputs)))
        carried = _union(inputs)
        for i in range(start, len(inputs)):
            value = inputs[i]
            if i >= stop:
                inputs[i] = self._turned(eqn, "row", value, before[i], inside[i])
            elif not _is_one_turn(eqn):
                inputs[i] = Numbered(self._of(("carried", i - start, all_of)), carried)
        return inputs

    def _turned(self, eqn: Eqn, how: str, value: Numbered, before: Any, after: Any) -> Numbered:
        """Returns a row of a value, or the rows of one: again what it was, if it is turned back."""
        if (number := self._turned_back.get((how, value.number))) is None:
            number = self._of((how, value.number))
            self._turned_back[_BACK[how], number] = value.number
        if _is_one_turn(eqn):
            number = self._as_moved(number, value.number, before.aval.shape, after)
        return value._replace(number=number)

    def _leaving(
        self, eqn: Eqn, operands: list[Numbered], made: list[list[Numbered]]
    ) -> list[Numbered]:
        body = structure.parts(eqn)[-1]
        outs, inside = made[-1], compat.closed(body.program).jaxpr.outvars
        carries = body.carries
        rows = zip(outs[carries:], inside[carries:], eqn.outvars[carries:], strict=True)
        stacked = [self._turned(eqn, "rows", v, a, b) for v, a, b in rows]
        if _is_one_turn(eqn):
            return [*outs[:carries], *stacked]
        numbers = [v.number for v in (*operands, *(v for values in made for v in values))]
        all_of = self._of(("loop", *_turns(eqn), *numbers))
        carried = _union(outs)
        left = [Numbered(self._of(("result", i, all_of)), carried) for i in range(carries)]
        return [*left, *stacked]

    # -- copies ------------------------------------------------------------------------------------

    def _copies(self, eqn: Eqn, made: Sequence[int], operands: Sequence[Numbered]) -> Copies:
        """Returns the repeated products behind an operation, and notes where copies meet."""
        name = eqn.primitive.name
        if contracts(eqn):
            return self._repeats(eqn, made[0], [v.number for v in operands])
        if name in traits.STATISTIC and not eqn.outvars[0].aval.shape:
            return _NONE  # a loss: another one, of the other copy, cancels nothing
        copies = [v.copies for v in operands]
        if name in _EVEN or (name == "integer_pow" and eqn.params["y"] % 2 == 0):
            copies = [frozenset(c._replace(opposite=False) for c in each) for each in copies]
        if name in ("sub", "div"):
            copies[1] = _inverted(copies[1])
        if name in _INVERTS or _is_by_a_negative(eqn):
            copies = list(map(_inverted, copies))
        if name in _COMBINES:
            self._meet(eqn, copies, not self._is_backward(eqn))
        union = _NONE.union(*copies)
        has_sign = name not in _MAY_INVERT or any(map(compat.is_literal, eqn.invars))
        return union if has_sign else frozenset(c._replace(opposite=None) for c in union)

    def _repeats(self, eqn: Eqn, made: int, operands: Sequence[int]) -> Copies:
        """Returns what is followed from a product on: the product, if it is computed twice."""
        return frozenset({Copy(made, len(self.visits))} if made in self._repeated else ())

    def _meet(self, eqn: Eqn, copies: Sequence[Copies], is_forward: bool) -> None:
        """Notes the operands of a sum or a ratio, if copies meet in it and may cancel."""
        if is_forward and cancel(eqn.primitive.name, *copies):
            self.meeting.update(compat.variables(eqn))


def contracts(eqn: Eqn) -> bool:
    """Whether an operation is a product on matrix units."""
    return contraction.is_product(eqn) and not contraction.only_sums(eqn)


def _union(values: Iterable[Numbered]) -> Copies:
    return _NONE.union(*(v.copies for v in values))


def _inverted(copies: Copies) -> Copies:
    return frozenset(
        c if c.opposite is None else c._replace(opposite=not c.opposite) for c in copies
    )


def _is_by_a_negative(eqn: Eqn) -> bool:
    """Whether an equation multiplies by a negative number, or has a negative power."""
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] < 0
    literals = [v for v in eqn.invars if compat.is_literal(v) and is_float32(v)]
    return eqn.primitive.name in _MAY_INVERT and any(v.val < 0 for v in literals)


def cancel(name: str, first: Copies, second: Copies) -> bool:
    """Whether two values are of one product, computed at two places, with opposite signs.

    An unknown sign may be the opposite one, but in `mul`: derivatives multiply by all kinds.
    """
    places = [{(c.number, c.place) for c in each} for each in (first, second)]
    if places[0] == places[1]:
        return False  # of the same copies, as a value and its mean
    pairs = itertools.product(first, second)
    apart = [(a, b) for a, b in pairs if a.number == b.number and a.place != b.place]
    signs = [{a.opposite, b.opposite} for a, b in apart]
    return {True, False} in signs or (name != "mul" and any(None in both for both in signs))


def _is_barrier(eqn: Eqn) -> bool:
    """Whether each result of an operation is one of its operands, as it is."""
    pairs = zip(eqn.invars, eqn.outvars, strict=False)
    return hands_on_each(eqn) and all(a.aval.shape == b.aval.shape for a, b in pairs)


def _is_one_turn(eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1


def _turns(eqn: Eqn) -> list[Any]:
    return [eqn.params.get(name) for name in ("length", "reverse")]
