"""Attention by name: JAX's numbers, in one operation, whose derivative keeps no pairs of tokens."""

import functools
import re
import subprocess
import sys
import types

import _attention_kernel as formulas
import jax
import jax.numpy as jnp
import pytest
from _differential import equations
from _places import ROOT
from _samples import chosen, normal
from _small import distance as error

import mpjax
from mpjax import dot_product_attention as attend

BATCH, QUERIES, KEYS, HEADS, SHARED, SIZE = 2, 24, 32, 4, 2, 16
LENGTHS = jnp.array([5, 32], jnp.int32)
RESIDUALS = 2  # of operands: the result, and the sums of its rows


def operands(dtype=jnp.float32, shared=SHARED, keys=KEYS):
    return (
        normal(0, BATCH, QUERIES, HEADS, SIZE, dtype=dtype),
        normal(1, BATCH, keys, shared, SIZE, dtype=dtype),
        normal(2, BATCH, keys, shared, SIZE, dtype=dtype),
    )


BIAS = normal(3, 1, HEADS, QUERIES, KEYS)
MASK = chosen(4, 0.7, BATCH, 1, QUERIES, KEYS)
EMPTY = MASK.at[0, :, 3].set(False)  # a row without keys
KEY_MASK = (jnp.arange(KEYS) < LENGTHS[:, None])[:, None, None]
CASES = {
    "all": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": BIAS},
    "huge bias": {"bias": BIAS + jnp.where(EMPTY, 0.0, -1e9)},
    "mask": {"mask": MASK},
    "mask of keys": {"mask": KEY_MASK},
    "a row without keys": {"mask": EMPTY, "is_causal": True},
    "bias and mask": {"bias": BIAS, "mask": EMPTY},
    "rows without logits": {"bias": BIAS.at[:, :, 3].set(-1e9).at[:, :, 5].set(-3e38)},
    "window": {"local_window_size": (3, 2)},
    "causal window": {"local_window_size": 4, "is_causal": True},
    "lengths": {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": jnp.array([7, 24], "int32")},
    "no keys": {"key_value_seq_lengths": jnp.array([0, 9], jnp.int32)},
}


def value_and_grads(fun, args, *, of_bias=True, **kwargs):
    """Returns a loss and its gradients, of the bias too or not: then a kernel gives the others."""
    bias = kwargs.pop("bias", None)

    def loss(query, key, value, bias):
        out = fun(query, key, value, bias, **kwargs)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    wrt = (0, 1, 2, 3) if of_bias and bias is not None else (0, 1, 2)
    return jax.jit(jax.value_and_grad(loss, argnums=wrt))(*args, bias)


def errors(found, wanted):
    return [error(*both) for both in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]


@pytest.mark.standard_promotion("jax.nn multiplies by a mask of integers")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_jax_gives(name):
    args, kwargs = operands(), CASES[name]
    wanted = value_and_grads(jax.nn.dot_product_attention, args, **kwargs)
    assert max(errors(value_and_grads(attend, args, **kwargs), wanted)) < 1e-5


# A kernel in formulas, and one whose backward pass is that of XLA's form on a TPU.
KERNELS = {
    "in formulas": formulas,
    "its weights from the rows' sums": types.SimpleNamespace(
        NAME=formulas.NAME,
        why_not=formulas.why_not,
        why_not_installed=formulas.why_not,
        forward=formulas.forward,
        backward=formulas.recomputed.backward,
    ),
}


@pytest.mark.standard_promotion("jax.nn multiplies by a mask of integers")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", [*CASES, "bias with a gradient"])
def test_a_kernel_is_as_exact_as_xla_beside_float32(name, dtype, kernel):
    of_bias = name == "bias with a gradient"
    low, kwargs = operands(dtype), CASES["bias" if of_bias else name]
    wide = [x.astype(jnp.float32) for x in low]
    wanted = value_and_grads(jax.nn.dot_product_attention, wide, of_bias=of_bias, **kwargs)
    with formulas.everywhere(KERNELS[kernel]):
        found = value_and_grads(attend, low, of_bias=of_bias, **kwargs)
    assert max(errors(found, wanted)) < jnp.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["causal", "bias"])
def test_its_backward_pass_keeps_no_pairs(name, dtype):
    kwargs = dict(CASES[name])
    bias = kwargs.pop("bias", None)
    args = operands(dtype)
    fun = functools.partial(attend, bias=bias, **kwargs)
    kept = jax.tree.leaves(jax.eval_shape(lambda *xs: jax.vjp(fun, *xs)[1], *args))
    pairs = [x.shape for x in kept if KEYS in x.shape and QUERIES in x.shape]
    assert pairs == ([] if bias is None else [BIAS.shape])
    assert len(kept) == len(args) + RESIDUALS + (bias is not None)


def test_rows_that_a_bias_leaves_nothing_of_have_xlas_values_and_no_gradients_of_logits():
    """XLA's values no longer depend on these logits, though it goes on to pass them gradients."""
    faint = 3
    bias = BIAS.at[:, :, faint].set(-1e9).at[:, :, faint, :9].set(-2e9)
    low = operands(jnp.bfloat16)
    others = (jnp.arange(QUERIES) != faint).astype(jnp.float32)[:, None, None]

    def of(fun, args, counted):
        def loss(*args):
            out = fun(*args, bias).astype(jnp.float32)
            return jnp.sum(jnp.sin(out) * counted), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
        return out, *grads

    wide = [x.astype(jnp.float32) for x in low]
    right, to_query, to_key, _ = of(jax.nn.dot_product_attention, wide, others)
    _, _, _, to_value = of(jax.nn.dot_product_attention, wide, 1.0)
    with formulas.everywhere(formulas):
        found = of(attend, low, 1.0)
    assert max(errors(found, (right, to_query, to_key, to_value))) < 2**-7
    assert not found[1][:, faint].any()


def test_outer_and_inner_derivatives_are_those_of_jax():
    query, key, value = operands()

    def curve(fun):
        return lambda x: jnp.sum(jnp.sin(fun(x, key, value, is_causal=True)))

    def all_of(fun, query):
        loss, tangent = curve(fun), jnp.ones_like(query)
        forward = jax.jvp(loss, (query,), (tangent,))[1]
        forward_of_reverse = jax.jvp(jax.grad(loss), (query,), (tangent,))[1]
        reverse_of_reverse = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(query)
        forward_of_forward = jax.jvp(
            lambda x: jax.jvp(loss, (x,), (tangent,))[1], (query,), (tangent,)
        )[1]
        return forward, forward_of_reverse, reverse_of_reverse, forward_of_forward

    both = (jax.jit(functools.partial(all_of, f)) for f in (attend, jax.nn.dot_product_attention))
    assert max(errors(*(fun(query) for fun in both))) < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("in_axes", [(0, None, 0), (None, 2, None), (1, 0, None)])
def test_it_maps_over_examples(in_axes, by_kernel):
    def several(x, axis):
        return x if axis is None else jnp.stack([x, x * 2, -x], axis=axis)

    query, key, value = operands()
    args = [several(x, axis) for x, axis in zip((query, key, BIAS), in_axes, strict=True)]

    def mapped(fun):
        def loss(query, key, bias):
            return jnp.sum(jnp.sin(fun(query, key, value, bias)))

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=in_axes))(*args)

    wanted = mapped(jax.nn.dot_product_attention)
    if not by_kernel:
        assert max(errors(mapped(attend), wanted)) < 1e-5
        return
    with formulas.everywhere(formulas):
        assert max(errors(mapped(attend), wanted)) < 1e-5


@pytest.mark.standard_promotion("jax.nn multiplies by a mask of integers")
@pytest.mark.parametrize("name", ["causal", "a row without keys", "bias", "lengths"])
def test_the_sums_of_rows_are_those_of_jax(name):
    args = operands()
    kwargs = {**CASES[name], "return_residual": True}
    funs = (functools.partial(f, **kwargs) for f in (attend, jax.nn.dot_product_attention))
    found, wanted = jax.jit(lambda *xs: [fun(*xs) for fun in funs])(*args)
    assert max(errors(found, wanted)) < 1e-6
    assert found[1].dtype == jnp.float32
    with formulas.everywhere(formulas):
        assert max(errors(jax.jit(lambda *xs: attend(*xs, **kwargs))(*args), wanted)) < 1e-6


def test_without_a_batch_it_is_one_example():
    query, key, value = (x[0] for x in operands())
    assert error(attend(query, key, value), attend(*(x[None] for x in (query, key, value)))[0]) == 0


# -- under autocast --------------------------------------------------------------------------------


def model(weights, x, **kwargs):
    def project(i, heads):
        return (x @ weights[i])[..., : heads * SIZE].reshape(*x.shape[:2], heads, SIZE)

    query, key, value = project(0, HEADS), project(1, SHARED), project(2, SHARED)
    out = attend(query, key, value, is_causal=True, **kwargs)
    return jnp.sum((out.reshape(x.shape) @ weights[3]) ** 2)


WEIGHTS = normal(5, 4, HEADS * SIZE, HEADS * SIZE, scale=0.2)
X = normal(6, BATCH, QUERIES, HEADS * SIZE)
LOW = {
    "bf16-mixed": (jnp.bfloat16, 2**-5),
    "16-mixed": (jnp.float16, 2**-8),
    "float32": (jnp.float32, 1e-6),
    "float8_from_mixed_bfloat16": (jnp.bfloat16, 0.3),
    "int8_from_mixed_bfloat16": (jnp.bfloat16, 0.3),
}


def read_by_attention(fun, *args):
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    found = [eqn for eqn in eqns if eqn.primitive.name.startswith("attention")]
    assert found
    return {v.aval.dtype for eqn in found for v in eqn.invars[:3]}


@pytest.mark.filterwarnings("ignore:autocast:mpjax.PolicyWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("policy", LOW)
def test_a_policy_says_in_which_dtype_it_runs(policy, inside):
    low, bound = LOW[policy]
    if inside:
        fun = mpjax.autocast(jax.grad(model), policy)
    else:
        fun = jax.grad(mpjax.autocast(model, policy))
    assert read_by_attention(fun, WEIGHTS, X) == {jnp.dtype(low)}
    low, wide = jax.jit(lambda *xs: (fun(*xs), jax.grad(model)(*xs)))(WEIGHTS, X)
    assert error(low, wide) < bound


def test_a_policy_map_and_a_region_hold_it_in_float32():
    def scoped(weights, x):
        with jax.named_scope("attention"):
            return model(weights, x)

    def region(weights, x):
        with mpjax.full_precision():
            return model(weights, x)

    mapped = mpjax.PolicyMap("bf16-mixed", {"attention": "float32"})
    assert read_by_attention(mpjax.autocast(scoped, mapped), WEIGHTS, X) == {jnp.dtype("float32")}
    fun = mpjax.autocast(region, "bf16-mixed")
    assert read_by_attention(fun, WEIGHTS, X) == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({}, "attention in one kernel: cuDNN on GPUs; not on TPUs: 24 × 24 are too few"),
        ({"implementation": "xla"}, "attention in XLA's form: implementation= asks for it"),
        ({"local_window_size": 3}, "cuDNN on GPUs; not on TPUs"),
        ({"bias": BIAS[:, :, :, :QUERIES]}, "cuDNN on GPUs; not on TPUs"),
    ],
)
def test_explain_says_which_kernel_where_and_why(kwargs, wanted):
    found = mpjax.explain(functools.partial(model, **kwargs), "bf16-mixed")(WEIGHTS, X)
    (row,) = [row for row in found.rows if row.operation == "attention"]
    assert wanted in row.reason
    assert row.dtype == "bf16"


REFUSED = {
    "float32": ((operands(), {}), ("operands are float32", "operands are float32")),
    "odd length": ((operands(jnp.bfloat16, keys=KEYS - 1), {}), ("odd length", "too few")),
    "odd mask": (
        (operands(jnp.bfloat16, keys=KEYS - 1), {"mask": MASK[..., 1:]}),
        ("odd length", "too few"),
    ),
    "window ahead": (
        (operands(jnp.bfloat16), {"local_window_size": (3, 2)}),
        ("ends after a query's place", "too few"),
    ),
    "rows without keys": (
        (operands(jnp.bfloat16, keys=4), {"local_window_size": (3, 0)}),
        ("rows without keys", "rows without keys"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_lacks_is_named(name):
    (args, kwargs), wanted = REFUSED[name]
    jaxpr = jax.make_jaxpr(functools.partial(attend, **kwargs))(*args)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "attention"]
    avals = [v.aval for v in eqn.invars]
    for kernel, reason in zip(formulas.kernels.KERNELS.values(), wanted, strict=True):
        assert reason in formulas.kernels.why_not(kernel, eqn.params["program"], avals)


# -- bad input -------------------------------------------------------------------------------------

GIVEN = dict(zip(("query", "key", "value"), operands(), strict=True))
Q = GIVEN["query"]


def each(change):
    return {name: change(x) for name, x in GIVEN.items()}


SLIPS = {  # what is given otherwise
    "heads first": (each(lambda x: x.swapaxes(1, 2)), ValueError, "swapaxes"),
    "two axes": ({"query": Q[0, 0]}, ValueError, r"heads, size"),
    "not a multiple": ({"query": Q[:, :, :3]}, ValueError, "or a multiple"),
    "dtypes": ({"query": Q.astype(jnp.bfloat16)}, TypeError, "one dtype for query"),
    "integers": (each(lambda x: x.astype(int)), TypeError, "floating"),
    "mask of floats": ({"mask": BIAS}, TypeError, r"mask\.astype\(bool\)"),
    "mask of keys": ({"mask": KEY_MASK[:, 0, 0]}, ValueError, "None, None, :"),
    "mask of pairs": ({"mask": MASK[:, 0]}, ValueError, r"mask\[:, None\] for"),
    "mask as the fourth": ({"bias": MASK}, TypeError, "Type mask="),
    "bias of integers": ({"bias": jnp.ones((1, KEYS), int)}, TypeError, "floating"),
    "as it was given": ({"query": Q[0]}, ValueError, r"query f32\[24,4,16\]"),
    "no heads": (each(lambda x: x[:, :, :0]), ValueError, "agree"),
    "no key": ({"key": None}, TypeError, r"\(key=\): got None"),
    "causal by a word": ({"is_causal": "no"}, TypeError, "True or False"),
    "residual by a word": ({"return_residual": "no"}, TypeError, "or False"),
    "scale by a word": ({"scale": "0.1"}, TypeError, "one real number"),
    "scale of heads": ({"scale": jnp.ones(4)}, TypeError, r"query \* scale"),
    "bias": ({"bias": BIAS[..., 1:]}, ValueError, "broadcast to"),
    "window": ({"local_window_size": -1}, ValueError, r"\(128, 0\)"),
    "window of three": ({"local_window_size": (1, 2, 3)}, ValueError, "pair"),
    "lengths": ({"key_value_seq_lengths": jnp.ones(3, jnp.int32)}, ValueError, r"i32\[2\]"),
    "implementation": ({"implementation": "cuddn"}, ValueError, 'implementation="cudnn"'),
    "cuDNN on a CPU": ({"implementation": "cudnn"}, NotImplementedError, "lowered for cpu"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_told_what_to_type(name):
    otherwise, kind, text = SLIPS[name]
    with pytest.raises(kind, match=text):
        attend(**(GIVEN | otherwise))


def test_causal_by_an_array_is_told_to_be_a_mask():
    with pytest.raises(TypeError, match="said by mask="):
        jax.jit(lambda x: attend(**GIVEN, is_causal=x))(True)


def test_pallas_is_not_imported_for_who_has_no_tpu():
    code = """
import sys, jax.numpy, mpjax
x = jax.numpy.ones((1, 4, 2, 8))
assert mpjax.dot_product_attention(x, x, x).shape == x.shape
assert "jax.experimental.pallas.ops.tpu.flash_attention" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # others may import it here


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_on_tpus_too_short_for_the_kernel_no_row_is_added_up_again(platform):
    """The forward pass takes the maximum and the sum of each row; the backward pass reads these."""
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)

    def loss(query, key, value):
        return jnp.sum(mpjax.dot_product_attention(query, key, value).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, x, x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    rows = re.findall(
        r"stablehlo.reduce\(.*across dimensions = \[3\] : \(tensor<1x2x256x256xf32>", text
    )
    assert len(rows) == {"cpu": 9, "tpu": 4}[platform]
