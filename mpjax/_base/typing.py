"""Type aliases shared by every layer."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
"""Any pytree; JAX has no type for one."""

DTypeSpec: TypeAlias = Any
"""Anything that names a dtype: 'bf16', 'bfloat16', `jnp.bfloat16`, a `numpy.dtype`."""

KnownPolicy: TypeAlias = Literal[
    "32-true",
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "64-true",
    "mixed_float16",
    "mixed_bfloat16",
    "O0",
    "O1",
    "O2",
    "O3",
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "half",
    "full",
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "float8_from_bfloat16",
    "float8_from_mixed_bfloat16",
    "float8_from_mixed_float16",
]
"""Names of policies, for an editor to complete; `get_policy` understands more spellings."""

PolicySpec: TypeAlias = KnownPolicy | object
"""Whatever `get_policy` takes: a name, a policy, a map of policies; None for the scoped default."""

ScalarLike: TypeAlias = jax.Array | np.ndarray | np.generic | float | int | bool
AxisName: TypeAlias = Hashable | Sequence[Hashable] | None
LossFunction: TypeAlias = Callable[..., Any]
KeyPath: TypeAlias = tuple[Any, ...]
