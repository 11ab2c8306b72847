"""What hints do to derivatives: as exact in every order, nothing more is kept, what is held."""

import functools
import re

import _evaluate
import jax
import jax.numpy as jnp
import numpy as np
from _hinted import hints

from benchmarks.measure.elsewhere import lowered_for
from mpjax import autocast


def directions(fun, *args):
    """Returns the value of a function of three arrays, and its derivatives."""
    along = tuple(jnp.cos(a) for a in args)

    def scalar(*args):
        return jnp.sum(fun(*args) ** 2)

    grad = jax.grad(scalar, (0, 1, 2))
    return {
        "value": fun(*args),
        "gradient": grad(*args),
        "tangent": jax.jvp(fun, args, along)[1],
        "forward over reverse": jax.jvp(grad, args, along)[1],
        "reverse over forward": jax.grad(lambda *a: jax.jvp(scalar, a, along)[1], (0, 1, 2))(*args),
        "of examples": jax.vmap(grad)(*(jnp.stack([a, 2 * a]) for a in args)),
        "along other axes": jax.vmap(grad, (None, 1, None), out_axes=1)(
            args[0], jnp.stack([args[1], 2 * args[1]], 1), args[2]
        ),
        "rematerialised": jax.grad(jax.checkpoint(scalar), (0, 1, 2))(*args),
    }


def errors(fun, args, platform, exact):
    """Returns how far off each of them is in bfloat16, as a platform computes it."""
    jax.clear_caches()
    low = functools.partial(directions, autocast(fun, "bf16-mixed"))
    if platform == "cpu":
        got = jax.jit(low)(*args)
    else:
        got = jax.jit(lowered_for(platform, lambda args: low(*args), args))(args)
    pairs = zip(jax.tree.leaves(got), exact, strict=True)
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


def check_as_exact_without(hint, fun, args, platform):
    """Raises AssertionError where a hint makes a derivative less exact."""
    program = jax.make_jaxpr(functools.partial(directions, fun))(*args)
    exact = _evaluate.evaluate(program, args)  # by NumPy: nothing is compiled
    found = errors(fun, args, platform, exact)
    with hints.without(hint):
        plain = errors(fun, args, platform, exact)
    assert (plain > 2**-12).all()  # there is something to compare
    assert (plain < 1).all()
    # XLA:CPU leaves out other roundings where a GPU's barriers stand: those of few of many values.
    np.testing.assert_array_less(found, 1.25 * plain)


# -- programs that need not run here ---------------------------------------------------------------


def barriers(fun, platform, specs):
    """Returns the types of what barriers hold in the program of three gradients."""
    jax.clear_caches()
    grads = jax.grad(lambda *args: jnp.sum(autocast(fun, "bf16-mixed")(*args)), (0, 1, 2))
    text = jax.jit(grads).trace(*specs).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"stablehlo.optimization_barrier %\S+ : tensor<(\w+)>", text)


def kept(fun, specs):
    """Returns the dtypes and shapes that the backward pass keeps."""
    jax.clear_caches()
    low = autocast(fun, "bf16-mixed")
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(low, *args)[1], *specs))
    return sorted((x.dtype.name, x.shape) for x in leaves)
