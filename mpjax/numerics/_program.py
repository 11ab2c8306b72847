"""A loss and its gradients as one program over arrays, and its instrumented twin, compiled."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mpjax._base.dtypes import describe
from mpjax._base.errors import message
from mpjax._base.tree import is_array, is_deleted, leaf_paths, leaves_finite
from mpjax._base.users_line import NEEDS_VALUES
from mpjax.numerics._clock import Clock
from mpjax.numerics._collect import Unmeasured
from mpjax.numerics._plan import RunAs, RunPlan
from mpjax.numerics._run import Instrument, Runner

SMALL = 2**28
"""Bytes of all results together up to which a program is run operation by operation."""


class TwinRun(NamedTuple):
    """The results of one run of a twin, on the host."""

    values: Any  # f32[rows, width]
    index: Any  # i32[rows, depth]
    loss: float
    finite: tuple[bool, ...]  # of the loss and each gradient
    outputs: Any = None  # the instrument's own readings of the outputs


class LossProgram:
    """A function of arguments that returns a loss and gradients, traced for their types."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        names: Sequence[str],
        where: str,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock(where)
        self._leaves, self._treedef = jax.tree.flatten(list(args))
        self._places = [i for i, leaf in enumerate(self._leaves) if _is_traced(leaf)]
        paths = argument_paths(args, names)

        def flat(*arrays: Any) -> Any:
            full = list(self._leaves)
            for place, array in zip(self._places, arrays, strict=True):
                full[place] = array
            loss, grads = fun(*jax.tree.unflatten(self._treedef, full))
            return loss, jax.tree.map(lambda g: g if is_array(g) else None, grads)

        arrays = self.arrays(args)
        with self.clock("tracing"):
            self.jaxpr, (_, grads) = traced(flat, arrays, where)
            self.plan = RunPlan(self.jaxpr, [paths[place] for place in self._places])
        self.gradient_paths = leaf_paths(grads)
        self._leaves = [None if _is_traced(leaf) else leaf for leaf in self._leaves]
        self._compiled: dict[Any, Any] = {}

    def arrays(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arrays among the arguments, in the order of the program's inputs."""
        leaves = jax.tree.leaves(list(args))
        return [leaves[place] for place in self._places]

    def read(self, instrument: Instrument, args: Sequence[Any]) -> TwinRun:
        """Runs the program once; returns an instrument's readings."""
        arrays = self.arrays(args)
        twin = self.runner(self.twin(instrument), args, key=type(instrument))
        with self.clock("running"):
            loss, finite, rows, said = jax.device_get(twin(*arrays))
        return TwinRun(rows[0], rows[1], float(loss), tuple(bool(f) for f in finite), said)

    def runner(self, fun: Callable[..., Any], args: Sequence[Any], key: Any) -> Callable[..., Any]:
        """Returns a function of arrays, compiled as one program, or left to run by operations.

        Compiling takes nearly all of the time. A small program runs sooner by operations: JAX
        compiles each kind of operation once, for all layers and for all later programs.
        """
        if self.runs_by_operations(args):
            return lambda *given: fun(*map(jnp.asarray, given))
        return self._as_one(fun, self.arrays(args), key)

    def _as_one(
        self, fun: Callable[..., Any], arrays: Sequence[Any], key: Any
    ) -> Callable[..., Any]:
        if key not in self._compiled:
            with self.clock("compiling"):
                lowered = jax.jit(fun, out_shardings=replicated(arrays)).lower(*arrays)
                self._compiled[key] = lowered.compile()
        return self._compiled[key]

    def runs_by_operations(self, args: Sequence[Any]) -> bool:
        """Whether the program is small, and on one CPU.

        In a `shard_map` JAX compiles each operation anew wherever it stands: 1500 compilations for
        five layers.
        """
        if jax.default_backend() != "cpu" or replicated(self.arrays(args)) is not None:
            return False
        if any(level.kind == RunAs.SHARD_MAP.value for s in self.plan.sites for level in s.levels):
            return False
        held = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in self.plan.sites)
        return held <= SMALL

    def outputs(self, args: Sequence[Any], *, compiled: bool = False) -> list[Any]:
        """Returns the loss and the gradients; `compiled` runs a small program as one, too."""
        arrays = self.arrays(args)
        if compiled or not self.runs_by_operations(args):
            run = self._as_one(jaxpr_as_fun(self.jaxpr), arrays, key="outputs")
        else:
            run = self.runner(self._plainly, args, key="outputs")
        with self.clock("running"):
            return jax.block_until_ready(run(*arrays))

    def _plainly(self, *arrays: Any) -> list[Any]:
        return Runner(self.plan, Unmeasured()).run(arrays)[0]

    def twin(self, instrument: Instrument) -> Callable[..., Any]:
        """Returns the instrumented program: the loss, which results are finite, and rows."""

        def fun(*arrays: Any) -> Any:
            outs, rows, said = Runner(self.plan, instrument).run(arrays)
            return outs[0].astype(jnp.float32), leaves_finite(outs), tuple(rows), said

        return fun


def traced(flat: Callable[..., Any], arrays: Sequence[Any], where: str) -> Any:
    """Returns the jaxpr of a function and the types of its results, or says that it has none."""
    try:
        return jax.make_jaxpr(flat, return_shape=True)(*arrays)
    except NEEDS_VALUES as error:
        first = str(error).strip().splitlines()[0]
        got = f"the function cannot be traced, so that there is no program to look at: {first}"
        fix = "Make it one that jax.jit takes: jnp in place of np, and jnp.where or lax.cond in "
        fix += "place of `if` on an array."
        raise TypeError(message(where, got, fix)) from error


def replicated(arrays: Sequence[Any]) -> Any:
    """Returns the sharding of small results that every process is to have, None for one device."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return None


def check_function(fun: Any, where: str, given: str) -> None:
    """Refuses a loss function that cannot be called."""
    if not callable(fun):
        got = f"the first argument must be a function; got {type(fun).__name__}."
        arguments = "params, *batch" if "loss" in given else "*args"
        raise TypeError(message(where, got, f"Type {where}({given})({arguments})."))


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Returns the names that a function gives its first arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in positional][:count]
    return names + [f"args[{i}]" for i in range(len(names), count)]


def argument_paths(args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Returns a path for each leaf of the arguments: 'batch/x', or 'x' for an array itself."""
    paths: list[str] = []
    for name, arg in zip(names, args, strict=True):
        paths += [f"{name}/{path}" if path else name for path in leaf_paths(arg)]
    return paths


def check_alive(
    args: Sequence[Any], names: Sequence[str], where: str, *, tracers: bool = False
) -> None:
    """Refuses arrays whose memory was given away, and tracers unless they are allowed."""
    leaves = [leaf for arg in args for leaf in jax.tree.leaves(arg)]
    for path, leaf in zip(argument_paths(args, names), leaves, strict=True):
        if is_deleted(leaf):
            got = f"{path!r}, {describe(leaf)}, was donated to a step and is deleted."
            fix = "Pass the state that the step returned: after a skipped step it is the same."
            raise ValueError(message(where, got, fix, "Or make the step with donate=False."))
        if _is_tracer(leaf) and not tracers:
            got = f"{path!r} is traced; this looks at values, and belongs outside of jax.jit."
            raise TypeError(message(where, got, "Call it on the arrays that the step was given."))


def _is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))
