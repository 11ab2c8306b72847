"""Programs in one form: what JAX writes in two ways is written in one, and decided about alike.

`x @ w` of float32 inputs and bfloat16 weights is one `dot_general` of both dtypes, where
`x @ w.astype(jnp.float32)` is a cast and a product. Here the first becomes the second. And where a
program takes a gradient of a checkpoint itself, JAX writes each value that is saved as rounded to
all the bits it has: here it is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var
from jax.extend.core.primitives import copy_p

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import structure
from mpjax._jaxpr.equation import Eqn, Jaxpr
from mpjax._jaxpr.op_rules import PRODUCTS
from mpjax._jaxpr.rewriting import with_more_equations, with_programs
from mpjax._jaxpr.sizes import is_float32


def in_one_form(program: Any) -> Any:
    """Returns a closed jaxpr: no product has one float32 operand alone, each rounding rounds."""
    known: dict[int, Jaxpr] = {}

    def changed(jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in known:
            known[id(jaxpr)] = with_more_equations(jaxpr, one)
        return known[id(jaxpr)]

    def one(eqn: Eqn) -> Sequence[Eqn]:
        if structure.is_call(eqn):
            return (with_programs(eqn, changed),)
        if _rounds_nothing(eqn):
            return (eqn.replace(primitive=copy_p, params={}),)
        return _written(eqn) if _is_mixed(eqn) else (eqn,)

    new = changed(program.jaxpr)
    return program if new is program.jaxpr else program.replace(jaxpr=new)


def _rounds_nothing(eqn: Eqn) -> bool:
    """Whether an equation rounds to as many bits as its operand has, or to more."""
    if eqn.primitive.name != "reduce_precision":
        return False
    has, kept = jnp.finfo(eqn.invars[0].aval.dtype), eqn.params
    return kept["exponent_bits"] >= has.nexp and kept["mantissa_bits"] >= has.nmant


def _is_mixed(eqn: Eqn) -> bool:
    """Whether a product has a float32 result, and one of its operands is in another dtype."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    return is_float32(eqn.outvars[0]) and sum(map(is_float32, eqn.invars[:2])) == 1


def _written(eqn: Eqn) -> Sequence[Eqn]:
    operands = list(eqn.invars)
    place = next(i for i in range(2) if not is_float32(operands[i]))
    given = operands[place]
    operands[place] = Var(given.aval.update(dtype=FLOAT32, weak_type=False))
    cast = _cast().replace(invars=[given], outvars=[operands[place]], source_info=eqn.source_info)
    return cast, eqn.replace(invars=operands)


@functools.cache
def _cast() -> Eqn:
    """Returns a cast to float32, of which the place, the operand and the result are changed."""
    to_float32 = functools.partial(lax.convert_element_type, new_dtype=jnp.float32)
    (eqn,) = compat.closed(jax.make_jaxpr(to_float32)(jnp.bool_(0))).jaxpr.eqns
    return eqn
