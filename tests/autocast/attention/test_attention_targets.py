"""What runs attention for GPUs and TPUs that are not here: their compilers say."""

import functools
import re
from unittest import mock

import _attention_written as written
import jax
import jax.numpy as jnp
import pytest
from _attention_kernel import flash
from _hinted import hints

import mpjax
from benchmarks.measure import targets

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("libraries promote masks and counts implicitly"),
]
GPU = pytest.param("h100", marks=pytest.mark.gpu_compiler)
TPU = pytest.param("v5e", marks=pytest.mark.tpu_compiler)
KERNELS = {"h100": r"__cudnn\$fmha\w+", "v5e": "tpu_custom_call"}
SHAPE = (2, 256, 4, 64)


@pytest.fixture(autouse=True)
def short_attentions_run_in_kernels(monkeypatch):
    """On TPUs too, where they do not pay: what is tested is the kernel, and compiles quickly."""
    monkeypatch.setattr(flash, "_LEAST", 0)


def step(fun):
    """Returns the gradients of a loss."""

    def loss(*args):
        return jnp.sum(jnp.sin(fun(*args).astype(jnp.float32)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def lowered(fun, target, *args):
    return step(fun).trace(*targets.get_target(target).specs(args)).lower()


def kernels_of(text, target):
    return set(re.findall(f"({KERNELS[target]})", text))


def operands(dtype=jnp.bfloat16, shared=4, keys=256):
    batch, _, _, size = SHAPE
    key = jax.ShapeDtypeStruct((batch, keys, shared, size), dtype)
    return jax.ShapeDtypeStruct(SHAPE, dtype), key, key


def attend(query, key, value, **kwargs):
    return mpjax.dot_product_attention(query, key, value, **kwargs)


@pytest.mark.parametrize("target", [GPU, TPU])
@pytest.mark.parametrize("shared", [4, 2])
def test_attention_by_name_compiles_to_kernels_that_hold_no_pairs(target, shared):
    def causal(*args):
        return attend(*args, is_causal=True)

    compiled = lowered(causal, target, *operands(shared=shared)).compile()
    text = compiled.as_text()
    assert kernels_of(text, target)
    assert not re.search(r"\[2,(4|2,2),256,256\]", text)


LENGTHS = ((197, 197), (196, 197), (197, 196), (1, 256), (256, 1), (77, 77), (2, 2), (196, 196))
MASKS = {
    "none": lambda queries, keys: {},
    "causal": lambda queries, keys: {"is_causal": True} if queries == keys else {},
    "mask": lambda queries, keys: {"mask": jnp.tri(queries, keys, dtype=bool)[None, None]},
    "bias": lambda queries, keys: {"bias": jnp.zeros((1, 4, queries, keys), jnp.bfloat16)},
    "lengths": lambda queries, keys: {"key_value_seq_lengths": jnp.full(2, keys, jnp.int32)},
}


@pytest.mark.parametrize("target", [GPU, TPU])
@pytest.mark.parametrize("masked", MASKS)
def test_what_a_kernel_does_not_take_is_lowered_without_it(target, masked):
    """A vision transformer has 197 places: JAX refuses cuDNN's derivative of an odd length."""
    for queries, keys in LENGTHS:
        query = jax.ShapeDtypeStruct((2, queries, 4, 64), jnp.bfloat16)
        key = jax.ShapeDtypeStruct((2, keys, 4, 64), jnp.bfloat16)
        fun = functools.partial(attend, **MASKS[masked](queries, keys))
        text = lowered(fun, target, query, key, key).as_text()
        if target == "h100":
            is_even = queries % 2 == keys % 2 == 0
            assert bool(kernels_of(text, target)) == is_even


@pytest.mark.parametrize("target", [GPU, TPU])
@pytest.mark.parametrize("name", ["causal_by_tril", "by_linen", "by_jax_nn", "of_padded_keys"])
def test_attention_that_nobody_named_is_lowered_to_kernels(target, name):
    """Of one size: which programs are found is tested without compilers."""
    longer = {"TIME": 256, "FIRST": jnp.arange(256) < jnp.array([100, 256])[:, None]}
    x = jax.ShapeDtypeStruct((written.BATCH, 256, written.WIDTH), jnp.float32)
    weights = jax.ShapeDtypeStruct(written.WEIGHTS.shape, jnp.float32)
    with mock.patch.multiple(written, **longer):
        low = mpjax.autocast(written.FOUND[name], "bf16-mixed")
        text = lowered(low, target, weights, x).as_text()
        with hints.without("attended"):
            low = mpjax.autocast(written.FOUND[name], "bf16-mixed")
            without = lowered(low, target, weights, x).as_text()
    only_on_gpus = name == "by_linen"  # its mask is of queries too
    assert bool(kernels_of(text, target)) is not (only_on_gpus and target == "v5e")
    assert not kernels_of(without, target)


NOT_TAKEN = {
    "float32": (operands(jnp.float32), {}),
    "window ahead": (operands(), {"local_window_size": (3, 2)}),
    "asked for": (operands(), {"implementation": "xla"}),
}


@pytest.mark.parametrize("target", [GPU, TPU])
@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_no_kernel_takes_is_xlas_form(target, name):
    args, kwargs = NOT_TAKEN[name]
    text = lowered(lambda *xs: attend(*xs, **kwargs), target, *args).as_text()
    assert not kernels_of(text, target)


@pytest.mark.tpu_compiler
def test_cudnn_for_a_tpu_is_refused():
    with pytest.raises(NotImplementedError, match="lowered for tpu"):
        lowered(lambda *xs: attend(*xs, implementation="cudnn"), "v5e", *operands())


@pytest.mark.gpu_compiler
def test_cudnn_of_float32_is_told_to_be_cast():
    args = operands(jnp.float32)
    with pytest.raises(NotImplementedError, match="operands are float32"):
        lowered(lambda *xs: attend(*xs, implementation="cudnn"), "h100", *args)


@pytest.mark.gpu_compiler
def test_without_cudnn_it_is_xlas_form():
    refused = mock.Mock(side_effect=RuntimeError("cuDNN is not detected."))
    place = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    specs = targets.get_target("h100").specs(operands())
    with mock.patch(place, refused):
        text = step(lambda *xs: attend(*xs)).trace(*specs).lower().as_text()
    assert not kernels_of(text, "h100")
    assert refused.called


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("kwargs", [{"bias": 1}, {"mask": 1}, {"key_value_seq_lengths": 1}])
def test_masks_and_biases_compile_for_cudnn(kwargs):
    batch, queries, heads, _ = SHAPE
    given = {
        "bias": jax.ShapeDtypeStruct((1, heads, queries, 256), jnp.float32),
        "mask": jax.ShapeDtypeStruct((batch, 1, 1, 256), bool),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    ((name, _),) = kwargs.items()

    def masked(query, key, value, extra):
        return attend(query, key, value, **{name: extra})

    text = lowered(masked, "h100", *operands(), given[name]).compile().as_text()
    forward, backward = sorted(kernels_of(text, "h100"))
    assert backward == forward + "Backward"
    assert (
        "bf16[1,4,256,256]"
        not in re.findall(rf"= (.*) custom-call.*{re.escape(backward)}", text)[0]
    )


@pytest.mark.gpu_compiler
def test_the_gradient_of_a_bias_is_left_to_xla():
    """CuDNN gives zeros for a bias of several examples, and says nothing."""
    bias = jax.ShapeDtypeStruct((SHAPE[0], 1, 256, 256), jnp.float32)

    def biased(query, bias, key, value):
        return attend(query, key, value, bias=bias)

    query, key, value = operands()
    text = lowered(biased, "h100", query, bias, key, value).as_text()
    assert kernels_of(text, "h100") == {"__cudnn$fmhaScaleBiasSoftmax"}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("target", [GPU, TPU])
def test_inside_shard_map_the_kernel_runs(target, check_vma):
    found = targets.get_target(target)
    mesh = jax.sharding.Mesh([found.device], ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def mapped(*args):
        fun = functools.partial(attend, is_causal=True)
        return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)(
            *args
        )

    text = step(mapped).trace(*found.specs(operands())).lower().as_text()
    assert bool(kernels_of(text, target)) is not (target == "v5e" and check_vma)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("queries", "masked"), [(256, 256), (196, 196), (196, 1)])
def test_keys_that_are_not_read_compile_for_a_tpu(queries, masked):
    batch, _, heads, size = SHAPE
    array = jax.ShapeDtypeStruct((batch, queries, heads, size), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((batch, 1, 1, masked), bool)

    def attend_masked(query, key, value, mask):
        return attend(query, key, value, mask=mask)

    compiled = lowered(attend_masked, "v5e", array, array, array, mask).compile()
    assert kernels_of(compiled.as_text(), "v5e")


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("time", "size", "in_kernel"), [(512, 128, True), (384, 128, False), (512, 64, False)]
)
def test_a_tpu_gets_the_kernel_where_it_moves_fewer_bytes(monkeypatch, time, size, in_kernel):
    monkeypatch.undo()
    query = jax.ShapeDtypeStruct((2, time, 4, size), jnp.bfloat16)
    text = lowered(attend, "v5e", query, query, query).as_text()
    assert bool(kernels_of(text, "v5e")) is in_kernel
