"""The matrix products of a program by the module that runs them, with their operands' dtype."""

import jax
import jax.numpy as jnp

from mpjax._autocast.known import scopes
from mpjax._base import compat
from mpjax._policies import spelling


def products(jaxpr, around=()):
    """Yields the scopes and the operands' dtype of each product of a program."""
    for eqn in jaxpr.eqns:
        names = (*around, *(n for n in scopes.of(eqn) if n != scopes.AS_WRITTEN))
        if eqn.primitive.name == "dot_general":
            yield names, eqn.invars[0].aval.dtype
        for inner in compat.programs(eqn):
            yield from products(inner, names)


def in_float32(fun, *args):
    """Returns the modules whose products all read float32; none has products of both kinds."""
    found = [
        (spelling.of_operation(names)[-1], dtype)
        for names, dtype in products(jax.make_jaxpr(fun)(*args).jaxpr)
    ]
    full = {module for module, dtype in found if dtype == jnp.float32}
    assert full.isdisjoint(module for module, dtype in found if dtype != jnp.float32)
    return full
