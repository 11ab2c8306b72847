"""Translates names of other libraries to mpjax's, for messages: tables, as data."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mpjax._base.errors import message, nearest

F = TypeVar("F", bound=Callable[..., Any])

POLICY_ROWS: tuple[tuple[str, str, str], ...] = (
    ("32-true", "f32 f32 f32", "Lightning"),
    ("16-mixed", "f32 f16 f32", "Lightning"),
    ("bf16-mixed", "f32 bf16 f32", "Lightning"),
    ("16-true", "f16 f16 f16", "Lightning"),
    ("bf16-true", "bf16 bf16 bf16", "Lightning"),
    ("64-true", "f64 f64 f64", "Lightning"),
    ("32", "f32 f32 f32", "Lightning"),
    ("16", "f32 f16 f32", "Lightning"),
    ("64", "f64 f64 f64", "Lightning"),
    ("mixed_float16", "f32 f16 f32", "Keras"),
    ("mixed_bfloat16", "f32 bf16 f32", "Keras"),
    ("float32", "f32 f32 f32", "Keras, jmp"),
    ("float16", "f16 f16 f16", "Keras, jmp"),
    ("bfloat16", "bf16 bf16 bf16", "Keras, jmp"),
    ("float64", "f64 f64 f64", "Keras, jmp"),
    ("O0", "f32 f32 f32", "Apex"),
    ("O1", "f32 f16 f32", "Apex"),
    ("O2", "f16 f16 f32", "Apex"),
    ("O3", "f16 f16 f16", "Apex"),
    ("f32", "f32 f32 f32", "jmp"),
    ("full", "f32 f32 f32", "jmp"),
    ("f16", "f16 f16 f16", "jmp"),
    ("half", "half half half", "jmp"),
    ("f64", "f64 f64 f64", "jmp"),
)
"""Names that `get_policy` takes: dtypes of parameters, computation, outputs; who has the name."""

POLICIES: dict[str, str] = {
    "fp16-mixed": "16-mixed",
    "f16-mixed": "16-mixed",
    "float16-mixed": "16-mixed",
    "mixed-fp16": "16-mixed",
    "mixed-f16": "16-mixed",
    "amp": "16-mixed",
    "amp-fp16": "16-mixed",
    "bfloat16-mixed": "bf16-mixed",
    "mixed": "bf16-mixed",
    "mixed-precision": "bf16-mixed",
    "mixed-bf16": "bf16-mixed",
    "amp-bf16": "bf16-mixed",
    "auto": "bf16-mixed",
    "fp16-true": "16-true",
    "fp32-true": "32-true",
    "no": "32-true",
    "none": "32-true",
    "off": "32-true",
    "single": "32-true",
    "double": "64-true",
}
"""Folded name → the policy that was most probably meant."""

PRIMITIVES: dict[str, str] = {
    "softmax": "exp",
    "log_softmax": "log",
    "logsumexp": "exp",
    "layer_norm": "rsqrt",
    "layernorm": "rsqrt",
    "batch_norm": "rsqrt",
    "rms_norm": "rsqrt",
    "matmul": "dot_general",
    "dot": "dot_general",
    "einsum": "dot_general",
    "dense": "dot_general",
    "linear": "dot_general",
    "attention": "dot_general",
    "conv": "conv_general_dilated",
    "conv2d": "conv_general_dilated",
    "mean": "reduce_sum",
    "sum": "reduce_sum",
    "max": "reduce_max",
    "sigmoid": "logistic",
    "swish": "silu",
}
"""Function or layer → the primitive that is most of it."""

ATTRIBUTES: dict[str, str] = {
    "GradScaler": 'mpjax.DynamicLossScale, inside make_train_step(loss_fn, tx, "16-mixed")',
    "amp": 'mpjax.autocast(fun, "bf16-mixed")',
    "autocast_mode": 'mpjax.autocast(fun, "bf16-mixed")',
    "custom_fwd": "nothing, or mpjax.full_precision()(fun): a jax.custom_vjp passes as it is",
    "custom_bwd": "nothing, or mpjax.full_precision()(fun): a jax.custom_vjp passes as it is",
    "clip_grad_norm_": "mpjax.optim.clip_by_global_norm(1.0), inside tx",
    "clip_grad_norm": "mpjax.optim.clip_by_global_norm(1.0), inside tx",
    "clip_grad_value_": "optax.clip(1.0), inside tx: optax.chain(clip, adam)",
    "unscale_": "mpjax.with_loss_scale(tx, mpjax.DynamicLossScale()), which unscales by itself",
    "scale_loss": "mpjax.value_and_grad(loss_fn, loss_scale=mpjax.current_loss_scale(opt_state))",
    "is_autocast_enabled": "mpjax.explain(fun, policy)(*args), which shows each operation",
    "set_autocast_dtype": 'mpjax.autocast(fun, "bf16-mixed"), of a function',
    "set_float32_matmul_precision": "mpjax.autocast(fun, '32-true', dot_precision='tf32')",
    "set_default_dtype": "mpjax.default_policy, in a with block",
    "no_autocast": "mpjax.full_precision(), in a with block",
    "MixedPrecision": 'mpjax.Policy("float32", "bfloat16", "float32")',
    "MixedPrecisionPolicy": 'mpjax.Policy("float32", "bfloat16", "float32")',
    "fully_shard": 'jax.sharding with mpjax.make_train_step(loss_fn, tx, "bf16-mixed")',
    "convert_to_float8_training": 'mpjax.autocast(fun, "float8_from_mixed_bfloat16")',
    "Float8Linear": 'mpjax.autocast(fun, "float8_from_mixed_bfloat16")',
    "quantize_": 'mpjax.quantize(params, "int8_from_mixed_bfloat16")',
    "Adam8bit": "mpjax.optim.with_quantized_state(optax.adam(1e-3))",
    "AdamW8bit": "mpjax.optim.with_quantized_state(optax.adamw(1e-3))",
    "fp8_autocast": 'mpjax.autocast(fun, "float8_from_mixed_bfloat16"), a decorator and no context',
    "fp8_model_init": 'mpjax.quantize(params, "float8_from_mixed_bfloat16")',
    "Format": 'mpjax.Float8CurrentScaling(fprop="e4m3", dgrad=("e5m2", "e4m3"))',
    "initialize": 'mpjax.make_train_step(loss_fn, tx, "O1")',
    "FP16_Optimizer": 'mpjax.optim.with_master_weights(tx), with the policy "O2"',
    "FusedAdam": "optax.adam, which XLA fuses",
    "float_function": "mpjax.full_precision()(fun)",
    "half_function": 'mpjax.autocast(fun, "16-mixed")',
    "master_params": "mpjax.optim.full_params(params, opt_state)",
    "Accelerator": 'mpjax.make_train_step(loss_fn, tx, "bf16-mixed")',
    "Trainer": "mpjax.make_train_step(loss_fn, tx, \"bf16-mixed\"), for precision='bf16-mixed'",
    "Fabric": "mpjax.make_train_step(loss_fn, tx, \"bf16-mixed\"), for precision='bf16-mixed'",
    "LightningModule": 'mpjax.make_train_step(loss_fn, tx, "bf16-mixed")',
    "LossScaleOptimizer": "mpjax.with_loss_scale(tx, mpjax.DynamicLossScale())",
    "mixed_precision": 'mpjax.get_policy("mixed_bfloat16"), or mpjax.default_policy',
    "set_policy": "mpjax.linen.with_policy, mpjax.nnx.set_policy, or mpjax.default_policy",
    "set_global_policy": "mpjax.default_policy, in a with block",
    "global_policy": "mpjax.get_policy(), of the block around it",
    "set_dtype_policy": "mpjax.default_policy, in a with block",
    "dtype_policy": "mpjax.get_policy(), of the block around it",
    "DTypePolicy": 'mpjax.get_policy("mixed_float16")',
    "FloatDTypePolicy": 'mpjax.get_policy("mixed_float16")',
    "DTypePolicyMap": 'mpjax.PolicyMap("mixed_bfloat16", {"encoder/norm*": "float32"})',
    "QuantizedDTypePolicy": 'mpjax.get_policy("int8_from_mixed_bfloat16")',
    "QuantizedFloat8DTypePolicy": 'mpjax.get_policy("float8_from_mixed_bfloat16")',
    "apply_if_finite": "mpjax.with_loss_scale(tx), which skips a step that is not finite",
    "MultiSteps": "mpjax.make_train_step(loss_fn, tx, accumulate=4)",
    "apply_updates": "mpjax.optim.apply_updates",
    "clip_by_global_norm": "mpjax.optim.clip_by_global_norm",
    "global_norm": "mpjax.optim.global_norm",
    "with_master_weights": "mpjax.optim.with_master_weights",
    "with_quantized_state": "mpjax.optim.with_quantized_state",
    "diagnose": "mpjax.numerics.diagnose",
    "DynamicScale": "mpjax.DynamicLossScale",
    "StaticScale": "mpjax.StaticLossScale",
    "DynamicGradScaler": "mpjax.DynamicLossScale",
    "DynamicLossScaling": "mpjax.DynamicLossScale",
    "StaticLossScaling": "mpjax.StaticLossScale",
    "force_full_precision": "mpjax.full_precision",
    "cast_to_half_precision": "mpjax.get_policy(policy).cast_to_compute",
    "cast_to_full": "mpjax.get_policy('float32').cast_to_compute",
    "filter_value_and_grad": "mpjax.value_and_grad, with eqx.partition",
    "filter_grad": "mpjax.grad, with eqx.partition",
    "cast_tree": "mpjax.get_policy(policy).cast_to_compute",
    "QtRule": "mpjax.PolicyMap, whose to_qwix_rules() gives them",
    "quantize_model": "mpjax.quantize(params, policy), of any tree of weights",
}
"""Name of another library → mpjax's."""

POLICY_ATTRIBUTES: dict[str, str] = {
    "variable_dtype": ".param_dtype",
    "storage_dtype": ".param_dtype",
    "reduce_dtype": "nothing: gradients are averaged in float32",
    "buffer_dtype": "nothing: what is no parameter keeps its dtype",
    "dtype": ".compute_dtype",
    "precision": ".name",
    "quantization_mode": ".recipe, of a mpjax.QuantizedPolicy",
    "cast_to_half_precision": ".cast_to_compute",
    "cast_inputs": ".cast_to_compute",
    "cast_outputs": ".cast_to_output",
    "get_config": ".to_dict()",
    "from_config": "mpjax.get_policy(config)",
    "loss_scale": "mpjax.get_loss_scale(policy)",
}
"""Attribute of other libraries' policies → mpjax's."""

LOSS_SCALE: dict[str, str] = {
    "init_scale": "loss_scale",
    "initial_scale": "loss_scale",
    "initial_loss_scale": "loss_scale",
    "scale": "loss_scale",
    "scaling": "loss_scale",
    "period": "growth_interval",
    "growth_steps": "growth_interval",
    "dynamic_growth_steps": "growth_interval",
    "min_loss_scaling": "min_loss_scale",
    "minimum_scale": "min_loss_scale",
    "min_scale": "min_loss_scale",
    "max_scale": "max_loss_scale",
    "factor": "growth_factor and backoff_factor",
    "fin_steps": "counter",
}
GRADIENTS: dict[str, str] = {
    "scaling": "loss_scale",
    "scaler": "loss_scale",
    "scale": "loss_scale",
    "dynamic_scale": "loss_scale",
    "axis": "axis_name",
    "argnum": "argnums",
    "aux": "has_aux",
    "dtype": "policy",
}
STEP: dict[str, str] = {
    "precision": "policy",
    "opt_level": "policy",
    "mixed_precision": "policy",
    "dtype": "policy",
    "optimizer": "tx",
    "scaler": "loss_scale",
    "aux": "has_aux",
    "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "accumulation_steps": "accumulate",
    "max_skips": "max_consecutive_skips",
    "max_consecutive_errors": "max_consecutive_skips",
    "axis": "axis_name",
    "pmap_axis": "axis_name",
    "donate_argnums": "donate",
}
_OFF = "policy='32-true' for a function, or `with mpjax.full_precision():` for a block,"
AUTOCAST: dict[str, str] = {
    "dtype": "policy",
    "precision": "dot_precision",
    "enabled": _OFF,
    "device_type": "the policy alone, mpjax.autocast(fun, 'bf16-mixed'),",
    "cache_enabled": "nothing",
}
DEVICES = frozenset(
    {"cuda", "cpu", "gpu", "tpu", "xpu", "mps", "hpu", "npu", "xla", "rocm", "meta"}
)
"""Device types, the first argument of PyTorch's autocast."""


def names_keywords(names: dict[str, str], where: str = "") -> Callable[[F], F]:
    """Decorates a function: its error for an unknown keyword suggests the right one.

    Args:
      names: keywords of other libraries, and which one of the function's stands for each.
      where: the function's name as users write it; `__name__` if empty.
    """

    def decorate(fun: F) -> F:
        known = inspect.signature(fun).parameters
        caller = where or fun.__name__

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    raise TypeError(_unknown_keyword(caller, name, names, list(known)))
            return fun(*args, **kwargs)

        return wrapped  # type: ignore[return-value]  # of the same signature

    return decorate


def _unknown_keyword(where: str, name: str, names: dict[str, str], known: list[str]) -> str:
    allowed = [parameter for parameter in known if parameter != "self"]
    close = nearest(name, allowed, 1)
    meant = names.get(name, close[0] if close else "")
    is_keyword = meant.replace(" and ", "").isidentifier()
    fix = f"Type {meant}{'=' * is_keyword} instead of {name}=." if meant else f"Drop {name}=."
    return message(where, f"unknown keyword {name}=.", f"Allowed: {', '.join(allowed)}.", fix)


def no_attribute(name: str, known: Iterable[str] = ()) -> str:
    """Returns the error text for a name that `mpjax` does not have; `known` are its own names."""
    got = f"has no attribute {name!r}."
    here = ATTRIBUTES.get(name)
    if here is not None:
        return message("module 'mpjax'", got, f"Here it is {here}.")
    close = nearest(name, known, 1)
    return message("module 'mpjax'", got, *[f"Did you mean mpjax.{word}?" for word in close])


class NoPolicyAttributeError(AttributeError):
    """A policy has no such attribute; mpjax's name for it is looked up when the error is shown."""

    def __init__(self, cls: type, attribute: str) -> None:
        super().__init__(attribute)
        self._cls = cls

    def __str__(self) -> str:
        (name,) = self.args
        here = POLICY_ATTRIBUTES.get(name)
        close = nearest(name, [n for n in dir(self._cls) if not n.startswith("_")], 1)
        fix = [f"Here it is {here}."] if here else [f"Did you mean .{word}?" for word in close]
        return message(self._cls.__name__, f"has no attribute {name!r}.", *fix)


def folded(name: str) -> str:
    """Returns the key of a policy's name: BF16-Mixed and bf16_mixed have one, O1 and o1 another."""
    return name.lower().replace("_", "-")


def unknown_policy(name: str, names: list[str]) -> str:
    """Returns the error text for a name that is none of the policies' `names`."""
    if folded(name) in ("tf32", "tensorfloat32", "tf32x3"):
        got = f"{name!r} is how float32 products are computed, and no dtype of a policy."
        fix = "Type mpjax.autocast(fun, '32-true', dot_precision='tf32')."
        return message("get_policy", got, fix)
    if re.search(r"(nf|fp|float|^f|int|^i|mxfp|^)4($|[^0-9])|4.?bit", folded(name)):
        got = f"unknown policy {name!r}: there are no products of 4 bits."
        allowed = "XLA compiles none for a CPU; 8 bits are the fewest here."
        fix = "Type 'int8_from_mixed_bfloat16'; mpjax.quantize(params, it) for weights in 8 bits."
        return message("get_policy", got, allowed, fix)
    if re.search("(fp|float|^f|int|^i|^)8", folded(name)):
        got = f"unknown policy {name!r}: 8 bits is a recipe of products, and no dtype of a policy."
        allowed = "Accepted: 'int8_from_mixed_bfloat16', 'float8_from_mixed_bfloat16', or either "
        allowed += "from another base, such as 'float8_from_mixed_float16'."
        return message("get_policy", got, allowed)
    accepted = (
        "Accepted: 'bf16-mixed', '16-mixed', '32-true', 'mixed_bfloat16', 'O2', "
        "'p=f32,c=bf16,o=f32', or one dtype; `python -m mpjax names` lists all."
    )
    meant = POLICIES.get(folded(name))
    close = [meant] if meant else nearest(folded(name), names, 1) or nearest(name, names, 1)
    fix = f"Did you mean get_policy({close[0]!r})?" if close else "E.g. get_policy('bf16-mixed')."
    return message("get_policy", f"unknown policy {name!r}.", accepted, fix)
