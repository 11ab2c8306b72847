"""Finds the gradients that an optimizer applies: those of frozen parameters lead to no update.

`optax.set_to_zero` behind a mask, in a partition or in a chain gives zeros that depend on no
gradient. Dependence is read from the jaxpr of the update: a gradient is applied if an update
depends on it, in this step or, through the optimizer's state, in a later one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from mpjax._base.typing import PyTree

_LOOKS_AT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def applied_of(closed: Any, steps: int, states: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns, for each input of a traced update, whether it is applied.

    Args:
      closed: a closed jaxpr, whose first results are the updates.
      steps: the number of these.
      states: pairs of an input and a result, which is the next step's input.
    """
    used = [index < steps for index in range(len(closed.jaxpr.outvars))]
    while True:
        _, inputs = partial_eval.dce_jaxpr(closed.jaxpr, used)
        wanted = list(used)
        for before, after in states:
            wanted[after] |= inputs[before]
        if wanted == used:
            return list(inputs)
        used = wanted


def applied_by(
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], grads: PyTree, state: PyTree
) -> list[bool]:
    """Returns, for each leaf of `grads`, whether `update(grads, state)` applies it.

    All are if the update cannot be traced, since it looks at values.
    """
    leaves, structure = jax.tree.flatten((grads, state))
    count, steps = len(jax.tree.leaves(grads)), []

    def run(values: list[Any]) -> list[Any]:
        updates, new = update(*structure.unflatten(values))
        steps.append(len(jax.tree.leaves(updates)))
        return jax.tree.leaves((updates, new))

    try:
        closed = jax.make_jaxpr(run)(leaves)
    except _LOOKS_AT_VALUES:
        return [True] * count
    pairs = [(i, steps[0] + i - count) for i in range(count, len(leaves))]
    if len(closed.jaxpr.outvars) != steps[0] + len(leaves) - count:
        return [True] * count  # another state: it is refused where it is chosen
    return applied_of(closed, steps[0], pairs)[:count]
