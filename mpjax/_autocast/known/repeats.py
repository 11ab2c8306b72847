"""Along which axes a value repeats itself, and what was added to others so: a bias, over examples.

A mean over examples takes such a bias with it, and `y - y.mean(0)` cancels it, however large it is.
So does a product that adds up examples, as `weights @ y`. A slice along an axis on which it repeats
keeps it as well: `y[1:] - y[:-1]` cancels it, too. Axes are bits, `1 << axis`, of the value that is
asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._autocast.known import contraction, roots, totals, traits
from mpjax._autocast.known.fact_flags import (
    ALIKE,
    CONSTANT,
    DERIVED,
    PRODUCT,
    SCALAR,
    is_epsilon,
    may_be_a_bias_of_one,
)
from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import MOVES, PRODUCTS
from mpjax._jaxpr.sizes import is_number, size

_EVERY = -1
_MOST = 8
_PUT_TOGETHER = traits.PUTS_TOGETHER | traits.UPDATES
_PRESERVE_AXES = MOVES | _PUT_TOGETHER | traits.ACROSS | {"reduce_window_sum"}
_PRESERVE_ADDED = traits.ADDS | traits.POWERS | traits.LIMITS | traits.COMPLEX | {"rsqrt"}
_STARTS = traits.ADDS | {"broadcast_in_dim"}
_ELEMENTWISE = traits.OF_FEW - MOVES - _PUT_TOGETHER


class Added(NamedTuple):
    """A root that was added to a value, and the axes along which what was added repeats."""

    root: roots.Root
    along: int
    shape: tuple[Any, ...]  # the value's, when its axes were `along`; it was reshaped since
    by_product: bool = False  # a product took it along, as `weights @ y`

    def within(self, shape: Sequence[Any]) -> int:
        """Returns the axes of a shape along which it repeats."""
        same = self.shape == shape
        return self.along if same else _reshaped(self.shape, shape, self.along)


Told = tuple[int, frozenset[Added]]
"""The axes along which a value repeats, and what was added to it."""
NOTHING: Told = (0, frozenset())


def may_tell(eqn: Eqn, operands: Sequence[Any]) -> bool:
    """Whether a result of an equation may repeat along some axes, or have something added."""
    name = eqn.primitive.name
    return name in _STARTS or any(f.along or f.added for f in operands)


def told(eqn: Eqn, out: Any, operands: Sequence[Any], *, cancels: bool) -> Told:
    """Returns what is told of a result of an equation.

    Args:
      eqn: one that no derivative made.
      out: the result.
      operands: the facts of its operands.
      cancels: whether it is a difference that takes off again what was added.
    """
    name = eqn.primitive.name
    floats = [(v, f) for v, f in zip(eqn.invars, operands, strict=True) if is_number(v)]
    if name in _ELEMENTWISE:
        return _elementwise(eqn, floats, cancels=cancels)
    if name in _PUT_TOGETHER:
        handed_on = (_moved(eqn, out, v, f, operands)[1] for v, f in floats)
        return 0, _few(frozenset[Added]().union(*handed_on))
    if name in PRODUCTS and not contraction.only_sums(eqn):
        return 0, _few(_taken_along(eqn, out, floats))
    return _moved(eqn, out, *floats[0], operands)


def shared(first: Any, second: Any) -> bool:
    """Whether a bias was added to both of two values, or one is the bias of the other."""
    if not (first.added or second.added):
        return False
    to_first, to_second = (
        frozenset(a.root for a in f.added if not (a.by_product or roots.is_constant(a.root)))
        for f in (first, second)
    )
    if not to_first.isdisjoint(to_second):
        return True
    return roots.meet(to_first, second.roots) or roots.meet(to_second, first.roots)


def is_level(first: Any, second: Any) -> bool:
    """Whether a product took along what was added to a value: `weights @ u` beside `u`."""
    taken = frozenset(a.root for a in first.added if a.by_product)
    return roots.meet(taken, frozenset(a.root for a in second.added))


def entered(fact: Any, atom: Any, part: structure.Part, place: int) -> Any:
    """Returns the fact of an operand inside a program; a loop slices some."""
    return _shifted(fact, atom, compat.closed(part.program).jaxpr.invars[place])


def left(facts: Sequence[Any], outside: Sequence[Any], part: structure.Part) -> list[Any]:
    """Returns the facts of a program's results outside; a loop stacks some."""
    inside = compat.closed(part.program).jaxpr.outvars
    return [_shifted(*each) for each in zip(facts, inside, outside, strict=True)]


def _shifted(fact: Any, before: Any, after: Any) -> Any:
    by = len(after.aval.shape) - len(before.aval.shape) if fact.along or fact.added else 0
    if not by:
        return fact

    def shift(along: int) -> int:  # a loop adds the same in each turn
        return along << by | ~(_EVERY << by) if by > 0 else along >> -by

    before, after = before.aval.shape, after.aval.shape
    added = frozenset(a._replace(along=shift(a.within(before)), shape=after) for a in fact.added)
    return fact._replace(along=shift(fact.along), added=added)


def renumbered(added: frozenset[Added], number: Callable[[int], int]) -> frozenset[Added]:
    """Returns what was added in other numbers, asked for in order."""
    ordered = sorted(added, key=_last)
    made = ((roots.renumbered(frozenset({a.root}), number), a) for a in ordered)
    return frozenset(a._replace(root=root) for (root,), a in made)


def _elementwise(eqn: Eqn, floats: Sequence[tuple[Any, Any]], *, cancels: bool) -> Told:
    name, out = eqn.primitive.name, eqn.outvars[0]
    if not out.aval.shape:
        return NOTHING
    beside = [_beside(v, f, out) for v, f in floats]
    along = _EVERY
    for bits in beside:
        along &= bits
    if cancels:
        return along, frozenset()
    added = frozenset[Added]().union(*(f.added for _, f in floats))
    if name in traits.SCALES:
        return along, _scaled(added, [f for _, f in floats])
    if name not in _PRESERVE_ADDED:
        return along, frozenset()
    if name in traits.ADDS and any(f.flags & PRODUCT for _, f in floats):
        for (_, f), bits in zip(floats, beside, strict=True):
            is_bias = bits & ~along or f.flags & ALIKE or may_be_a_bias_of_one(f, out.aval.shape)
            is_offset = is_bias and not f.flags & (CONSTANT | DERIVED)
            if is_offset and not (name == "sub" and f.flags & PRODUCT):  # a mean is no bias
                added |= {Added(root, bits, out.aval.shape) for root in f.roots}
            elif f.flags & CONSTANT and f.most < math.inf and not is_epsilon(f):
                added |= {Added(roots.constant_number(f.most), _EVERY, out.aval.shape)}
    return along, _few(added)


def _taken_along(eqn: Eqn, out: Any, floats: Sequence[tuple[Any, Any]]) -> frozenset[Added]:
    """Returns what was added to operands of a product, and repeats along all axes it adds up."""
    taken = (
        (a.root, contraction.axes_after(eqn, place, a.within(v.aval.shape)))
        for place, (v, f) in enumerate(floats[:2])
        for a in f.added
    )
    is_mean = contraction.is_by_one_row(eqn)
    return frozenset(
        Added(root, along, out.aval.shape, by_product=not is_mean)
        for root, along in taken
        if along is not None
    )


def _scaled(added: frozenset[Added], factors: Iterable[Any]) -> frozenset[Added]:
    """Returns what was added, scaled; scaled by a product's result, it is another value.

    A mean with weights takes a bias with it as one without does: `u - (m * u).sum(0) / m.sum()`.
    So does `z * sigmoid(z)`, a function of the sum alone. `z * (1 + tanh(z))` loses the number.
    """
    products = [f for f in factors if f.flags & PRODUCT]
    if len(products) < 2:
        return frozenset() if any(not f.added for f in products) else added
    of_all = frozenset[Added].intersection(*(f.added for f in products))
    added = frozenset(a for a in added if a in of_all or not roots.is_constant(a.root))
    with_a_bias = [f for f in products if not f.added.isdisjoint(added)]
    is_of_one = all(any(f.roots <= g.roots for g in with_a_bias) for f in products)
    return added if is_of_one else frozenset()


def _few(added: frozenset[Added]) -> frozenset[Added]:
    """Returns what was added last, where it is much."""
    if len(added) <= _MOST:
        return added
    return frozenset(sorted(added, key=_last)[-_MOST:])


def _last(added: Added) -> tuple[int, int]:
    return max(roots.numbers(frozenset({added.root})), default=-1), added.along


def _beside(atom: Any, fact: Any, out: Any) -> int:
    """Returns the axes of a result along which an operand repeats, as far as it is that large."""
    shape, wide = atom.aval.shape, out.aval.shape
    if fact.flags & (CONSTANT | SCALAR) or len(shape) < len(wide):
        return _EVERY
    if shape == wide:
        return fact.along
    return fact.along | _axes(i for i, (n, m) in enumerate(zip(shape, wide, strict=True)) if n != m)


def _axes(of: Iterable[int]) -> int:
    """Returns axes as bits."""
    bits = 0
    for axis in of:
        bits |= 1 << axis
    return bits


def _moved(eqn: Eqn, out: Any, atom: Any, fact: Any, operands: Sequence[Any]) -> Told:
    """Returns what is so of a value that an operation moves, or of which it takes a statistic."""
    sizes = _cut_sizes(eqn, out)
    cut = 0 if sizes is None else _axes(i for i, n in enumerate(atom.aval.shape) if n != sizes[i])
    added: set[Added] = set()
    shape = out.aval.shape
    if eqn.primitive.name == "reshape":
        added.update(fact.added)
    for a in fact.added - added:
        before = a.within(atom.aval.shape)
        along = _axes_of(eqn, atom, before)
        if along is None:
            continue
        if cut & ~before:  # a part of what was added
            of = _slice_along(eqn, cut & ~before)
            taken = roots.part(eqn, out, frozenset({a.root}), operands, of)
            added.update(
                [] if taken is None else [a._replace(root=taken, along=along, shape=shape)]
            )
        else:
            added.add(a._replace(along=along, shape=shape))
    return _axes_of(eqn, atom, fact.along) or 0, frozenset(added)


def _slice_along(eqn: Eqn, axes: int) -> tuple[Any, ...] | None:
    """Returns where an operation slices some axes, those along which what was added differs.

    `u[2:-2, 0]` and `u[:, 0]` hold the same element of a bias. None if it is no slice.
    """
    if eqn.primitive.name != "slice":
        return None
    params = eqn.params
    strides = params["strides"] or [1] * len(params["start_indices"])
    limits = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return tuple((i, *map(str, limit)) for i, limit in enumerate(limits) if axes >> i & 1)


def _cut_sizes(eqn: Eqn, out: Any) -> Sequence[Any] | None:
    """Returns how much an operation that cuts takes along each axis of its operand."""
    name = eqn.primitive.name
    if name in ("slice", "dynamic_slice", "split"):
        return out.aval.shape
    if name == "gather":
        return eqn.params["slice_sizes"]
    if name == "unstack":
        sizes = list(eqn.invars[0].aval.shape)
        sizes[eqn.params["axis"]] = 1
        return sizes
    return None


def _axes_of(eqn: Eqn, atom: Any, along: int) -> int | None:
    """Returns the axes of a result along which an operand repeats.

    None where the operation adds up along others, or is none that moves values.
    """
    name, params = eqn.primitive.name, eqn.params
    before, after = atom.aval.shape, eqn.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        return _broadcast(params["broadcast_dimensions"], before, after, along)
    if name == "transpose":
        return _axes(i for i, axis in enumerate(params["permutation"]) if along >> axis & 1)
    if name in traits.RESHAPES:
        return _reshaped(before, after, along)
    if removed := totals.removed_axes(eqn):
        added_up = _axes(axis for axis in removed if before[axis] != 1)
        return None if added_up & ~along else _without(removed, len(before), along)
    if name == "unstack" or (name in traits.ACROSS and len(before) > len(after)):
        removed = (params["axis" if name == "unstack" else "scatter_dimension"],)
        return _without(removed, len(before), along)
    if name == "gather":
        return _gathered(params["dimension_numbers"], len(before), len(after), along)
    if name.startswith("scatter") and len(before) != len(after):
        return _scattered(eqn, along)
    if name == "stack" or (name in traits.GATHERS and len(before) < len(after)):
        axis = params["axis" if name == "stack" else "all_gather_dimension"]
        return along & ~(_EVERY << axis) | 1 << axis | along >> axis << axis + 1
    is_move = name in _PRESERVE_AXES or totals.is_along_one(eqn)
    return along if is_move and len(before) == len(after) else None


def _broadcast(to: Sequence[int], before: Sequence[Any], after: Sequence[Any], along: int) -> int:
    copied = _axes(range(len(after))) & ~_axes(to)
    for i, axis in enumerate(to):
        if along >> i & 1 or before[i] != after[axis]:
            copied |= 1 << axis
    return copied


def _without(removed: Sequence[int], ndim: int, along: int) -> int:
    left = [i for i in range(ndim) if i not in removed]
    return _axes(j for j, i in enumerate(left) if along >> i & 1)


def _reshaped(before: Sequence[Any], after: Sequence[Any], along: int) -> int:
    """Axes that are split or joined: those of a run of which all repeat."""
    made, i, j = 0, 0, 0
    while i < len(before) or j < len(after):
        first, last = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while size(before[first:i]) != size(after[last:j]):
            if size(before[first:i]) < size(after[last:j]):
                i += 1
            else:
                j += 1
            if i > len(before) or j > len(after):
                return made
        large = [k for k in range(first, i) if before[k] != 1]
        if all(along >> k & 1 for k in large):
            made |= _axes(range(last, j))
        else:
            made |= _axes(k for k in range(last, j) if after[k] == 1)
    return made


def _gathered(numbers: Any, before: int, after: int, along: int) -> int:
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    left = [i for i in range(before) if i not in dropped]
    repeated = _axes(range(after)) & ~_axes(numbers.offset_dims)
    return repeated | _axes(
        out for out, i in zip(numbers.offset_dims, left, strict=True) if along >> i & 1
    )


def _scattered(eqn: Eqn, along: int) -> int:
    """Of what is put into a larger value; where it is put, it may repeat."""
    numbers = eqn.params["dimension_numbers"]
    ndim = len(eqn.outvars[0].aval.shape)
    put = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [i for i in range(ndim) if i not in put]
    return _axes(put) | _axes(
        i
        for i, update in zip(window, numbers.update_window_dims, strict=True)
        if along >> update & 1
    )
