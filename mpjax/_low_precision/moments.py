"""Finds the moments in an optimizer's state: their parameters, and whether first or second."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax._base.tree import is_array, leaf_paths, path_str
from mpjax._base.typing import KeyPath, PyTree
from mpjax._low_precision.codes import FirstMoment, SecondMoment, is_coded

# Names of fields with averages, trees like the parameters, in optax and libraries like it: first
# moments may have either sign, second ones are never negative. Classes that use the names otherwise
# have rows of their own.
_FIRST: tuple[str, ...] = ("mu", "trace", "ema", "exp_avg")
_SECOND: tuple[str, ...] = ("nu", "nu_max", "exp_avg_sq")
_USUAL: dict[str, bool] = {name: name in _SECOND for name in (*_FIRST, *_SECOND)}
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


def with_classes(state: PyTree) -> PyTree:
    """Returns a state whose moments in 8 bits have their classes, also behind an `nnx.Optimizer`.

    Its update leaves a mapping of the fields in place of a `FirstMoment` or a `SecondMoment`.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_of_fields)
    if not any(_is_of_fields(x) for _, x in leaves):
        return state
    return treedef.unflatten([_with_class(state, path, x) for path, x in leaves])


def with_containers(state: PyTree, given: PyTree) -> PyTree:
    """Returns a state whose moments in 8 bits stand in the containers of `given`, the one before.

    So the step after it compiles once, and a skip can choose between the two.
    """
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_coded)
    before = jax.tree.leaves(given, is_leaf=lambda x: _is_of_fields(x) or is_coded(x))
    if not any(map(_is_of_fields, before)):
        return state
    pairs = zip(leaves, before, strict=True)
    return treedef.unflatten([type(b)(x._asdict()) if _is_of_fields(b) else x for x, b in pairs])


def _is_of_fields(x: Any) -> bool:
    return isinstance(x, Mapping) and {*x} == {*FirstMoment._fields}


def _with_class(state: PyTree, path: KeyPath, x: Any) -> Any:
    if not _is_of_fields(x):
        return x
    for i in range(len(path)):
        is_second = _is_second(state, path, i)
        if is_second is not None:
            return (SecondMoment if is_second else FirstMoment)(x["codes"], x["scales"])
    return x


def _paths(params: PyTree) -> dict[KeyPath, str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return dict(zip(paths, leaf_paths(params), strict=True))


def _moment(state: PyTree, path: KeyPath, number: int, known: dict[KeyPath, str]) -> Moment | None:
    for i in range(len(path)):  # the outermost: a parameter may be called `mu` too
        param = known.get(path[i + 1 :])
        is_second = None if param is None else _is_second(state, path, i)
        if param is not None and is_second is not None:
            return Moment(path[i].name, is_second, param, path_str(path), number)
    return None


def _is_second(state: PyTree, path: KeyPath, i: int) -> bool | None:
    """Whether a key of a path names second moments, None where it names no moments."""
    name: str | None = getattr(path[i], "name", None)
    if name is None:
        return None
    return _BY_CLASS.get(_class_at(state, path[:i]), _USUAL).get(name)


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
