"""The types of a jaxpr and of its equations, as far as mpjax reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Eqn(Protocol):
    """An equation: a primitive, its parameters, its operands and its results.

    `jax.extend.core.JaxprEqn` is one. Operands are variables or literals; results are variables.
    """

    @property
    def primitive(self) -> Any: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...

    def replace(self, **changes: Any) -> Eqn: ...


class Jaxpr(Protocol):
    """An open jaxpr: a program without the arrays that it closes over.

    `jax.extend.core.Jaxpr` is one.
    """

    @property
    def eqns(self) -> Sequence[Eqn]: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...
    @property
    def constvars(self) -> Sequence[Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def debug_info(self) -> Any: ...
