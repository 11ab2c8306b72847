"""An attention as data: its scale and mask, its operands for a kernel, its form for XLA.

An attention is `softmax(scale * q kᵀ + bias) v`, over the keys that a row may read. Its author
chose an order of axes. Kernels read `Operands`, whose order is [batch, time, heads, size].
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base import compat
from mpjax._jaxpr.equation import Eqn

LEAST = -0.7 * float(np.finfo(np.float32).max)  # the logit of a key that is not read


class Operands(NamedTuple):
    """The operands of a kernel. Heads of the query may share those of key and value, in groups."""

    query: Any  # [batch, queries, heads, size]
    key: Any  # [batch, keys, key heads, size]
    value: Any  # [batch, keys, key heads, size]
    bias: Any = None  # float; broadcastable to [batch, heads, queries, keys]
    mask: Any = None  # bool, broadcastable as well: True where a key is read
    lengths: Any = None  # int32[batch]: the number of keys

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The shape of the logits: batch, heads, queries, keys."""
        batch, queries, heads, _ = self.query.shape
        return batch, heads, queries, self.key.shape[1]


class Empty(enum.Enum):
    """The result of a row that reads no key. In XLA's form its logits are all equal."""

    MEAN = "mean"  # the mean of all values: `where(mask, logits, least)` gave the least for all
    THROUGH = "through"  # the mean too, but logits absorbed by a large bias still get gradients
    ALL = "all"  # the result with all keys: a bias shifted all logits alike, and absorbed none
    NAN = "nan"  # `where(mask, logits, -inf)` gave -inf for all keys
    NAN_THROUGH = "nan through"  # a bias of -inf: gradients are NaN too


@dataclass(frozen=True)
class Spec:
    """The options of an attention: scale, window, and the result of rows without keys."""

    scale: float
    left: int | None = None  # query i reads no key before i - left
    right: int | None = None  # nor one after i + right: none after i in a causal attention, of 0
    empty: Empty = Empty.MEAN

    def has_empty_rows(self, queries: int, keys: int) -> bool:
        """Whether the window alone leaves a row without keys."""
        return self.left is not None and queries - 1 - self.left > keys - 1

    def band(self, queries: int, keys: int) -> Any:
        """Returns the window as a mask, bool[queries, keys], or None if it excludes no key."""
        if self.left is None and self.right is None:
            return None
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (queries, keys), i) for i in (0, 1))
        read = jnp.ones((queries, keys), bool)
        if self.right is not None:
            read &= column <= row + self.right
        if self.left is not None:
            read &= column >= row - self.left
        return read


@dataclass(frozen=True, eq=False)
class AttentionProgram:
    """One attention, as a function of its author's arrays.

    Compared by identity: callers cache instances, so that `jit` traces each once.
    """

    spec: Spec
    form: Callable[..., tuple[Any, Any]]
    """XLA's form: maps the arrays to the result and the logarithm of each row's sum, f32[*lead,
    heads, queries]."""
    operands: Callable[..., Operands]
    """Maps the arrays to the operands of a kernel; linear in each floating one."""
    result: Callable[[Any], Any]
    """Maps a kernel's result to the author's order of axes."""
    lead: tuple[int, ...]
    """The lengths of the author's batch axes, of which a kernel's batch is the product."""
    implementation: str | None = None
    shows_rows: bool = False
    """Whether the rows' sums are results of the function, and not for the backward pass alone."""
    product: Eqn | None = None
    """The user's last product, if the attention was written out: checkpoint policies know that."""
    _kept: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Wraps the form so that JAX traces and differentiates it once for each shape."""
        object.__setattr__(self, "form", compat.inlined(self.form))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns `make()`, memoised by key for as long as this instance lives."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def __repr__(self) -> str:
        return f"<{self.spec}>"


def batched(
    program: AttentionProgram, size: int, in_axes: Sequence[int | None]
) -> AttentionProgram:
    """Returns the program of `size` attentions, of arrays that are batched along some axis."""
    axes = tuple(in_axes)
    return program.once(("batched", size, axes), lambda: _batched(program, size, axes))


def _batched(
    program: AttentionProgram, size: int, in_axes: tuple[int | None, ...]
) -> AttentionProgram:
    def mapped(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(fun, in_axes=in_axes, axis_size=size)

    def operands(*arrays: Any) -> Operands:
        several = mapped(program.operands)(*arrays)
        batch = several.query.shape[1]
        return Operands(*(x if x is None else _joined(x, batch) for x in several))

    def result(x: Any) -> Any:
        apart = x.reshape(size, x.shape[0] // size, *x.shape[1:])
        return jax.vmap(program.result)(apart)

    form, lead = mapped(program.form), (size, *program.lead)
    return replace(program, form=form, operands=operands, result=result, lead=lead, _kept={})


def _joined(x: Any, batch: int) -> Any:
    """Returns an operand with its two leading batch axes joined."""
    wide = jnp.broadcast_to(x, (x.shape[0], batch, *x.shape[2:]))
    return wide.reshape(-1, *x.shape[2:])


def out_avals(program: AttentionProgram, avals: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the types of the result and of the rows' sums, on the mesh of the first operand."""
    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    out, rows = program.once(structs, lambda: jax.eval_shape(program.form, *structs))
    first = avals[0]
    return tuple(
        compat.like_varying(first.update(shape=x.shape, dtype=x.dtype, weak_type=False), first)
        for x in (out, rows)
    )
