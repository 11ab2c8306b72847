"""The state of `with_loss_scale`: finds it in other states, and reads its loss scale."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from mpjax._base.described import described
from mpjax._base.donated import refuse_donated
from mpjax._base.errors import message
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public_in
from mpjax._base.typing import Array, PyTree
from mpjax._scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)
from mpjax._scaling.owned import owned
from mpjax._scaling.transformation import is_transformation, state_in
from mpjax._scaling.wrappers import BREAKING, refusal

DYNAMIC_FIELDS = tuple(DynamicLossScale.__slots__[1:])
Adjustment = dict[str, Array] | LossScale | None


@exported
@public_in("mpjax.optim")
class LossScaleState(NamedTuple):
    """State of `with_loss_scale`: strong-typed scalars, and the wrapped state.

    Plain containers only, so that orbax, Flax's msgpack and pickle restore it.
    """

    loss_scale: Array  # f32[], 1 for none
    adjustment: Adjustment  # the other fields; {} static, None no scaling; or one of your own
    grads_finite: Array  # bool[], whether the last step was taken
    skipped_steps: Array  # i32[], in all
    consecutive_skips: Array  # i32[], up to now
    diverged: Array  # bool[], set at `max_consecutive_skips`, and unset by you alone
    leaf_finite: Array  # bool[leaves], of the last step that was skipped
    inner_state: Any


_SCALARS = frozenset(LossScaleState._fields) - {"adjustment", "inner_state"}


@names_keywords()
def current_loss_scale(opt_state: PyTree) -> LossScale:
    """Returns the loss scale that `with_loss_scale` holds, found anywhere in `opt_state`.

    Args:
      opt_state: an optimizer state, or any pytree with one inside (a train state).

    Returns:
      The loss scale object that `with_loss_scale` was given. It carries a mark that says that the
      optimizer unscales, so `value_and_grad` leaves gradients taken with it scaled. The mark is no
      leaf. No host sync.

    Raises:
      ValueError: there is none, or there are several, or another transformation of a chain stands
        before it and would see scaled gradients, or `optax.MultiSteps` or one of its kind is around
        it. The message says where. Or the state has been donated to a step.

    Example:
      >>> tx = optax.chain(mpjax.with_loss_scale(optax.sgd(0.1), mpjax.StaticLossScale(8)))
      >>> mpjax.current_loss_scale(tx.init({"w": jnp.ones(2)}))
      StaticLossScale(loss_scale=8)
    """
    states = find_states(opt_state)
    if len(states) == 1:
        refuse_before(opt_state, "current_loss_scale", is_optimizer=False)
        _refuse_around(opt_state, "current_loss_scale")
        refuse_donated((states[0][1].loss_scale, states[0][1].adjustment), "current_loss_scale")
        return owned(unpack(states[0][1]))
    if not states:
        raise ValueError(no_scale_text(opt_state, "current_loss_scale"))
    paths = ", ".join(repr(path) for path, _ in states)
    got = f"the state holds {len(states)} loss scales, at {paths}."
    fix = "Give the part of the state that you mean, e.g. current_loss_scale(opt_state[0])."
    raise ValueError(message("current_loss_scale", got, fix))


def no_scale_text(opt_state: PyTree, where: str) -> str:
    """Returns the error text for something that holds no loss scale."""
    if is_transformation(opt_state):
        got = "got the optimizer, and the loss scale is in its state."
        return message(where, got, f"Type {where}(opt_state), with opt_state = tx.init(params).")
    if callable(opt_state):
        got = f"got {described(opt_state)}, which is no state."
        allowed = "Allowed: the state of an optimizer in with_loss_scale, or of a train step."
        return message(where, got, allowed, f"Type {where}(state), with state = step.init(params).")
    got = f"the state holds no loss scale; got a {type(opt_state).__name__}."
    if isinstance(opt_state, dict) and state_in(opt_state) is None:  # parameters, or metrics
        allowed = "Allowed: the state of an optimizer in with_loss_scale, or of a train step."
        fix = f"Type {where}(state), with the state of: state, metrics = step(state, batch)."
        return message(where, got, allowed, fix)
    fix = "Wrap the optimizer: mpjax.with_loss_scale(tx, mpjax.DynamicLossScale())."
    return message(where, got, fix)


@names_keywords()
def find_states(opt_state: PyTree) -> list[tuple[str, LossScaleState]]:
    """Returns every `LossScaleState` in a tree that is not inside another one, with its path.

    It also finds a state whose scalars are wrapped (NNX puts each into a variable), and one that
    has become a mapping, as in `nnx.state(optimizer)` or a checkpoint restored without a target.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_state)
    return [(jax.tree_util.keystr(p), _as_state(x)) for p, x in leaves if _is_state(x)]


def is_wrapped(tx: optax.GradientTransformation) -> bool:
    """Whether `with_loss_scale` returned it; a chain around one is known by its state only."""
    return getattr(getattr(tx.init, "__self__", None), "holds_loss_scale", False)


def _is_state(x: Any) -> bool:
    return isinstance(x, LossScaleState) or (isinstance(x, Mapping) and set(x) >= _SCALARS)


def _as_state(x: Any) -> LossScaleState:
    # A restored mapping may lack fields without leaves.
    fields = x._asdict() if isinstance(x, LossScaleState) else {"adjustment": {}, **x}
    adjustment = fields["adjustment"]
    if isinstance(adjustment, Mapping):
        adjustment = {name: _bare(adjustment[name]) for name in adjustment}
    scalars = {name: _bare(fields[name]) for name in _SCALARS}
    return LossScaleState(adjustment=adjustment, inner_state=fields.get("inner_state"), **scalars)


def _bare(x: Any) -> Any:
    """Returns the one leaf that is in `x`: an array, or a variable around it."""
    return jax.tree.leaves(x)[0]


def refuse_before(opt_state: PyTree, where: str, *, is_optimizer: bool) -> None:
    """Raises ValueError if a chain has a transformation before `with_loss_scale`.

    Args:
      opt_state: an optimizer's state, or anything that may hold one.
      where: the function's name, for the message.
      is_optimizer: whether it is the state of an optimizer for certain: then every tuple in it is
        a chain, and every ordered dictionary a named one. Else what stands before must be a
        state of optax or mpjax.
    """
    for node, key in _nodes_to_scales(opt_state):
        before = _before(node, key)
        if before and (is_optimizer or all(map(_is_of_optax, before))):
            kinds = ", ".join(type(x).__name__ for x in before)
            got = f"with_loss_scale stands behind {len(before)} of its chain (state: {kinds}),"
            got += " to which it leaves scaled gradients; clipping, say, would clip to nothing."
            allowed = "Allowed: with_loss_scale around the chain, or first in it."
            fix = "Move them inside: with_loss_scale(optax.chain(clip, adam), loss_scale)."
            raise ValueError(message(where, got, allowed, fix))


def _refuse_around(opt_state: PyTree, where: str) -> None:
    """Raises ValueError where a transformation around `with_loss_scale` would make it wrong.

    Of a partition, each group has its own loss scale, or no state: what stands still, for example.
    """
    for node, _ in _nodes_to_scales(opt_state):
        if isinstance(node, BREAKING):
            raise ValueError(refusal(node, where))
        if isinstance(node, optax.transforms.PartitionState):
            _check_groups(node, where)


def _check_groups(state: Any, where: str) -> None:
    without = [
        name
        for name, group in state.inner_states.items()
        if not find_states(group) and jax.tree.leaves(group)
    ]
    if without:
        got = f"with_loss_scale is around some groups of optax.partition, and not {without[0]!r}, "
        got += "which would get gradients that are still scaled."
        fix = "Type with_loss_scale(optax.partition(...), loss_scale): it wraps all of them."
        raise ValueError(message(where, got, fix))


def _nodes_to_scales(opt_state: PyTree) -> Iterator[tuple[Any, Any]]:
    """Yields each node on the way to a loss scale, with the key that leads on from it."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_state)
    for path in (path for path, x in leaves if _is_state(x)):
        node = opt_state
        for key in path:
            yield node, key
            node = _below(node, key)


def _before(node: Any, key: Any) -> list[Any]:
    """Returns the states of a chain, named or not, that stand before that of `key`."""
    if type(node) is tuple and isinstance(key, jax.tree_util.SequenceKey):
        return list(node[: key.idx])
    if isinstance(node, OrderedDict) and isinstance(key, jax.tree_util.DictKey):
        return [node[name] for name in itertools.takewhile(lambda name: name != key.key, node)]
    return []


def _below(node: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name, None)
    at: Any = getattr(key, "idx", getattr(key, "key", None))
    return node[at] if isinstance(node, (tuple, list, Mapping)) else None


def _is_of_optax(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_of_optax, x))
    return type(x).__module__.partition(".")[0] in ("optax", "mpjax")


def unpack(state: LossScaleState) -> LossScale:
    if state.adjustment is None:
        return NoOpLossScale()
    if not isinstance(state.adjustment, Mapping):
        return state.adjustment
    missing = [name for name in DYNAMIC_FIELDS if name not in state.adjustment]
    if missing and state.adjustment:
        got = f"the loss scale in the state lacks {', '.join(map(repr, missing))}."
        fix = "Restore into tx.init(params), so that what an older version did not save is filled."
        raise ValueError(message("LossScaleState.adjustment", got, fix))
    cls = DynamicLossScale if state.adjustment else StaticLossScale
    config = [] if missing else [state.adjustment[name] for name in DYNAMIC_FIELDS]
    return cls.tree_unflatten(None, (state.loss_scale, *config))


def gradient_params(params: PyTree) -> PyTree:
    """Returns the parameters that have gradients: lookahead keeps two copies of them."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
