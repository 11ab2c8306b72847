"""Assertions about precision, for tests of your own: dtypes, bits, roundings, promotions.

Built on chex, which only this module asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base import compat
from mpjax._base.dtypes import canonical_dtype, describe, is_dtype_name, short_name
from mpjax._base.errors import message
from mpjax._base.foreign_errors import attributes_of
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import is_array, is_castable, leaf_paths
from mpjax._base.typing import PolicySpec, PyTree
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._policies.policy import get_policy
from mpjax.numerics import find_promotions

__all__ = [
    "assert_bitwise_equal",
    "assert_dtypes",
    "assert_no_promotions",
    "assert_one_compilation",
    "assert_products",
    "assert_within_rounding",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass
    __getattr__ = attributes_of(__name__, __all__, chex)


@names_keywords(POLICIES_OF)
def assert_dtypes(tree: PyTree, policy: PolicySpec, role: str = "param") -> None:
    """Fails unless every floating leaf has the dtype that a policy gives it.

    Args:
      tree: parameters, activations or outputs.
      policy: whatever `get_policy` takes; a `PolicyMap` is asked by path.
      role: 'param', 'compute' or 'output'.

    Raises:
      AssertionError: the first leaves that have another dtype, by path.
      ValueError: another role.

    Dtypes:
      Integers, keys, 8-bit and complex leaves are left out, as policies leave them.

    Transforms:
      jit too: dtypes are known while tracing.

    Example:
      >>> mpjax.testing.assert_dtypes({"w": jnp.ones(2)}, "bf16-mixed")
    """
    if role not in ("param", "compute", "output"):
        got = f"unknown role {role!r}."
        raise ValueError(message("assert_dtypes(role)", got, "Allowed: param, compute, output."))
    cast = getattr(get_policy(policy), f"cast_to_{role}")
    wanted = jax.eval_shape(cast, jax.tree.map(_struct, tree))
    pairs = zip(leaf_paths(tree), jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True)
    wrong = [
        f"{path!r} is {describe(leaf)}, and not {short_name(want.dtype)}"
        for path, leaf, want in pairs
        if is_castable(leaf) and leaf.dtype != want.dtype
    ]
    _fail_if(wrong, f"assert_dtypes: {len(wrong)} leaves are not as {policy} has them")


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


@names_keywords()
def assert_bitwise_equal(actual: PyTree, expected: PyTree) -> None:
    """Fails unless two trees have one structure and, leaf by leaf, the same dtype, shape and bits.

    -0.0 is not 0.0 here, and a NaN equals a NaN of the same bits.

    Raises:
      AssertionError: the trees differ, or the first leaves that do, by path.

    Dtypes:
      Any, PRNG keys too.

    Transforms:
      None: it reads values.

    Example:
      >>> mpjax.testing.assert_bitwise_equal(jnp.float32("nan"), jnp.float32("nan"))
    """
    chex.assert_trees_all_equal_structs(actual, expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    wrong: list[str] = []
    for path, (a, b) in zip(leaf_paths(actual), pairs, strict=True):
        alike = _type(a) == _type(b)
        a, b = _data(a), _data(b)
        if not alike:
            wrong.append(f"{path!r} is {describe(a)}, and not {describe(b)}")
        elif a.tobytes() != b.tobytes():
            count = int(np.sum(_bytes(a) != _bytes(b)))
            wrong.append(f"{path!r}, {describe(a)}: {count} of {a.size} elements differ")
    _fail_if(wrong, f"assert_bitwise_equal: {len(wrong)} leaves differ")


def _type(x: Any) -> tuple[Any, ...]:
    x = x if is_array(x) else np.asarray(x)
    return x.dtype, x.shape


def _data(x: Any) -> Any:
    if is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _bytes(x: Any) -> Any:
    return np.atleast_1d(x).view(np.uint8).reshape(x.size, -1).view(f"V{x.dtype.itemsize}")[:, 0]


@names_keywords()
def assert_within_rounding(
    actual: PyTree, expected: PyTree, dtype: Any, roundings: float = 1
) -> None:
    """Fails unless two trees differ by no more than some roundings to a dtype.

    One rounding is half a unit in the last place: `eps / 2` of the larger magnitude, and half the
    smallest subnormal number below the normal range. So the tolerance follows from the dtype.

    Args:
      actual, expected: trees of one structure and shapes; compared in float64.
      dtype: the dtype of the roundings, as 'bfloat16'.
      roundings: how many in a row.

    Raises:
      AssertionError: the first leaves that are further apart, with how many roundings it was.
      ValueError: `dtype` names none.

    Dtypes:
      Any floating ones. NaN equals NaN, inf equals inf of the same sign.

    Transforms:
      None: it reads values.

    Example:
      >>> x = jnp.float32(1.001)
      >>> mpjax.testing.assert_within_rounding(x.astype(jnp.bfloat16), x, "bfloat16")
    """
    chex.assert_trees_all_equal_structs(actual, expected)
    rounded = _dtype(dtype, "assert_within_rounding(dtype)")
    info = jnp.finfo(rounded)
    half, least = float(info.eps) / 2, float(info.smallest_subnormal) / 2
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    wrong: list[str] = []
    for path, (a, b) in zip(leaf_paths(actual), pairs, strict=True):
        chex.assert_equal_shape([jnp.asarray(a), jnp.asarray(b)])
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            unit = np.maximum(np.maximum(abs(a), abs(b)) * half, least)
            apart = np.where(same, 0.0, abs(a - b) / unit)
        worst = float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0))
        if worst > roundings:
            at = np.unravel_index(int(np.argmax(np.nan_to_num(apart, nan=np.inf))), a.shape)
            values = f"{a[at]:.6g} and {b[at]:.6g}"
            where = f" at {tuple(map(int, at))}" if at else ""
            wrong.append(f"{path!r}{where}: {values}, {worst:.3g} roundings apart")
    name = short_name(rounded)
    _fail_if(wrong, f"assert_within_rounding: more than {roundings:g} roundings to {name}")


def _dtype(spec: Any, where: str) -> Any:
    """Returns the dtype of a name, of policies or of JAX."""
    if isinstance(spec, str) and is_dtype_name(spec):
        return canonical_dtype(spec, where)
    try:
        return jnp.dtype(spec)
    except TypeError as error:
        fix = "Type, for example, 'bf16', 'float16' or jnp.float8_e4m3fn."
        raise ValueError(message(where, f"no dtype is called {spec!r}.", fix)) from error


def assert_no_promotions(fun: Callable[..., Any], *args: Any) -> None:
    """Fails where `fun` widens a 16-bit value by promotion; see `numerics.find_promotions`.

    Args:
      fun: any function of arrays.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s; nothing is computed.

    Raises:
      AssertionError: the table of promotions.

    Dtypes:
      float16 and bfloat16.

    Transforms:
      Those of JAX inside `fun`.

    Example:
      >>> mpjax.testing.assert_no_promotions(lambda x: x * 2.0, jnp.ones(3, jnp.bfloat16))
    """
    promotions = find_promotions(fun)(*args)
    if promotions:
        raise AssertionError(f"assert_no_promotions: {promotions}")


def assert_products(fun: Callable[..., Any], *args: Any, dtype: Any, least: int = 1) -> None:
    """Fails unless all matrix products and convolutions of `fun` read operands of a dtype.

    Args:
      fun: any function of arrays; a gradient too, or one under `mpjax.autocast`.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s; nothing is computed.
      dtype: of both operands, as 'bfloat16'.
      least: how many products there must be, so that a function without any does not pass.

    Raises:
      AssertionError: the products that read something else, or that there are too few.
      ValueError: `dtype` names none.

    Dtypes:
      Products of integers are left out.

    Transforms:
      Those of JAX inside `fun`.

    Example:
      >>> fast = mpjax.autocast(lambda w, x: x @ w, "bf16-mixed")
      >>> mpjax.testing.assert_products(fast, jnp.ones((4, 4)), jnp.ones((2, 4)), dtype="bfloat16")
    """
    wanted, count, wrong = _dtype(dtype, "assert_products(dtype)"), 0, list[str]()
    for eqn in compat.equations(jax.make_jaxpr(fun)(*args)):
        read = _product_dtypes(eqn)
        if read is None:
            continue
        count += 1
        if any(d != wanted for d in read):
            wrong.append(f"{eqn.primitive.name} reads {' and '.join(map(short_name, read))}")
    name = short_name(wanted)
    _fail_if(wrong, f"assert_products: {len(wrong)} of {count} products are not in {name}")
    if count < least:
        got = f"assert_products: {count} products, and at least {least} were expected."
        raise AssertionError(got)


def _product_dtypes(eqn: Eqn) -> list[Any] | None:
    """Returns the dtypes of a product's operands; None if it is no product of floats."""
    if eqn.primitive.name not in (*PRODUCTS, "low_product"):
        return None
    read = [v.aval.dtype for v in eqn.invars[:2]]
    return read if all(jnp.issubdtype(d, jnp.floating) for d in read) else None


@contextlib.contextmanager
def assert_one_compilation(
    fun: Callable[..., Any], **options: Any
) -> Generator[Callable[..., Any]]:
    """Yields a jitted `fun`, and fails at the end of the block if it was traced more than once.

    Args:
      fun: the function to jit; state and batch of every call must have the same types.
      **options: of `jax.jit`, as `donate_argnums=0`.

    Raises:
      AssertionError: it was traced more than once, or never.

    Dtypes:
      Any: a leaf whose dtype changes between calls is the common cause of a second trace.

    Transforms:
      None around it.

    Example:
      >>> with mpjax.testing.assert_one_compilation(lambda x: x + 1) as step:
      ...     x = step(step(jnp.zeros(2)))
    """
    traces: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(", ".join(map(describe, jax.tree.leaves((args, kwargs)))))
        return fun(*args, **kwargs)

    yield jax.jit(counted, **options)
    if len(traces) != 1:
        lines = "".join(f"\n  {text[:200]}" for text in traces)
        raise AssertionError(f"assert_one_compilation: traced {len(traces)} times{lines}")


def _fail_if(wrong: list[str], title: str) -> None:
    if wrong:
        rest = f"\n  … and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise AssertionError(title + "".join(f"\n  {text}" for text in wrong[:5]) + rest)
