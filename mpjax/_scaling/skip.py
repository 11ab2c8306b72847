"""Skips a step: keeps the old state if the step is not finite, without extra memory traffic.

Choosing between the old and the new state *after* the update is right but costly: XLA recomputes
the new moments inside the fusion that makes the new parameters, reads the old ones there too, and
copies arrays that it may then not overwrite; on CPUs adamw pays 7.5 extra reads of the gradients.
Here the choice is made right where each new array of the state is computed, and later equations
read the chosen array. The bits are the same: on a finite step chosen and new are equal, and on a
skipped step the results of the later equations are dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from mpjax._base import compat
from mpjax._base.tree import first_difference, is_array
from mpjax._base.typing import Array, PyTree
from mpjax._jaxpr.binding import bind, evaluate, written_at
from mpjax._jaxpr.equation import Eqn
from mpjax._scaling.applied import applied_by, applied_of


def select_like(pred: Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` where `pred` is true, in the dtypes of `old`, and `old` where it is not."""
    return jax.tree.map(lambda a, b: _choose(pred, a, b), new, old)


class Outcome(NamedTuple):
    """The results of an update; on a skipped step the state is the old one."""

    steps: PyTree  # they mean something only where `taken` is true
    state: PyTree
    taken: Array  # bool[]
    applied: list[bool]  # by leaf of the gradients; those of frozen parameters are not


def update_where(
    judge: Callable[[list[bool]], Array],
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    grads: PyTree,
    old: PyTree,
) -> Outcome:
    """Returns `update(grads, old)`, a pair `(steps, state)`, with the state `old` where skipped.

    A gradient that no update depends on is replaced by 0 if it is not finite: it would spoil the
    moments of a frozen parameter.

    Args:
      judge: bool[] for a flag by leaf of `grads`, whether it is applied: whether to take the step.
      update: closes over all but gradients and state; the state that it returns is a tree like
        `old`.
      grads: the gradients.
      old: the state before.

    Raises:
      ValueError: the state that `update` returns is not a tree like `old`.
    """
    count = len(jax.tree.leaves(grads))
    everything = [True] * count
    taken = judge(everything)
    if not isinstance(taken, jax.core.Tracer):
        # Outside jit nothing is fused, and an optimizer may branch on concrete values.
        applied = everything if bool(taken) else applied_by(update, grads, old)
        taken = taken if all(applied) else judge(applied)
        steps, new = update(_without_spoilt(grads, applied), old)
        _check_structure(new, old)
        return Outcome(steps, select_like(taken, new, old), taken, applied)
    return _traced(judge, taken, update, grads, old)


def _traced(
    judge: Callable[[list[bool]], Array],
    taken: Array,
    update: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    grads: PyTree,
    old: PyTree,
) -> Outcome:
    (of_grads, given), (of_old, before) = _form(grads), _form(old)
    made: list[_Form] = []

    def values_of_update(given: list[Any], before: list[Any]) -> list[Any]:
        steps, new = update(of_grads.filled(given), of_old.filled(before))
        _check_structure(new, old)
        (of_steps, first), (of_new, after) = _form(steps), _form(new)
        made.extend((of_steps, of_new))
        return [*first, *after]

    closed = jax.make_jaxpr(values_of_update)(given, before)
    of_steps, of_new = made
    firsts = len(given), len(of_steps.places)
    number_of = {place: number for number, place in enumerate(of_old.places)}
    pairs = [
        (firsts[0] + number_of[place], firsts[1] + number)
        for number, place in enumerate(of_new.places)
        if place in number_of
    ]
    # `pairs` say which input reads an output in the next step: a moment is applied later.
    inputs = applied_of(closed, firsts[1], pairs)
    applied = [True] * of_grads.size
    for number, place in enumerate(of_grads.places):
        applied[place] = inputs[number]
    taken = taken if all(applied) else judge(applied)
    args = [x if is_used else _unspoilt(x) for x, is_used in zip(given, inputs, strict=False)]
    leaves = jax.tree.leaves(old)
    olds = [*[None] * firsts[1], *[leaves[place] for place in of_new.places]]
    results = _evaluate(taken, closed, list(map(jnp.asarray, [*args, *before])), olds)
    steps, state = of_steps.filled(results[: firsts[1]]), of_new.filled(results[firsts[1] :])
    return Outcome(steps, state, taken, applied)


class _Form(NamedTuple):
    """A tree without its arrays: their places, and the other leaves."""

    structure: Any
    places: list[int]
    rest: dict[int, Any]
    size: int

    def filled(self, values: list[Any]) -> PyTree:
        """Returns the tree with these values."""
        by_place = self.rest | dict(zip(self.places, values, strict=True))
        return self.structure.unflatten([by_place[place] for place in range(self.size)])


def _form(tree: PyTree) -> tuple[_Form, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if _is_value(x)]
    rest = {i: x for i, x in enumerate(leaves) if not _is_value(x)}
    return _Form(structure, places, rest, len(leaves)), [leaves[i] for i in places]


def _without_spoilt(grads: PyTree, applied: list[bool]) -> PyTree:
    leaves, structure = jax.tree.flatten(grads)
    kept = [x if is_used else _unspoilt(x) for x, is_used in zip(leaves, applied, strict=True)]
    return structure.unflatten(kept)


def _unspoilt(x: Any) -> Any:
    """Returns a gradient, or zeros where it is not finite throughout."""
    if not (is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)):
        return x
    return jax.lax.select(jnp.all(jnp.isfinite(x)), jnp.asarray(x), jnp.zeros_like(x))


def _evaluate(pred: Array, closed: Any, args: list[Any], olds: list[Any]) -> list[Any]:
    """Returns the outputs of `closed`; each new array of the state is chosen where it is made."""
    jaxpr = closed.jaxpr
    new: dict[Any, Any] = {}
    old_of = {
        var: old
        for var, old in zip(jaxpr.outvars, olds, strict=True)
        if is_array(old) and not compat.is_literal(var)
    }

    def run(eqn: Eqn, values: list[Any]) -> list[Any]:
        with written_at(eqn):
            made = bind(eqn, values)
        new.update((v, x) for v, x in zip(eqn.outvars, made, strict=True) if v in old_of)
        return [
            _chosen_early(pred, x, old_of[v]) if v in new else x
            for v, x in zip(eqn.outvars, made, strict=True)
        ]

    def result(atom: Any, value: Any, old: Any) -> Any:
        if old is None or compat.is_literal(atom) or atom not in new:
            return value if old is None else _choose(pred, value, old)
        # Two leaves of the state may be one variable, of which only the first was chosen early.
        is_chosen = value is not new[atom] and old_of[atom] is old
        return value if is_chosen else _choose(pred, new[atom], old)

    outs = evaluate(closed, args, run)
    return list(map(result, jaxpr.outvars, outs, olds))


def _chosen_early(pred: Array, new: Any, old: Any) -> Any:
    """Returns the choice, or `new` if later equations would refuse the choice's type."""
    chosen = _choose(pred, new, old)
    # The dtype may differ; under shard_map, and with explicit meshes, types say more than that.
    same = jax.typeof(chosen).strip_weak_type() == jax.typeof(new).strip_weak_type()
    return chosen if same else new


def _choose(pred: Array, new: Any, old: Any) -> Any:
    """Returns the new leaf or the old one, whose dtype stays."""
    if not is_array(old) or new is old:
        return new
    # A transformation that promotes would change the state's dtype at the first step.
    new = jnp.asarray(new)
    new = new if new.dtype == old.dtype else new.astype(old.dtype)
    return jax.lax.select(pred, new, jnp.asarray(old))


def _is_value(x: Any) -> bool:
    return is_array(x) or isinstance(x, (bool, int, float, complex))


def _check_structure(new: PyTree, old: PyTree) -> None:
    if jax.tree.structure(new) == jax.tree.structure(old):
        return
    fix = ("Restore a checkpoint into tx.init(params) of the same optimizer.",)
    pair = (("the optimizer's new state", new), ("the state that it was given", old))
    raise ValueError(first_difference("with_loss_scale.update", *pair, fix))
