"""Weights of means, under float16: they may be as small as float32 holds, as their sum is.

`w.T @ x / w.sum(0)` is a mean, whatever factor `w` has. Where `w` is a sigmoid of -20, or the
chances of a cluster that is far away, float16 holds 0, or few bits; the mean is another one, or
0 / 0. Chances that are divided by their sum before the product are in range.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpjax._autocast.decide.read_flags import DIVIDED
from mpjax._autocast.known import contraction, facts, ranges, roots, traits
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS

_MULTIPLY = traits.SCALES | PRODUCTS


def are_divided(eqn: Eqn, read: int, known: facts.Facts) -> bool:
    """Whether a product is of weights by whose sum its result is divided.

    What a function made may be small; `exp(z - max(z))` is 1 somewhere along the axis of its sum.

    Args:
      eqn: the product.
      read: how its result is read.
      known: the facts of its program.
    """
    if not read & DIVIDED or not contraction.is_product(eqn):
        return False
    operands = [facts.of_atom(v, known) for v in eqn.invars[:2]]
    curved = [f for f in operands if f.flags & ranges.CURVED]
    return not all(map(_is_below_its_maximum, curved))


def of_operands(eqn: Eqn, reads: Sequence[int], known: facts.Facts) -> list[int]:
    """Returns how operands are read, without `DIVIDED` of those that are in range.

    In `z * sigmoid(z)` the sigmoid may be small, and not what a layer made. In `q @ (k.T @ v)` the
    features `q` and `k` may be small, and what is made of `k`, and not `v`. Of a sum of products,
    as over batches, all terms are read so.

    Args:
      eqn: an operation whose result is of such weights.
      reads: how it reads its operands.
      known: the facts of its program.
    """
    operands = (facts.of_atom(v, known) for v in eqn.invars)
    may_be_small = [bool(fact.flags & (ranges.CURVED | ranges.WEIGHED)) for fact in operands]
    if eqn.primitive.name not in _MULTIPLY and not any(may_be_small):
        return list(reads)
    return [
        read if is_so else read & ~DIVIDED for read, is_so in zip(reads, may_be_small, strict=True)
    ]


def _is_below_its_maximum(fact: facts.Fact) -> bool:
    return bool(fact.flags & ranges.CHANCES) and roots.is_below_its_maximum(fact.roots)
