"""Which groups are a softmax of rows: one kernel on a GPU, and one again for the gradient.

XLA:GPU computes a softmax in one kernel, which holds a row, if nothing else reads its statistics.
The gradient computes it again from the same logits; for an H100 XLA recognises the sum, takes it
in a kernel for both, and reads the logits once more for the weights. Kept apart, softmax and
gradient are a kernel each. Nothing is gained where a group leaves nothing but statistics, as a loss
does, or takes them in the kernel that makes its input, as most norms do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpjax._autocast.decide.states import size
from mpjax._autocast.speed import storage
from mpjax._autocast.speed.hints import hint
from mpjax._base import compat

_ROW = 2**14  # elements: of longer rows XLA:GPU makes several kernels, which may share statistics


def of_products(jaxpr: Any) -> set[Any]:
    """Returns the results of matrix products: XLA stores these, whatever reads them.

    What is but scaled or masked after the product it computes again in each kernel that reads it;
    kept apart, that would be stored too.
    """
    return {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}


@hint("rows_apart", lambda *_: None)
def normalised(
    eqns: Sequence[Any], stored: Iterable[Any], outputs: Iterable[tuple[Any, bool, bool]]
) -> Any:
    """Returns the input of whose rows a group makes others by a statistic of a statistic, or None.

    Args:
      eqns: the group. The sum of a softmax is of what its maximum was taken from.
      stored: its inputs that a product stores.
      outputs: its variables that are read elsewhere.
    """
    largest = max(size(v.aval.shape) for eqn in eqns for v in eqn.outvars)
    passes: dict[Any, int] = {}  # statistics that lead to a value one by one
    for eqn in eqns:
        if storage.ends_a_kernel(eqn) or _turns(eqn, largest) or _is_long(eqn):
            return None
        before = max((passes.get(v, 0) for v in compat.variables(eqn)), default=0)
        passes.update((v, before + storage.takes_a_statistic(eqn)) for v in eqn.outvars)
    if not any(passes[v] > 1 and size(v.aval.shape) == largest for v, *_ in outputs):
        return None
    return next((v for v in stored if size(v.aval.shape) == largest), None)


def _is_long(eqn: Any) -> bool:
    """Whether an equation takes a statistic of rows that are too long for a kernel to hold."""
    if not storage.takes_a_statistic(eqn):
        return False
    read = max((size(v.aval.shape) for v in compat.variables(eqn)), default=0)
    return read > _ROW * size(eqn.outvars[0].aval.shape)


def _turns(eqn: Any, largest: int) -> bool:
    """Whether an equation makes of large rows what is stored otherwise: no kernel holds these."""
    if eqn.primitive.name != "transpose" or size(eqn.outvars[0].aval.shape) < largest:
        return False
    order = eqn.params["permutation"]
    return order[-1] != len(order) - 1
