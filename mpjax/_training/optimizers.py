"""Refuses optimizers that a train step cannot run; the errors say what to type instead."""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any

import jax
import optax
import optax.contrib

from mpjax._base.errors import message
from mpjax._base.typing import PyTree
from mpjax._scaling.chains import wrapper_around
from mpjax._scaling.wrappers import refusal

_WHERE = "make_train_step(tx)"


def check_supported(tx_state: PyTree) -> None:
    """Raises ValueError for the state of an optimizer that a step cannot run."""
    if _first(tx_state, _is_lookahead) is not None:
        got = "optax.lookahead has two copies of the parameters, of which a loss function gets one."
        fix = "Write the step: take gradients of params.fast by mpjax.value_and_grad, and give "
        fix += "tx.update(grads, opt_state, params), with params = "
        fix += "optax.LookaheadParams.init_synced(...) and tx = "
        fix += "mpjax.with_loss_scale(optax.lookahead(...), loss_scale)."
        raise ValueError(message(_WHERE, got, fix))
    if _first(tx_state, _is_opaque) is not None:
        got = "optax.contrib.sam(opaque_mode=True) asks for a grad_fn, which a step does not give."
        fix = "Type opaque_mode=False: each step is then one of its sync_period; or, to keep it, "
        fix += "write the step: tx.update(grads, opt_state, params, grad_fn=grad_fn)."
        raise ValueError(message(_WHERE, got, fix))
    around = wrapper_around(tx_state)
    if around is not None:
        raise ValueError(refusal(around, _WHERE))


@contextlib.contextmanager
def naming_arguments() -> Generator[None]:
    """Says of an optimizer that asks for an argument that a step does not give it what to type."""
    try:
        yield
    except (TypeError, ValueError) as error:
        asked = _ASKS.search(str(error))
        if asked is None:
            raise
        name = asked["missing"] or asked["needed"]
        got = f"the optimizer asks for {name}=, which a step does not give: {error}"
        allowed = "Allowed: optimizers that ask for value, grad and value_fn at most."
        fix = "Write the step: loss, grads = mpjax.value_and_grad(loss_fn, loss_scale=...)(params, "
        fix += f"batch), then tx.update(grads, opt_state, params, {name}=...)."
        raise ValueError(message(_WHERE, got, allowed, fix)) from error


_ASKS = re.compile(
    r"missing \d+ required .*arguments?: '(?P<missing>\w+)'|(?P<needed>\w+) must be provided"
)
"""What Python says of an argument that is missing, and what optax does."""


def _first(tree: PyTree, wanted: Callable[[Any], bool]) -> Any:
    return next(filter(wanted, jax.tree.leaves(tree, is_leaf=wanted)), None)


def _is_lookahead(x: Any) -> bool:
    return isinstance(x, optax.LookaheadState)


def _is_opaque(x: Any) -> bool:
    return isinstance(x, optax.contrib.SAMState) and x.cache is None
