"""Finds the moments in an optimizer's state: their parameters, and whether first or second."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from mpjax._base.tree import is_array, leaf_paths, path_str
from mpjax._base.typing import KeyPath, PyTree

# Names of fields with averages, trees like the parameters, in optax and libraries like it: first
# moments may have either sign, second ones are never negative. Classes that use the names otherwise
# have rows of their own.
_FIRST = ("mu", "trace", "ema", "exp_avg")
_SECOND = ("nu", "nu_max", "exp_avg_sq")
_USUAL = dict.fromkeys(_FIRST, False) | dict.fromkeys(_SECOND, True)
_BY_CLASS: dict[str, dict[str, bool]] = {
    "FactoredState": {"v": True},
    "ScaleByAdaDeltaState": {"e_g": True, "e_x": True},
    "ScaleByAdanState": {"m": False, "v": False, "n": True},
    "ScaleByAdemamixState": {"m1": False, "m2": False, "nu": True},
    "ScaleByRssState": {"sum_of_squares": True},
    "ScaleBySM3State": {"nu": False},  # its momentum; mu holds accumulators, one for each axis
    "SophiaState": {"mu": False},  # its nu is of a Hessian's diagonal, of either sign
    # Centred: nu - mu² must stay positive, and may not if each is rounded by itself.
    "ScaleByRStdDevState": {},
    "ScaleByRStdDevWithCountState": {},
}


@dataclasses.dataclass(frozen=True)
class Moment:
    """The place of a moment in a state, and its parameter."""

    field: str  # 'mu'
    is_second: bool
    param: str  # the parameter's path
    where: str  # its own path in the state
    number: int  # of the leaf: no two have the same


def map_moments(
    fun: Callable[[Moment, Any], Any],
    state: PyTree,
    params: PyTree,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """Returns an optimizer's state with `fun` of each moment in place of it, the rest as it is."""
    known = _paths(params)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_leaf)
    mapped: list[Any] = []
    for number, (path, leaf) in enumerate(leaves):
        moment = _moment(state, path, number, known)
        mapped.append(leaf if moment is None else fun(moment, leaf))
    return treedef.unflatten(mapped)


def _paths(params: PyTree) -> dict[KeyPath, str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return dict(zip(paths, leaf_paths(params), strict=True))


def _moment(state: PyTree, path: KeyPath, number: int, known: dict[KeyPath, str]) -> Moment | None:
    for i in range(len(path) - 1, -1, -1):
        name = getattr(path[i], "name", None)
        if name is None or path[i + 1 :] not in known:
            continue
        fields = _BY_CLASS.get(_class_at(state, path[:i]), _USUAL)
        if name in fields:
            param = known[path[i + 1 :]]
            return Moment(name, fields[name], param, path_str(path), number)
    return None


def _class_at(state: PyTree, path: KeyPath) -> str:
    for key in path:
        state = getattr(state, key.name) if hasattr(key, "name") else state[_index(key)]
    return type(state).__name__


def _index(key: Any) -> Any:
    return key.key if hasattr(key, "key") else key.idx


def shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by its path."""
    leaves = jax.tree.leaves(params)
    pairs = zip(leaf_paths(params), leaves, strict=True)
    return {path: x.shape for path, x in pairs if is_array(x)}
