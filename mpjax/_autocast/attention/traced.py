"""One pass of a kernel that JAX offers as a function with a derivative.

The derivative, traced, holds the kernels of both passes. The first of them is run for its results;
or these are known, and what follows is run with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.binding import evaluate as evaluate_with


class Forward:
    """The kernel of the forward pass among the equations of a derivative.

    Args:
      is_forward: tells its equation.
      results: what it gives, where that is known: it is not run then.
    """

    def __init__(
        self, is_forward: Callable[[Any], bool], results: Sequence[Any] | None = None
    ) -> None:
        self._is_forward = is_forward
        self._met = False
        self.results = list(results or ())

    def run(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        """Returns the results of an equation."""
        program = structure.single_program(eqn)
        if program is not None:
            return evaluate_with(compat.closed(program), values, self.run)
        if self._met or not self._is_forward(eqn):
            return _bind(eqn, values)
        self._met = True
        if not self.results:
            self.results = list(_bind(eqn, values))
        return self.results

    def found(self, kernel: str) -> list[Any]:
        """Returns what the kernel gives; an error unless it was met."""
        if not self._met:
            raise RuntimeError(
                f"attention: in what JAX {jax.__version__} traces of {kernel} there is no kernel "
                'of the forward pass; type implementation="xla", and report it.'
            )
        return self.results


def _bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation, as a kernel on one device gives them.

    What splits it over devices is left out, and so is the gradient of a bias, which nothing reads.
    """
    if not eqn.primitive.name.endswith("_wrapper"):
        return bind(eqn, values)
    params = eqn.params
    if params.get("variadic_args") == (True, True):
        params = {**params, "variadic_args": (True, False)}
    outs = list(eqn.primitive.impl(*values, **params))
    return [*outs, *(None for _ in eqn.outvars[len(outs) :])]


def first_pass(fun: Callable[..., Any], primals: Sequence[Any], forward: Forward) -> None:
    """Runs a function as its derivative does, of which a kernel keeps what it needs.

    Args:
      fun: of arrays; one that JAX has a kernel for.
      primals: what it reads.
      forward: holds what the kernel gives.
    """
    traced = jax.make_jaxpr(lambda *xs: jax.vjp(fun, *xs)[0])(*primals)
    evaluate_with(traced, primals, forward.run)


def second_pass(
    fun: Callable[..., Any], primals: Sequence[Any], ct: Any, forward: Forward
) -> list[Any]:
    """Returns the cotangents of a function, whose first pass `forward` knows the results of.

    Args:
      fun: of arrays; one that JAX has a kernel for.
      primals: what it reads.
      ct: the cotangent of its result.
      forward: what stands for the kernel of the first pass.
    """

    def grads(*args: Any) -> Any:
        *xs, g = args
        return jax.vjp(fun, *xs)[1](g)

    traced = jax.make_jaxpr(grads)(*primals, ct)
    return evaluate_with(traced, [*primals, ct], forward.run)
