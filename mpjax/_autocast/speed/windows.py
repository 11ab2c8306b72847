"""Computes the cotangent of a pooled image without a scatter: from winners of one byte each.

The winner of a window is a *place*, a number within its span: the window's size rounded up to a
multiple of the stride. The padded image is divided into blocks of the size of a stride, and each
window begins with a block.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._base import compat

_NOWHERE = 255  # the place of no element
_MOST_ELEMENTS = 64  # of a window: each is three operations of the forward pass
_MOST_WINDOWS = 27  # that an element is in: at 49 the compiled program moved more than JAX's own


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows as `lax.reduce_window` has them, without dilation."""

    window_dimensions: Sequence[int]
    window_strides: Sequence[int]
    padding: Sequence[tuple[int, int]]

    @property
    def spans(self) -> list[int]:
        """In each dimension, the window's size rounded up to a multiple of its stride."""
        return list(map(operator.mul, self.overlaps, self.window_strides))

    @property
    def overlaps(self) -> list[int]:
        """In each dimension, the largest number of windows that an element is in."""
        pairs = zip(self.window_dimensions, self.window_strides, strict=True)
        return [-(-size // stride) for size, stride in pairs]

    def is_supported(self, shape: Sequence[int]) -> bool:
        """Whether the cotangent can be computed here by a small program, for an image of a shape.

        A symbolic dimension (`jax.export`), such as a batch, must have windows of one element.
        """
        rows = zip(shape, self.window_dimensions, self.window_strides, self.padding, strict=True)
        if any(not isinstance(n, int) and (*how,) != (1, 1, (0, 0)) for n, *how in rows):
            return False
        out = lax.reduce_window_shape_tuple(
            shape, self.window_dimensions, self.window_strides, self.padding
        )
        return (
            0 not in out
            and min(itertools.chain(*self.padding), default=0) >= 0
            and math.prod(self.window_dimensions) <= _MOST_ELEMENTS
            and math.prod(self.overlaps) <= _MOST_WINDOWS
            and math.prod(self.spans) <= _NOWHERE
        )

    def winners(self, image: jax.Array, shape: Sequence[int], select_prim: Any) -> jax.Array:
        """Returns the place of each window's winner: u8[`shape`].

        As in JAX on a GPU, elements are compared in order, padding included, and a later one wins
        unless the best before it is `>=`, which NaN never is.

        Args:
          image: the operand of the pooling.
          shape: the shape of its result.
          select_prim: `lax.ge_p`, or `lax.le_p` where the smallest wins.
        """
        worst = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, image.dtype)
        padded = lax.pad(image, worst, [(*edges, 0) for edges in self.padding])
        best, winners = padded, jnp.zeros(shape, np.uint8)
        for start in itertools.product(*map(range, self.window_dimensions)):
            counts = zip(start, shape, self.window_strides, strict=True)
            limits = [first + (count - 1) * stride + 1 for first, count, stride in counts]
            values = lax.slice(padded, start, limits, self.window_strides)
            if not any(start):
                best = values
                continue
            stays = select_prim.bind(best, values)
            place = np.uint8(np.ravel_multi_index(start, self.spans))
            best = jnp.where(stays, best, values)
            winners = jnp.where(stays, winners, place)
        return winners


def cotangent(ct: jax.Array, image: jax.Array, *, select_prim: Any, **window: Any) -> jax.Array:
    """Returns the cotangent of a pooled image: to each element those of the windows that it won.

    An element reads the cotangents of the window that begins with its block, and of those that
    begin with the blocks before. One `lax.pad` for each place in a window would be simpler, but
    more operations: XLA recomputes in each reading kernel only what takes few.

    Args:
      ct: the cotangent of the result.
      image: the operand of the pooling.
      select_prim: `lax.ge_p`, or `lax.le_p` where the smallest wins.
      window: the fields of `Windows`.

    Returns:
      An array of the image's shape.

    Dtypes:
      That of `ct`; cotangents of overlapping windows are added in float32 and rounded once.
    """
    windows = Windows(**window)
    winners = windows.winners(image, ct.shape, select_prim)
    wide = ct if ct.dtype.itemsize > 2 else ct.astype(np.float32)
    blocks = _Blocks.of(windows, image.shape, ct.shape)
    total: Any = None
    for before in itertools.product(*map(range, windows.overlaps)):
        won = lax.eq(blocks.repeated(winners, before, np.uint8(_NOWHERE)), blocks.places(before))
        read = blocks.repeated(wide, before, np.zeros((), wide.dtype))
        part = jnp.where(won, read, jnp.zeros_like(read))
        total = part if total is None else total + part
    starts = [low for low, _ in windows.padding]
    ends = map(operator.add, starts, image.shape)
    sharding = compat.explicit_sharding(jax.typeof(image))
    return lax.slice(blocks.joined(total, sharding), starts, list(ends)).astype(ct.dtype)


@dataclass(frozen=True)
class _Blocks:
    """Arrays in blocks: a dimension of stride 1 as it is, any other as two, (blocks, stride)."""

    windows: Windows
    counts: Sequence[int]  # of blocks, in each dimension

    @classmethod
    def of(cls, windows: Windows, image: Sequence[int], out: Sequence[int]) -> _Blocks:
        """Returns the blocks that cover an image and all windows, from their shapes."""
        rows = zip(
            image, out, windows.window_strides, windows.overlaps, windows.padding, strict=True
        )
        return cls(
            windows,
            [
                max(-(-(low + size) // stride), windows_here + overlap - 1)
                for size, windows_here, stride, overlap, (low, _) in rows
            ],
        )

    @property
    def shape(self) -> list[int]:
        """The shape of an array in blocks."""
        pairs = zip(self.counts, self.windows.window_strides, strict=True)
        return [n for count, stride in pairs for n in ([count] if stride == 1 else [count, stride])]

    @property
    def axes(self) -> list[int]:
        """The axis of blocks of each dimension, in this shape."""
        earlier = itertools.accumulate(
            (1 if stride == 1 else 2 for stride in self.windows.window_strides), initial=0
        )
        return list(earlier)[:-1]

    def repeated(self, x: jax.Array, before: Sequence[int], fill: Any) -> jax.Array:
        """Returns, for each element, the `x` of the block that is `before` its own by so many."""
        rows = zip(before, self.counts, x.shape, strict=True)
        moved = lax.pad(x, fill, [(back, count - back - n, 0) for back, count, n in rows])
        return lax.broadcast_in_dim(moved, self.shape, self.axes)

    def places(self, before: Sequence[int]) -> jax.Array:
        """Returns each element's place in the window that begins `before` its block: u8[...]."""
        spans, strides = self.windows.spans, self.windows.window_strides
        first = tuple(map(operator.mul, before, strides))
        place = jnp.full(self.shape, np.ravel_multi_index(first, spans), np.uint8)
        for i, (axis, stride) in enumerate(zip(self.axes, strides, strict=True)):
            if stride > 1:
                step = np.uint8(math.prod(spans[i + 1 :]))
                place += lax.broadcasted_iota(np.uint8, self.shape, axis + 1) * step
        return place

    def joined(self, x: jax.Array, sharding: Any) -> jax.Array:
        """Returns an array in blocks as a plain one, with an explicit sharding or None."""
        shape = list(map(operator.mul, self.counts, self.windows.window_strides))
        return lax.reshape(x, shape, out_sharding=sharding)
