"""Every public layer of Flax NNX under autocast, forward and backward, and the state it keeps."""

import inspect
from typing import Any

import _differential as differential
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import MODES, named
from _nnx_layers import LAYERS, NOT_LAYERS, ROWS, rngs
from flax import nnx

from mpjax import autocast

POLICIES = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}
FORWARD, GRAD = MODES[0], MODES[1]

pytestmark = [
    pytest.mark.standard_promotion("nnx promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("nnx keeps the modules of a trace until they are collected"),
    pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning"),  # RoPE's own
]


def test_every_public_module_has_a_row_or_a_reason() -> None:
    public = {
        name
        for name, value in vars(nnx).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }
    assert public == LAYERS.keys() | NOT_LAYERS.keys()


def _program(name: str) -> differential.Named:
    layer, args = LAYERS[name]()
    graph, state = nnx.split(layer)

    def fun(state: Any, *args: Any) -> Any:
        copy = nnx.merge(graph, state)
        return copy(*args), nnx.state(copy)

    return named(f"nnx.{name}", fun, state, *args)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_right_to_rounding(name: str) -> None:
    cast = lambda f: autocast(f, "bf16-mixed")  # noqa: E731 - one expression
    differential.check_traced(_program(name), GRAD, cast, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_under_autocast_is_itself_to_rounding(name: str, policy: str, mode: Any) -> None:
    cast = lambda f: autocast(f, policy)  # noqa: E731 - one expression
    differential.check(_program(name), mode, cast, POLICIES[policy])


# -- modules given as they are -----------------------------------------------------------------


def _stateful() -> nnx.Module:
    return nnx.Sequential(
        nnx.Linear(6, 4, rngs=rngs()),
        nnx.BatchNorm(4, rngs=rngs()),
        nnx.Dropout(0.5, rngs=rngs()),
    )


def _leaves(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.state(module)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def test_a_stateful_module_given_directly_keeps_its_updates_as_under_nnx_jit() -> None:
    plain, fast = _stateful(), _stateful()
    expected = nnx.jit(lambda module, x: module(x))(plain, ROWS)
    got = autocast(lambda module, x: module(x), "bf16-mixed")(fast, ROWS)
    assert got.dtype == expected.dtype
    before = _leaves(_stateful())
    after, wanted = _leaves(fast), _leaves(plain)
    assert after.keys() == wanted.keys()
    changed = {name for name in wanted if not np.array_equal(wanted[name], before[name])}
    assert any("mean" in name for name in changed)
    assert any("count" in name for name in changed)
    for name in wanted:
        assert after[name].dtype == wanted[name].dtype
        if after[name].dtype.kind == "f":  # the inputs of the statistics were products
            np.testing.assert_allclose(after[name], wanted[name], rtol=2**-6, atol=2**-8)
        else:
            np.testing.assert_array_equal(after[name], wanted[name])


def test_a_module_is_updated_inside_nnx_jit_and_nnx_grad() -> None:
    fast = _stateful()
    before = _leaves(fast)

    @nnx.jit
    def step(module: nnx.Module, x: jax.Array) -> Any:
        return nnx.grad(autocast(lambda m, x: jnp.mean(m(x) ** 2), "bf16-mixed"))(module, x)

    grads = step(fast, ROWS)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    after = _leaves(fast)
    assert any(not np.array_equal(after[name], before[name]) for name in before if "mean" in name)
    assert any(not np.array_equal(after[name], before[name]) for name in before if "count" in name)


def _step(module: Any, optimizer: Any, metric: Any, streams: Any, total: Any, x: Any) -> jax.Array:
    noise = jax.random.normal(streams.noise(), x.shape)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x + noise)) ** 2))(module)
    optimizer.update(module, grads)
    metric.update(values=loss)
    total[...] = total[...] + loss
    return loss


def test_optimizers_metrics_streams_and_variables_keep_their_updates() -> None:
    def objects() -> tuple[Any, ...]:
        module = nnx.Linear(6, 4, rngs=rngs())
        optimizer = nnx.Optimizer(module, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        metric = nnx.metrics.Average()
        return module, optimizer, metric, nnx.Rngs(noise=1), nnx.Variable(jnp.zeros(()))

    plain, fast, before = objects(), objects(), objects()
    want = nnx.jit(_step)(*plain, ROWS)
    assert jnp.allclose(autocast(_step, "bf16-mixed")(*fast, ROWS), want, rtol=2**-6)
    for ours, theirs, old in zip(fast, plain, before, strict=True):
        found, expected, start = (
            [x for x in jax.tree.leaves(y) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
            for y in (ours, theirs, old)
        )
        assert not all(map(np.array_equal, expected, start))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=2**-5, atol=2**-7)


def test_a_variable_that_two_arguments_share_is_changed_by_none() -> None:
    module = _stateful()
    twice = autocast(lambda a, b, x: a(x) + b(x), "bf16-mixed")
    with pytest.raises(ValueError, match=r"changes a BatchStat that its arguments hold twice"):
        twice(module, module, ROWS)
    module.eval()
    assert twice(module, module, ROWS).shape == (len(ROWS), 4)
