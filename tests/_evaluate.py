"""Evaluates a jaxpr in NumPy, each operation in the dtype that it was traced with.

That is what makes thousands of random programs affordable: only what `_numpy_operations` lacks is
bound eagerly, and compiled.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _numpy_operations import TABLE, WITH_PARAMS
from jax import lax
from jax.extend.core import Literal

Flags = tuple[bool, ...]  # a fact about each value of a list; see `_rounding`
_SCATTER = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


@functools.cache
def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@functools.cache
def is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def open_program(program: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the equations and the constants of a jaxpr, closed or not."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


def called(eqn: Any) -> Any:
    """Returns the program that an equation calls once on all of its operands, or None."""
    if eqn.primitive.name in ("scan", "while", "cond", "custom_linear_solve", "reduce"):
        return None
    held = "call" if eqn.primitive.name == "custom_vmap_call" else "call_jaxpr"
    return eqn.params.get(held) or eqn.params.get("jaxpr")


def scan_counts(eqn: Any) -> tuple[int, int]:
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


class Exact:
    """Every operation in the dtype that it was traced with."""

    def dtype(self, dtype: Any) -> Any:
        return dtype

    def run(self, program: Any, args: Sequence[Any], flags: Flags = ()) -> list[Any]:
        """Returns the outputs of a jaxpr."""
        jaxpr, consts = open_program(program)
        env = dict(zip(jaxpr.constvars, map(self.enter, consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))
        rows = self.rows(program, flags)
        for eqn, (operands, results) in zip(jaxpr.eqns, rows, strict=True):
            values = [self._read(env, atom) for atom in eqn.invars]
            outs = self.equation(eqn, values, operands, results)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, atom) for atom in jaxpr.outvars]

    def rows(self, program: Any, flags: Flags) -> list[tuple[Flags, Flags]]:
        return [((), ())] * len(open_program(program)[0].eqns)

    def inputs(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Returns arguments as the program reads them: a NumPy float64 is a float32 to JAX."""
        dtypes = [v.aval.dtype for v in program.jaxpr.invars]
        read = [
            a if is_key(dtype) else np.asarray(a).astype(dtype)
            for a, dtype in zip(args, dtypes, strict=True)
        ]
        return [self.enter(a) for a in read]

    def enter(self, value: Any) -> Any:
        """Returns a constant as this evaluation holds it."""
        if is_key(getattr(value, "dtype", None)):
            return value
        array = np.asarray(value)
        return array.astype(self.dtype(array.dtype), copy=False)

    def _read(self, env: dict[Any, Any], atom: Any) -> Any:
        if isinstance(atom, Literal):
            traced = np.asarray(atom.val, atom.aval.dtype)
            return traced.astype(self.dtype(traced.dtype), copy=False)
        return env[atom]

    def equation(self, eqn: Any, values: list[Any], flags: Flags, out: Flags) -> list[Any]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, values, flags)
        if name == "while":
            return self._while(eqn, values, flags)
        if name == "cond":
            branches = eqn.params["branches"]
            index = min(max(int(values[0]), 0), len(branches) - 1)
            return self.run(branches[index], values[1:], flags[1:])
        if name == "custom_linear_solve":
            lengths = eqn.params["const_lengths"]
            start = lengths.matvec + lengths.vecmat
            kept = slice(start, start + lengths.solve)
            total = sum(lengths)
            solve = eqn.params["jaxprs"].solve
            return self.run(solve, values[kept] + values[total:], flags[kept] + flags[total:])
        program = called(eqn)
        if program is not None:
            return self.run(program, values, flags)
        if name == "low_product":  # autocast's own; compiling each takes longer than all the rest
            return self._low_product(eqn, values)
        return self.operation(eqn, values, flags, out)

    def _low_product(self, eqn: Any, values: list[Any]) -> list[Any]:
        program = eqn.params["program"]  # a float32 jaxpr, and the dtype to round operands to
        rounded = [v.astype(program.config.low).astype(np.float32) for v in values[:2]]
        outs = self.run(program.traced, [*rounded, *values[2:]])
        return [self._typed(o, v.aval) for o, v in zip(outs, eqn.outvars, strict=True)]

    def _scan(self, eqn: Any, values: list[Any], flags: Flags) -> list[Any]:
        consts, carried = scan_counts(eqn)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        carry, xs = values[consts : consts + carried], values[consts + carried :]
        stacked: list[Any] = [None] * length
        order = range(length)
        for i in reversed(order) if eqn.params["reverse"] else order:
            outs = self.run(body, [*values[:consts], *carry, *(x[i] for x in xs)], flags)
            carry, stacked[i] = outs[:carried], outs[carried:]
        if length == 0:
            ys = [self.empty(v.aval) for v in eqn.outvars[carried:]]
        else:
            ys = [_stack(column) for column in zip(*stacked, strict=True)]
        return [*carry, *ys]

    def empty(self, aval: Any) -> Any:
        return np.zeros(aval.shape, self.dtype(aval.dtype))

    def _while(self, eqn: Any, values: list[Any], flags: Flags) -> list[Any]:
        first = eqn.params["cond_nconsts"]
        start = first + eqn.params["body_nconsts"]
        carry = values[start:]
        decide = (*flags[:first], *flags[start:])
        while bool(self.run(eqn.params["cond_jaxpr"], [*values[:first], *carry], decide)[0]):
            carry = self.run(
                eqn.params["body_jaxpr"], [*values[first:start], *carry], flags[first:]
            )
        return carry

    def operation(self, eqn: Any, values: list[Any], flags: Flags, out: Flags) -> list[Any]:
        """Returns the results of one operation that holds no program."""
        del flags, out
        name = eqn.primitive.name
        avals = [v.aval for v in eqn.outvars]
        if name == "bitcast_convert_type" and not is_key(avals[0].dtype):
            as_traced = np.ascontiguousarray(values[0].astype(eqn.invars[0].aval.dtype))
            outs: Any = as_traced.view(avals[0].dtype).reshape(avals[0].shape)
        elif name in TABLE and not any(is_key(getattr(v, "dtype", None)) for v in values):
            wide = [self.widened(v) for v in values]
            outs = TABLE[name](*wide, **(eqn.params if name in WITH_PARAMS else {}))
        else:
            outs = self.bound(eqn, values)
        outs = outs if eqn.primitive.multiple_results else [outs]
        return [self._typed(o, aval) for o, aval in zip(outs, avals, strict=True)]

    def widened(self, value: Any) -> Any:
        """Returns a 16-bit operand in float32: operations compute there and round once."""
        small = is_float(value.dtype) and value.dtype.itemsize < 4
        return value.astype(np.float32) if small else value

    def bound(self, eqn: Any, values: list[Any]) -> Any:
        if eqn.primitive.name in _SCATTER:  # its jaxpr of two scalars has a dtype of its own
            given = {k: v for k, v in eqn.params.items() if not k.startswith("update_")}
            return _SCATTER[eqn.primitive.name](*map(jnp.asarray, values), **given)
        params = {name: self._param(value) for name, value in eqn.params.items()}
        return eqn.primitive.bind(*map(jnp.asarray, values), **params)

    def _param(self, value: Any) -> Any:
        return self.dtype(value) if isinstance(value, np.dtype) else value

    def _typed(self, value: Any, aval: Any) -> Any:
        if is_key(aval.dtype):
            return value
        array, dtype = np.asarray(value), self.dtype(aval.dtype)
        if array.dtype.kind == "c" and dtype.kind != "c":
            array = array.real
        return array.astype(dtype, copy=False)


def _stack(column: Sequence[Any]) -> Any:
    keys = is_key(getattr(column[0], "dtype", None))
    return jnp.stack(column) if keys else np.stack(column)


def evaluate(program: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr, every operation in its own dtype."""
    exact = Exact()
    with np.errstate(all="ignore"):
        return exact.run(program, exact.inputs(program, args))


class Float64(Exact):
    """Every operation in float64 that was traced in float32."""

    def dtype(self, dtype):
        return np.dtype(np.float64) if dtype == np.float32 else dtype


def run(fun, *args, how=None):
    """Returns the results of a function, operation by operation: nothing is compiled."""
    how = how or Exact()
    program = jax.make_jaxpr(fun)(*args)
    with np.errstate(all="ignore"):
        return how.run(program, how.inputs(program, jax.tree.leaves(args)))


def exactly(fun, *args):
    return run(fun, *args, how=Float64())


def off(outs, right):
    """Returns the largest relative error of some arrays; infinite where one is not finite."""
    pairs = zip(outs, right, strict=True)
    worst = max(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b) for a, b in pairs)
    return worst if np.isfinite(worst) else np.inf
