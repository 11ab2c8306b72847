"""Every public layer of Flax linen under autocast, forward and backward, against itself."""

import inspect
from typing import Any

import _differential as differential
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import MODES, named
from _linen_layers import LAYERS, NOT_LAYERS, ROWS, applied

from mpjax import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
FORWARD, GRAD = MODES[0], MODES[1]

pytestmark = [
    pytest.mark.standard_promotion("linen promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("linen keeps tracers on its scopes until they are collected"),
]


def test_every_public_module_has_a_row_or_a_reason() -> None:
    public = {
        name
        for name, value in vars(nn).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    assert public == LAYERS.keys() | NOT_LAYERS.keys()


def _drawn(path: Any, leaf: Any) -> Any:
    """A value for a variable of which only the shape is known: nothing is compiled for it."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    name = jax.tree_util.keystr(path)
    values = 0.5 * np.random.default_rng(len(name)).normal(size=leaf.shape)
    positive = any(word in name for word in ("var", "scale", "sigma"))
    return jnp.asarray(np.abs(values) + 0.5 if positive else values, leaf.dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_right_to_rounding(name: str) -> None:
    layer, args = LAYERS[name]
    made: list[Any] = []  # the function; the variables are traced

    def initial() -> Any:
        fun, variables = applied(layer, args)
        made.append(fun)
        return variables

    variables = jax.tree_util.tree_map_with_path(_drawn, jax.eval_shape(initial))
    program = named(f"nn.{name}", made[0], variables, *args)
    differential.check_traced(program, GRAD, lambda f: autocast(f, "bf16-mixed"), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_under_autocast_is_itself_to_rounding(name: str, policy: str, mode: Any) -> None:
    layer, args = LAYERS[name]
    fun, variables = applied(layer, args)
    program = named(f"nn.{name}", fun, variables, *args)
    differential.check(program, mode, lambda f: autocast(f, policy), POLICIES[policy])


@pytest.mark.parametrize("name", ["BatchNorm", "Dense", "RNN"])
def test_gradients_keep_their_tree_and_dtype(name: str) -> None:
    layer, args = LAYERS[name]
    fun, variables = applied(layer, args)
    loss = autocast(
        lambda params, rest: fun({**rest, "params": params}, *args)[0].sum(), "16-mixed"
    )
    rest = {k: v for k, v in variables.items() if k != "params"}
    grads = jax.jit(jax.grad(loss))(variables["params"], rest)
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


def test_batch_statistics_are_those_of_float32_where_no_product_comes_before() -> None:
    fun, variables = applied(*LAYERS["BatchNorm"])
    expected = jax.jit(fun)(variables, ROWS)[1]["batch_stats"]
    got = jax.jit(autocast(fun, "bf16-mixed"))(variables, ROWS)[1]["batch_stats"]
    jax.tree.map(np.testing.assert_array_equal, got, expected)
