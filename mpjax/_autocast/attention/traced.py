"""Runs one pass of a kernel that JAX offers only as a function with a derivative.

A trace of the derivative has the kernels of both passes in it. `first_pass` runs the first for its
results; `second_pass` puts known results in place of the first kernel, and runs the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._base import compat
from mpjax._jaxpr import structure
from mpjax._jaxpr.binding import bind
from mpjax._jaxpr.binding import evaluate as evaluate_with
from mpjax._jaxpr.equation import Eqn


class Forward:
    """The kernel of the forward pass among the equations of a derivative.

    Args:
      is_forward: whether an equation is the kernel.
      results: the kernel's results if they are known: it does not run then.
    """

    def __init__(
        self, is_forward: Callable[[Any], bool], results: Sequence[Any] | None = None
    ) -> None:
        self._is_forward = is_forward
        self._met = False
        self.results = list(results or ())

    def run(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
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
        """Returns the kernel's results; raises RuntimeError if the trace did not contain it."""
        if not self._met:
            raise RuntimeError(
                f"attention: in what JAX {jax.__version__} traces of {kernel} there is no kernel "
                'of the forward pass; type implementation="xla", and report it.'
            )
        return self.results


def _bind(eqn: Eqn, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation, computed on one device.

    JAX's wrapper that splits a kernel over devices is left out, and so is the gradient of a bias,
    which nothing reads.
    """
    if not eqn.primitive.name.endswith("_wrapper"):
        return bind(eqn, values)
    params = eqn.params
    if params.get("variadic_args") == (True, True):
        params = {**params, "variadic_args": (True, False)}
    outs = list(eqn.primitive.impl(*values, **params))
    return [*outs, *(None for _ in eqn.outvars[len(outs) :])]


def first_pass(fun: Callable[..., Any], primals: Sequence[Any], forward: Forward) -> None:
    """Runs the forward pass of a function's derivative, and records the kernel's results.

    Args:
      fun: a function of arrays that JAX computes by a kernel.
      primals: its arguments.
      forward: records the results of the kernel.
    """
    traced = jax.make_jaxpr(lambda *xs: jax.vjp(fun, *xs)[0])(*primals)
    evaluate_with(traced, primals, forward.run)


def second_pass(
    fun: Callable[..., Any], primals: Sequence[Any], ct: Any, forward: Forward
) -> list[Any]:
    """Returns the cotangents of a function's arguments, given the results of the forward kernel.

    Args:
      fun: a function of arrays that JAX computes by a kernel.
      primals: its arguments.
      ct: the cotangent of its result.
      forward: has the results of the forward kernel, which does not run.
    """

    def grads(*args: Any) -> Any:
        *xs, g = args
        return jax.vjp(fun, *xs)[1](g)

    traced = jax.make_jaxpr(grads)(*primals, ct)
    return evaluate_with(traced, [*primals, ct], forward.run)
