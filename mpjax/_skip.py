"""Skipping a step: keeps the old state where a step was not finite, at no traffic of its own.

Choosing between the old and the new state *after* the update is right but dear: XLA recomputes
the new moments inside the fusion that makes the new parameters, reads the old ones there too, and
copies what it may then not overwrite; on CPUs adamw pays 7.5 extra reads of the gradients. Here
the choice is made where each piece of state is computed, and what follows uses the chosen value
as a step without skipping uses the new one. The bits are the same: on a finite step chosen and
new are one, and on a skipped one all that follows is dropped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from mpjax._tree import first_difference, is_array
from mpjax._typing import Array, PyTree


def select_like(pred: Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` where `pred` is true, in the dtypes of `old`, and `old` where it is not."""
    return jax.tree.map(lambda a, b: _choose(pred, a, b), new, old)


def update_where(
    pred: Array, update: Callable[[], tuple[PyTree, PyTree]], old: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns `update()`, a pair `(steps, state)`, with the state `old` where `pred` is false.

    The steps mean something only where `pred` is true.

    Args:
      pred: bool[].
      update: closes over what it needs; the state that it returns is a tree like `old`.
      old: the state before.

    Raises:
      ValueError: the state that `update` returns is not a tree like `old`.
    """
    if not isinstance(pred, jax.core.Tracer):
        # Outside jit nothing is fused, and an optimizer may look at concrete values.
        steps, new = update()
        _check_structure(new, old)
        return steps, select_like(pred, new, old)
    statics: list[Any] = []
    structures: list[Any] = []

    def values_of_update() -> list[Any]:
        steps, new = update()
        _check_structure(new, old)
        leaves, structure = jax.tree.flatten((steps, new))
        structures.append(structure)
        statics.extend(None if _is_value(x) else x for x in leaves)
        return [x for x in leaves if _is_value(x)]

    closed = jax.make_jaxpr(values_of_update)()
    old_leaves = jax.tree.leaves(old)
    olds = [*[None] * (len(statics) - len(old_leaves)), *old_leaves]
    kept = [old for old, static in zip(olds, statics, strict=True) if static is None]
    values = iter(_evaluate(pred, closed, kept))
    return structures[0].unflatten([next(values) if s is None else s for s in statics])


def _evaluate(pred: Array, closed: Any, olds: list[Any]) -> list[Any]:
    """Returns the outputs of `closed`, each that has an old value chosen where it is made."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    new: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    old_of = {
        var: old
        for var, old in zip(jaxpr.outvars, olds, strict=True)
        if is_array(old) and not isinstance(var, jex.Literal)
    }
    for eqn in jaxpr.eqns:
        made = _bind(eqn, [read(atom) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, made, strict=True):
            env[var] = value
            if var in old_of:
                new[var] = value
                env[var] = _chosen_early(pred, value, old_of[var])

    def result(atom: Any, old: Any) -> Any:
        value = read(atom)
        if old is None or isinstance(atom, jex.Literal) or atom not in new:
            return value if old is None else _choose(pred, value, old)
        # Two pieces of state may be one value, of which only the first was chosen early.
        is_chosen = value is not new[atom] and old_of[atom] is old
        return value if is_chosen else _choose(pred, new[atom], old)

    return [result(atom, old) for atom, old in zip(jaxpr.outvars, olds, strict=True)]


def _bind(eqn: Any, values: list[Any]) -> list[Any]:
    with eqn.ctx.manager:  # what jax.default_matmul_precision and its kind said when it was traced
        params = eqn.primitive.get_bind_params(eqn.params)
        made = eqn.primitive.bind(*values, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _chosen_early(pred: Array, new: Any, old: Any) -> Any:
    """Returns the choice, or `new` where the choice is of another type to what follows."""
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
