"""Traces a function: from Python to a jaxpr, with the modules that it changes.

A function under autocast is traced wherever it is called, also outside of `jit`. Two errors of JAX
come from that alone, and get a note that says what to type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._autocast import speed
from mpjax._autocast.arguments import nnx_names, stateful
from mpjax._autocast.eight_bits.stored_weights import dequantize_at_products
from mpjax._autocast.known import derivatives
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.quantized_array import dequantize, holds_quantized
from mpjax._base.users_line import NEEDS_VALUES, users_line
from mpjax._jaxpr.one_form import in_one_form


def name_of(fun: Any) -> str:
    """Returns the name of a function, or of an object that can be called."""
    return getattr(fun, "__name__", type(fun).__name__)


class Traced:
    """A function's jaxpr, the arrays that it is for, and the structure of its results.

    The results are a pair: the function's own result, and the new leaves of each module among its
    arguments that it changed. `changed` has the places of these modules.
    """

    __slots__ = ("arrays", "changed", "given", "jaxpr", "out_tree", "places")

    def __init__(
        self, jaxpr: Any, given: Any, places: list[int], out_tree: Any, changed: list[int]
    ) -> None:
        self.jaxpr = jaxpr
        self.given = given  # the arguments
        self.places = places  # of the arrays among the leaves of the arguments
        leaves = jax.tree.leaves(given)
        self.arrays = [leaves[i] for i in places]
        self.out_tree = out_tree
        self.changed = changed


def trace(
    fun: Callable[..., Any], args: Any, kwargs: Any, widened: AbstractSet[int] = frozenset()
) -> Traced:
    """Returns the jaxpr of `fun` over the arrays among its arguments; other leaves are static.

    Args:
      fun, args, kwargs: the function and its arguments.
      widened: the places of leaves that `fun` is given in float32.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]
    where = f"autocast({name_of(fun)})"
    has_quantized = holds_quantized((args, kwargs))
    trees: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        full, as_given = list(leaves), {}
        for i, array in zip(places, arrays, strict=True):
            full[i] = array.astype(FLOAT32) if i in widened else array
            if i in widened:
                as_given[id(full[i])] = array
        copies = jax.tree.unflatten(treedef, full)
        if has_quantized:
            copies = dequantize(copies)
        watched = stateful.WatchedModules((args, kwargs), copies, where)
        nnx_names.name_modules(copies)
        result = fun(*copies[0], **copies[1])
        nnx_names.unname_modules(result)
        changed = watched.changes()
        returned = (result, [new for _, new in changed])
        if as_given:
            returned = jax.tree.map(lambda leaf: as_given.get(id(leaf), leaf), returned)
        paths, out_tree = jax.tree_util.tree_flatten_with_path(returned)
        trees[:] = [out_tree, [place for place, _ in changed]]
        return [_checked_result(fun, path[1:], leaf) for path, leaf in paths]

    arrays = [leaves[i] for i in places]
    linen = stateful.linen_modules(fun, (args, kwargs))
    before = stateful.variables(linen)
    with _explained(where, arrays):
        jaxpr = jax.make_jaxpr(flat)(*arrays)
    stateful.check_unchanged(before, linen, where)
    return Traced(_prepared(jaxpr, arrays), (args, kwargs), places, *trees)


def _prepared(jaxpr: Any, arrays: Sequence[Any]) -> Any:
    """Returns the program that is decided about: the same numbers, written as passes expect it."""
    jaxpr = derivatives.mark_backward_passes(in_one_form(jaxpr))
    jaxpr = speed.batch_counted_rows(dequantize_at_products(jaxpr, arrays), arrays)
    return speed.mark_permutations(jaxpr)


def _is_traced(leaf: Any) -> bool:
    """Whether a leaf is an input of the jaxpr: JAX's arrays are, and NumPy's floating ones.

    NumPy's integers and booleans may be shapes or flags that `fun` needs as values.
    """
    if isinstance(leaf, np.ndarray):
        return jnp.issubdtype(leaf.dtype, jnp.floating)
    return isinstance(leaf, jax.Array)


def _checked_result(fun: Any, path: Any, leaf: Any) -> Any:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return leaf
    raise TypeError(
        message(
            f"autocast({name_of(fun)})",
            f"result{jax.tree_util.keystr(path)} is not an array; got {type(leaf).__name__}.",
            "Allowed: pytrees of arrays and numbers, as for jax.jit.",
            "Return what is not an array from a function outside autocast.",
        )
    )


@contextlib.contextmanager
def _explained(where: str, arrays: Sequence[Any]) -> Generator[None]:
    """Adds a note to an error of JAX that `fun` raises only where autocast traces it."""
    try:
        yield
    except NEEDS_VALUES as error:
        if all(map(compat.has_values, arrays)):  # else a transformation outside traces it too
            got = (
                "the function needs the value of an array, and autocast traces it as jax.jit does."
            )
            fix = "Use jnp.where or jax.lax.cond there, or hand the value over as a Python number."
            error.add_note(message(where, got, *users_line(error), fix))
        raise
    except NotImplementedError as error:
        if str(error).startswith(_OF_CUDNN):
            error.add_note(message(where, *_CUDNN))
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # of Flax, which is not to be imported
            error.add_note(message(where, *_CLOSED_OVER))
        raise


_CLOSED_OVER = (
    "the function changes an NNX module that is none of its arguments: statistics, say, or RNGs.",
    "Allowed: a module as an argument, whose changes come back to it.",
    "Type mpjax.autocast(fun, policy)(model, x), with def fun(model, x); for a whole step "
    "mpjax.nnx.make_train_step(model, tx, policy, loss_fn), with loss_fn(model, batch).",
)


_OF_CUDNN = "Q must be fp16/bf16"
_CUDNN = (
    'jax.nn.dot_product_attention(implementation="cudnn") got float32: it is refused while the '
    "function is traced, before autocast can make it low.",
    "Allowed: mpjax.dot_product_attention, which takes the same arguments, or no implementation=.",
    "Type mpjax.dot_product_attention(...); either way cuDNN runs it on GPUs.",
)
