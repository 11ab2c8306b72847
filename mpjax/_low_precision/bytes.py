"""Counts the bytes that training needs for each parameter, without allocating any."""

import collections
import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax

from mpjax._base.described import described
from mpjax._base.dtypes import canonical_dtype
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, html_table
from mpjax._base.typing import DTypeSpec, PyTree
from mpjax._low_precision.codes import is_coded
from mpjax._scaling.transformation import check_leaves, check_transformation, is_transformation


@dataclasses.dataclass(frozen=True, repr=False)
class BytesPerParameter(Shown):
    """Bytes for each parameter, by purpose; a table in `print` and in a notebook."""

    rows: tuple[tuple[str, float], ...]
    count: int  # of parameters

    @property
    def total(self) -> float:
        """Everything that stays between two steps, and the gradients."""
        return sum(size for _, size in self.rows)

    def _headline(self) -> str:
        return f"{self._title()}: {self.total:.3f}"

    def _title(self) -> str:
        return f"bytes a parameter, of {self.count:,}"

    def _cells(self) -> list[tuple[str, str]]:
        return [(name, f"{size:.3f}") for name, size in (*self.rows, ("total", self.total))]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._cells())
        lines = [f"{name:<{width}}  {size:>6}" for name, size in self._cells()]
        return "\n".join((self._title(), *lines))

    def _repr_html_(self) -> str:
        return html_table(self._title(), ("for", "bytes"), self._cells())


@names_keywords()
def bytes_per_parameter(
    tx: optax.GradientTransformation, params: PyTree, *, grad_dtype: DTypeSpec | None = "float32"
) -> BytesPerParameter:
    """Returns the bytes that training takes for each parameter: weights, gradients, state.

    It allocates nothing. It does not count activations.

    Args:
      tx: any optax transformation.
      params: arrays, or specs of them (`jax.ShapeDtypeStruct`), in the dtypes of training.
      grad_dtype: of the gradients: float32 as `mpjax.value_and_grad` gives them; None where they
        are released before the next is made, and do not count.

    Returns:
      A `BytesPerParameter` with `rows`, `total` and `count`: 'weights', 'gradients', then each
      field of the state by its name, and 'rest' for state that is no tree like the parameters.

    Raises:
      TypeError: `tx` is no optax transformation, or a parameter no array.

    Example:
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
      >>> tx = mpjax.optim.with_quantized_state(optax.adamw(1e-3))
      >>> tx = mpjax.optim.with_master_weights(tx, bits=24)
      >>> print(mpjax.optim.bytes_per_parameter(tx, params))
      bytes a parameter, of 1,048,576
      weights       2.000
      gradients     4.000
      corrections   1.000
      mu            1.016
      nu            1.016
      rest          0.000
      total         9.031
    """
    if is_transformation(params):
        got = f"got {described(tx)} as the optimizer, and an optimizer as the parameters."
        fix = "Swap them: mpjax.optim.bytes_per_parameter(tx, params)."
        raise TypeError(message("bytes_per_parameter", got, fix))
    check_transformation(tx, "bytes_per_parameter(tx)")
    check_leaves(params, "bytes_per_parameter", "mpjax.optim.bytes_per_parameter(tx, {})")
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    count = sum(math.prod(x.shape) for x in leaves)
    sizes: collections.Counter[str] = collections.Counter()
    sizes["weights"] = sum(_size(x) for x in leaves)
    if grad_dtype is not None:
        dtype = canonical_dtype(grad_dtype, "bytes_per_parameter(grad_dtype)")
        sizes["gradients"] = count * dtype.itemsize
    state = jax.eval_shape(tx.init, params)
    known = {tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    rest = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_coded):
        field = _field(path, known)
        size = sum(_size(leaf) for leaf in jax.tree.leaves(x))
        if field is None:
            rest += size
        else:
            sizes[field] += size
    rows = [(name, size / max(count, 1)) for name, size in (*sizes.items(), ("rest", rest))]
    return BytesPerParameter(tuple(rows), count)


def _field(path: Any, known: set[Any]) -> str | None:
    """Returns the name of the field that holds a tree like the parameters with this leaf."""
    for i in range(len(path)):  # the outermost: a parameter may be called `mu` too
        name = getattr(path[i], "name", None)
        if name is not None and tuple(path[i + 1 :]) in known:
            return str(name)
    return None


def _size(x: Any) -> int:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return math.prod(x.shape) * np.dtype(np.uint32).itemsize * 2
    return math.prod(x.shape) * x.dtype.itemsize
