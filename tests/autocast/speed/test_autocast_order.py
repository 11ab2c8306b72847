"""Which gradient of a product a GPU makes first: a weight's, so that its operands are freed."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

from mpjax import autocast

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def right(w, x):
    return jnp.tanh(x @ w)


def twice(w, x):
    return right(w, right(w, x))


def left_of_each_example(w, x):
    return jnp.tanh(jax.vmap(lambda row: w @ row)(x))


def written_first(w, x):
    return jnp.tanh(jnp.einsum("df,bd->bf", w, x))


def in_a_loop(w, x):
    return lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=3)[0]


def convolved(w, x):
    kernel = jnp.tile(w[None], (3, 1, 1))
    return jnp.tanh(lax.conv_general_dilated(x[None], kernel, (1,), "SAME", None, None, SPEC))


def convolved_pointwise(w, x):
    return jnp.tanh(lax.conv_general_dilated(x[None], w[None], (1,), "SAME", None, None, SPEC))


SPEC = ("NWC", "WIO", "NWC")


def loss(model, w, x):
    return model(w, x).sum()


def gradients(model, policy="bf16-mixed"):
    return jax.grad(autocast(functools.partial(loss, model), policy), (0, 1))


def barriers(fun, *args, platform="cuda"):
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"optimization_barrier %\S+, %\S+ : (.*)", text)


MODELS = [right, left_of_each_example, written_first, in_a_loop, convolved, convolved_pointwise]


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_makes_a_weights_gradient_before_that_of_the_input(model, policy):
    (types,) = barriers(gradients(model, policy), W, X)
    assert "f16>" in types.split(", ")[0]
    shapes = [sorted(re.findall(r"\d+(?=x)", each.replace("1x", ""))) for each in types.split(", ")]
    assert shapes[0] == shapes[1]


def test_a_cotangent_that_is_larger_than_the_input_is_read_with_what_comes_next():
    wide = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert barriers(gradients(right), wide, X) == []
    narrow = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert len(barriers(gradients(right), narrow, X)) == 1


def test_gradients_of_equal_size_have_no_order():
    assert barriers(gradients(right), W, W) == []


def test_keys_that_several_queries_share_are_no_weight():
    def scores(keys, queries):
        return jnp.tanh(jnp.einsum("bqd,bkd->bqk", queries, keys))

    queries, keys = (jax.ShapeDtypeStruct((4, n, 8), jnp.float32) for n in (16, 4))
    assert barriers(gradients(scores), keys, queries) == []


def test_weights_of_an_ensemble_are_weights():
    each = jax.ShapeDtypeStruct((2, *W.shape), jnp.float32)
    assert len(barriers(jax.vmap(gradients(right), (0, None)), each, X)) == 1


def test_tangents_have_no_order():
    def forward(w, x):
        return jax.jvp(autocast(right, "bf16-mixed"), (w, x), (w, x))[1]

    assert barriers(forward, W, X) == []


def test_what_a_branch_made_of_a_cotangent_is_not_waited_for_outside():
    """Nothing outside may read a value of a branch: the lowered program would be refused."""

    def model(w, x, fixed):
        chosen = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
        return jnp.tanh(chosen + x @ fixed).sum()

    fun = jax.grad(autocast(model, "bf16-mixed"), (0, 1))
    assert len(barriers(fun, W, X, W)) == 1  # the branch's own


def test_a_program_for_several_platforms_has_each_ones_products():
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in (W, X)]
    made = export.export(jax.jit(gradients(twice)), platforms=("cpu", "cuda", "tpu"))(*specs)
    backward = re.findall(r"contracting_dims = \[1\] x \[1\].* -> (\S*)", made.mlir_module())
    assert len(set(backward)) == 2, backward  # a CPU multiplies to float32
    values = jnp.ones(W.shape), jnp.ones(X.shape)
    expected = jax.jit(gradients(twice))(*values)
    for got, wanted in zip(made.call(*values), expected, strict=True):
        assert jnp.array_equal(got, wanted)


def test_a_batch_of_any_size_is_larger_than_a_weight():
    (batch,) = export.symbolic_shape("batch")
    specs = W, jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    text = export.export(jax.jit(gradients(right)), platforms=("cuda",))(*specs).mlir_module()
    assert len(re.findall(r"optimization_barrier %\S+, %\S+ : (.*)", text)) == 1
