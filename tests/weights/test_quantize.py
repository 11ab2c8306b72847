"""Weights in 8 bits for inference: `quantize`, what reads them, and what they are off."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _optimizers import CHECKPOINTS, through_orbax
from _samples import normal
from _small import distance as error

import mpjax
from mpjax import QuantizedArray
from mpjax.testing import assert_bitwise_equal

INT8, FLOAT8 = "int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16"


PARAMS = {
    "embed": normal(9, 96, 64),
    "layers": [{"kernel": normal(i, 64, 64) / 8, "bias": normal(i, 64)} for i in range(3)],
}
X = normal(8, 16, 64)


def model(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def arrays(tree):
    """Returns the arrays in 8 bits of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QuantizedArray))
    return [x for x in leaves if isinstance(x, QuantizedArray)]


@pytest.mark.parametrize(
    ("policy", "dtype", "scales", "bound"),
    [(INT8, "int8", (1, 64), 0.009), (FLOAT8, "float8_e4m3fn", (1, 64), 0.028)],
)
def test_weights_are_8_bit_with_scales_and_a_quarter_as_large(policy, dtype, scales, bound):
    small = mpjax.quantize(PARAMS, policy)
    assert len(arrays(small)) == 4
    for array in arrays(small):
        assert (array.values.dtype.name, array.scale.shape) == (dtype, scales)
        assert array.size == array.values.size
        assert array.nbytes == array.size + array.scale.nbytes
    before, after = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (PARAMS, small))
    assert before / after > 3.5  # biases stay
    assert_bitwise_equal(small["layers"][0]["bias"], PARAMS["layers"][0]["bias"])
    plain = mpjax.dequantize(small)
    assert jax.tree.structure(plain) == jax.tree.structure(PARAMS)
    for a, b in zip(*map(jax.tree.leaves, (plain, PARAMS)), strict=True):
        assert error(a, b) < bound
    assert_bitwise_equal(mpjax.quantize(small, policy), small)


@pytest.mark.parametrize("policy", [INT8, FLOAT8])
def test_autocast_reads_them_under_any_policy_and_multiplies_them_as_they_are(policy):
    small = mpjax.quantize(PARAMS, policy)
    exact = model(mpjax.dequantize(small), X)
    for under in (policy, "bf16-mixed", "float32"):
        fast = jax.jit(mpjax.autocast(model, under))
        assert error(fast(small, X), exact) < 0.02
    rows = mpjax.explain(model, policy)(small, X).rows
    assert any("layers/*/kernel" in row.reason for row in rows)
    for params, count in ((PARAMS, 2), (small, 1)):  # the weight's largest is not looked for again
        text = str(jax.make_jaxpr(mpjax.autocast(model, policy))(params, X))
        assert text.count("reduce_max") == count


E5M2 = mpjax.Float8CurrentScaling(fprop=("e4m3", "e5m2"))


@pytest.mark.parametrize("recipe", ["int8", "float8", E5M2])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_channel_that_is_a_million_times_smaller_is_no_zero(recipe, axis):
    kernel = jnp.moveaxis(PARAMS["layers"][0]["kernel"] * jnp.logspace(-6, 0, 64), -1, axis)
    small = mpjax.quantize(
        {"w": kernel}, mpjax.QuantizedPolicy("bf16-mixed", recipe), channel_axis=axis
    )
    back = small["w"].dequantize()
    for channel in range(64):
        got, want = (jnp.take(x, channel, axis) for x in (back, kernel))
        assert error(got, want) < 0.08  # e5m2 has two bits: an eighth at most


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "scan of checkpoint"])
def test_no_weight_of_a_loop_is_widened_before_the_loop_reads_it(wrap):
    stack = {"w": jnp.stack([layer["kernel"] for layer in PARAMS["layers"]])}
    shift = normal(5, 64, 64) / 8  # the same in each iteration

    def scanned(params, x):
        layer = wrap(lambda x, w: (jnp.tanh(x @ w @ params["shift"]), None))
        return jax.lax.scan(layer, x, params["w"], reverse=True)[0]

    small = mpjax.quantize({**stack, "shift": shift}, INT8)
    assert small["w"].scale.shape == (3, 1, 64)
    everywhere = mpjax.PolicyMap("bf16-mixed", {"re:.*": INT8})
    fast = mpjax.autocast(scanned, everywhere)
    text = str(jax.make_jaxpr(fast)(small, X))
    assert "f32[3,64,64]" not in text
    assert text.count("reduce_max") == 2  # of what each weight is multiplied with
    assert error(jax.jit(fast)(small, X), scanned(mpjax.dequantize(small), X)) < 0.05
    named = mpjax.PolicyMap("bf16-mixed", {"inner": INT8})

    def scoped(params, x):
        with jax.named_scope("inner"):
            return scanned(params, x)

    rows = mpjax.explain(scoped, named)(small, X).rows
    assert [r.dtype for r in rows if r.operation == "dot_general"] == ["i8", "i8"]


@functools.cache
def attention():
    """Returns attention of 4 heads of 16, its parameters and what it gives in float32."""
    layer = nn.MultiHeadDotProductAttention(4)
    params = jax.jit(layer.init)(jax.random.key(0), X[None])
    return layer.apply, params, jax.jit(layer.apply)(params, X[None])


OF_HEADS = {"query": (1, 4, 16), "key": (1, 4, 16), "value": (1, 4, 16), "out": (1, 1, 64)}


@pytest.mark.parametrize(
    ("policy", "scales", "bound"),
    [(INT8, OF_HEADS, 1), (FLOAT8, OF_HEADS, 4)],
)
def test_attention_kernels_have_scales_along_nothing_that_is_added_up(policy, scales, bound):
    apply, params, exact = attention()
    small = mpjax.quantize(params, policy)
    found = {name: module["kernel"] for name, module in small["params"].items()}
    assert {name: kernel.scale.shape for name, kernel in found.items()} == scales
    for name, kernel in found.items():
        assert error(kernel.dequantize(), params["params"][name]["kernel"]) < bound / 100
    everywhere = mpjax.PolicyMap("bf16-mixed", {"re:.*": policy})
    fast = mpjax.autocast(apply, everywhere)
    assert error(jax.jit(fast)(small, X[None]), exact) < 0.015 * (1 + bound)
    counts = [str(jax.make_jaxpr(fast)(p, X[None])).count("reduce_max") for p in (params, small)]
    assert counts[0] - counts[1] == 4  # each weight is multiplied as it is stored


def test_attention_is_told_from_stacks_of_matrices_by_the_shapes_of_all_four_kernels():
    def scales(query, out, **others):
        shapes = {"query": query, "key": query, "value": query, "out": out, **others}
        params = {name: {"kernel": jnp.zeros(s)} for name, s in shapes.items()}
        tree = {"layer": params, "rest": jnp.zeros((64, 64))}
        small = jax.eval_shape(lambda: mpjax.quantize(tree, INT8))["layer"]
        kernels = (small[name]["kernel"] for name in ("query", "out"))
        return [x.scale.shape if isinstance(x, QuantizedArray) else None for x in kernels]

    # The kernels of wide heads look like stacks, those of narrow ones like nothing.
    assert scales((64, 32, 128), (32, 128, 64)) == [(1, 32, 128), (1, 1, 64)]
    assert scales((2, 96, 4, 24), (2, 4, 24, 96)) == [(2, 1, 4, 24), (2, 1, 1, 96)]
    few = {"key": (64, 2, 16), "value": (64, 2, 16)}
    assert scales((64, 8, 16), (8, 16, 64), **few) == [(1, 8, 16), (1, 1, 64)]
    assert scales((6, 64, 64), (6, 64, 64)) == [(6, 1, 64), (6, 1, 64)]
    assert scales((64, 64, 64), (64, 64, 64)) == [(64, 1, 64), (64, 1, 64)]
    assert scales((64, 64, 128), (64, 128, 64)) == [(64, 1, 128), (64, 1, 64)]
    assert scales((64, 4, 16), (4, 16, 64), value=(64, 4, 32)) == [None, None]


def test_policy_map_chooses_by_path_and_takes_small_ones_in():
    policies = mpjax.PolicyMap("bf16-mixed", {"layers/1/*": INT8})
    small = mpjax.quantize(PARAMS, policies)
    assert [isinstance(layer["kernel"], QuantizedArray) for layer in small["layers"]] == [
        *(False, True, False)
    ]
    tiny = {"head": jnp.ones((3, 5)), "rest": jnp.ones((64, 64))}
    found = mpjax.quantize(tiny, mpjax.PolicyMap("bf16-mixed", {"head": INT8}))
    assert repr(found["head"]) == "QuantizedArray(int8[3,5], scale f32[1,5])"
    assert policies.cast_to_compute(small)["layers"][1]["kernel"].dtype == jnp.bfloat16


def test_cast_to_compute_gives_plain_arrays_and_other_casts_leave_them():
    small = mpjax.quantize(PARAMS, INT8)
    policy = mpjax.get_policy("bf16-mixed")
    cast = policy.cast_to_compute(small)
    assert {x.dtype.name for x in jax.tree.leaves(cast)} == {"bfloat16"}
    assert not arrays(cast)
    for other in (policy.cast_to_param(small), policy.cast_to_output(small)):
        assert_bitwise_equal(other, small)


def test_gradient_of_what_is_not_quantised_passes_through():
    small = mpjax.quantize(PARAMS, FLOAT8)
    fast = mpjax.autocast(lambda p, x: jnp.sum(model(p, x) ** 2), FLOAT8)
    found = jax.jit(jax.grad(fast, argnums=1))(small, X)
    wanted = jax.grad(lambda x: jnp.sum(model(mpjax.dequantize(small), x) ** 2))(X)
    assert error(found, wanted) < 0.12
    with pytest.raises(TypeError, match=r"or train mpjax.dequantize\(params\)"):
        jax.grad(fast, allow_int=True)(small, X)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_law_weight_that_is_not_finite_stays_so(bad):
    layers = [dict(layer) for layer in PARAMS["layers"]]
    layers[1]["kernel"] = layers[1]["kernel"].at[1, 2].set(bad)

    def middle(params, x):
        x, kernels = jnp.tanh(x), [layer["kernel"] for layer in params["layers"]]
        return (x @ kernels[0] @ kernels[1])[:, :4] @ kernels[2][:4]

    for policy in (INT8, FLOAT8):
        small = mpjax.quantize({"layers": layers}, policy)
        assert not jnp.isfinite(small["layers"][1]["kernel"].dequantize()[1, 2])
        assert not jnp.isfinite(mpjax.autocast(middle, policy)(small, X)).any()


@pytest.mark.standard_promotion("orbax mixes dtypes")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("policy", [INT8, FLOAT8])
def test_checkpoints_give_back_what_they_were_given(policy, tmp_path):
    small = mpjax.quantize(PARAMS, policy)
    template = jax.tree.map(jnp.zeros_like, small)
    for through in CHECKPOINTS:
        back = through(small, template, tmp_path)
        assert_bitwise_equal(back, small)
        assert [type(a) for a in arrays(back)] == [QuantizedArray] * 4
    shapes = jax.eval_shape(lambda: mpjax.quantize(PARAMS, policy))
    assert_bitwise_equal(through_orbax(small, shapes, tmp_path / "shapes"), small)
