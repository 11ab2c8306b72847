"""Finds groups that are a softmax of rows: one kernel on a GPU, and a second for the gradient.

XLA:GPU computes a softmax in one kernel, with a row on the chip, if nothing else reads its
statistics. The gradient recomputes it from the same logits; for an H100 XLA recognises the sum,
computes it in one kernel for both, and reads the logits once more for the weights. With a barrier,
softmax and gradient are one kernel each. Nothing is gained for a group whose outputs are all
statistics (a loss), or one whose statistics are taken by the kernel that makes its input (most
norms).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpjax._autocast.speed import storage
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.sizes import size

_ROW = 2**14  # elements: of longer rows XLA:GPU makes several kernels, which may share statistics


def of_products(jaxpr: Jaxpr) -> set[Any]:
    """Returns the results of matrix products, which XLA stores for all their readers.

    Logits that are scaled or masked after the product are recomputed in each kernel that reads
    them; behind a barrier, they would be stored too.
    """
    return {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}


@hint("rows_apart", lambda _: None)
def rows_apart(of: Any) -> Any:
    """Returns the input of a softmax in one kernel; its gradient reads it behind a barrier."""
    return of


def normalised(
    eqns: Sequence[Eqn], stored: Iterable[Any], outputs: Iterable[tuple[Any, bool, bool]]
) -> Any:
    """Returns the input of which a group computes a softmax of rows, or None.

    The sign of a softmax is a statistic that depends on another: its sum comes after its maximum.

    Args:
      eqns: the equations of the group.
      stored: its inputs that are results of products.
      outputs: its variables that are read elsewhere.
    """
    largest = max(size(v.aval.shape) for eqn in eqns for v in eqn.outvars)
    passes: dict[Any, int] = {}  # how many statistics in a row a value depends on
    for eqn in eqns:
        if storage.ends_a_kernel(eqn) or turns(eqn, largest) or _is_long(eqn):
            return None
        before = max((passes.get(v, 0) for v in compat.variables(eqn)), default=0)
        passes.update((v, before + storage.takes_a_statistic(eqn)) for v in eqn.outvars)
    if not any(passes[v] > 1 and size(v.aval.shape) == largest for v, *_ in outputs):
        return None
    return next((v for v in stored if size(v.aval.shape) == largest), None)


def _is_long(eqn: Eqn) -> bool:
    """Whether an equation takes a statistic of rows that are too long for one kernel."""
    if not storage.takes_a_statistic(eqn):
        return False
    read = max((size(v.aval.shape) for v in compat.variables(eqn)), default=0)
    return read > _ROW * size(eqn.outvars[0].aval.shape)


def turns(eqn: Eqn, largest: int) -> bool:
    """Whether an equation transposes the last axis of a large value: then rows are not rows."""
    if eqn.primitive.name != "transpose" or size(eqn.outvars[0].aval.shape) < largest:
        return False
    order = eqn.params["permutation"]
    return order[-1] != len(order) - 1
