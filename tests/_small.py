"""Small operands for tests of autocast, and what is asked about functions of them."""

import jax
import jax.numpy as jnp
import numpy as np
from _differential import equations
from _samples import normal
from jax.sharding import AxisType

import mpjax

KEY = jax.random.key(0)
X = normal(0, 8, 16)
W = normal(1, 16, 16, scale=0.3)
BF16 = 2.0**-8


def distance(got, want):
    got, want = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30))


def mesh_of_four():
    devices = jax.devices()[:4]
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=devices)


def loss(fun):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))


def products(fun, *args):
    """The dtypes that the products of a function read, in program order."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return [e.invars[0].aval.dtype.name for e in eqns if e.primitive.name in names]


def together(programs, *args):
    """Runs functions of the same arrays, by name, as one compiled program: a sixth of the time."""
    return jax.jit(lambda *xs: {name: fun(*xs) for name, fun in programs.items()})(*args)


def check_all(funs, policy, *args, **tolerance):
    """Asserts that functions of one value, by name, such as cuts, give the first's in float32."""
    right = np.asarray(next(iter(funs.values()))(*args))
    programs = {name: mpjax.autocast(fun, policy) for name, fun in funs.items()}
    for name, got in together(programs, *args).items():
        np.testing.assert_allclose(got, right, err_msg=name, **tolerance)


def each_inside_and_outside(taken, funs, policy, *args):
    """Gives results of `taken`, such as `jax.grad`, with autocast around it, and inside of it.

    Of several functions by name, such as one cut in several ways, compiled as one program: pairs of
    `(name, place)` and a result.
    """
    programs = {}
    for name, fun in funs.items():
        programs[name, "inside"] = mpjax.autocast(taken(fun), policy)
        programs[name, "outside"] = taken(mpjax.autocast(fun, policy))
    return together(programs, *args).items()


def total(fun):
    """A function that is not linear in what was picked, and does not know one element by heart."""

    def summed(x):
        picked = fun(x)
        weights = jnp.linspace(1.0, 2.0, picked.size, dtype=jnp.float32)
        return jnp.sum(jnp.exp(picked) * weights.reshape(picked.shape))

    return summed
