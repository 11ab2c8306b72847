"""Converts optimizer states between forms: to the plain one, in full precision, and from it."""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._base.errors import message
from mpjax._base.tree import to_full
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.apply import KEEPING, OTHER_PATHS, full_params
from mpjax._low_precision.codes import FLOAT8, SecondMoment, decode, encode, is_coded
from mpjax._low_precision.master import MasterWeightsState, SplitWeightsState, correction
from mpjax._low_precision.owner import map_narrow, nothing, owners
from mpjax._low_precision.quantized import QuantizedState
from mpjax._low_precision.rounding import scattered
from mpjax._low_precision.state_dtypes import StateDtypesState
from mpjax._low_precision.stochastic import StochasticRoundingState

_WRAPPING = (*KEEPING, StochasticRoundingState, StateDtypesState, QuantizedState)


def _is_form(x: Any) -> bool:
    return isinstance(x, _WRAPPING) or is_coded(x)


def has_form(state: PyTree) -> bool:
    """Whether anything in a state is stored in fewer bits by a wrapper of `mpjax.optim`."""
    return any(map(_is_form, jax.tree.leaves(state, is_leaf=_is_form)))


def keeps_weights(state: PyTree) -> bool:
    """Whether a state stores bits of the parameters themselves, so that it fits no others."""
    return any(isinstance(x, KEEPING) for _, x in owners(state))


def plain(state: PyTree) -> PyTree:
    """Returns a state as it is without the wrappers, moments decoded."""

    def one(x: Any) -> Any:
        if is_coded(x):
            return decode(x)
        return plain(x.inner_state) if _is_form(x) else x

    return jax.tree.map(one, state, is_leaf=_is_form)


def formed(like: PyTree, values: PyTree, params: PyTree | None, weights: PyTree | None) -> PyTree:
    """Returns the values of a plain state in the form of `like`, a state that has just been made.

    Args:
      like: the state to fill.
      values: a tree like `plain(like)`.
      params: the parameters that the state belongs to; None where `like` was made from them.
      weights: the same in float32, with all the bits that are known; None with `params`.
    """
    likes, treedef = jax.tree.flatten(like, is_leaf=_is_form)

    def one(number: int, form: Any, value: Any) -> Any:
        if is_coded(form):
            return _coded_like(form, value, number)
        if not _is_form(form):
            return value
        inner = formed(form.inner_state, value, params, weights)
        if isinstance(form, KEEPING) and params is not None:
            return type(form)(_kept_of(form, params, weights), inner)
        return form._replace(inner_state=inner)

    pairs = zip(likes, treedef.flatten_up_to(values), strict=True)
    return treedef.unflatten([one(i, form, value) for i, (form, value) in enumerate(pairs)])


def _coded_like(form: Any, value: Array, number: int) -> Any:
    size, blocks = value.shape[-1], form.scales.shape[-1]
    kind = "float8" if form.codes.dtype == FLOAT8 else "int8"
    random = scattered(value.shape, jnp.int32(0), number)
    is_second = isinstance(form, SecondMoment)
    return encode(to_full(value), kind, -(-size // blocks), random, is_second=is_second)


def _kept_of(form: Any, params: PyTree, weights: PyTree) -> PyTree:
    """Returns a wrapper's first field for weights: copies, corrections or rounding errors."""

    def keep(p: Array, weight: Array) -> Any:
        if isinstance(form, MasterWeightsState):
            return jnp.array(weight)
        if isinstance(form, SplitWeightsState):
            return correction(weight, to_full(p), p.dtype)
        return (weight - to_full(p)).astype(jnp.bfloat16)

    kept = map_narrow(keep, params, weights, other=nothing)
    paths, treedef = jax.tree_util.tree_flatten_with_path(form[0])
    by_path = dict(jax.tree_util.tree_leaves_with_path(kept))
    if any(path not in by_path for path, _ in paths):
        raise ValueError(message("adopt_state", *OTHER_PATHS))
    return treedef.unflatten([by_path[path] for path, _ in paths])


def reweighted(state: PyTree, params: PyTree, weights: PyTree) -> PyTree:
    """Returns a state with what it stores of the weights made anew, and all else as it was.

    Args:
      state: the state of an optimizer.
      params: the parameters from which it goes on.
      weights: the same in float32, with all the bits that are known.
    """

    def one(x: Any) -> Any:
        keeps = isinstance(x, KEEPING)
        return type(x)(_kept_of(x, params, weights), x.inner_state) if keeps else x

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, KEEPING))


def known_weights(params: PyTree | None, old_state: PyTree) -> PyTree | None:
    """Returns the float32 weights that an old state knows of these parameters."""
    return None if params is None else full_params(params, old_state)
