"""Type aliases shared by every layer."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
"""Any pytree; JAX has no type for one."""

DTypeSpec: TypeAlias = Any
"""Anything that names a dtype: 'bf16', 'bfloat16', `jnp.bfloat16`, a `numpy.dtype`."""

ScalarLike: TypeAlias = jax.Array | np.ndarray | np.generic | float | int | bool
AxisName: TypeAlias = Hashable | Sequence[Hashable] | None
LossFunction: TypeAlias = Callable[..., Any]
KeyPath: TypeAlias = tuple[Any, ...]
