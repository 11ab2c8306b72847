"""What users of other libraries type, and what it is called here: data for messages."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mpjax._errors import message, nearest

F = TypeVar("F", bound=Callable[..., Any])

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
"""Policy by folded name: what was most probably meant."""

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
"""Primitive by the function that consists of it."""

ATTRIBUTES: dict[str, str] = {
    "GradScaler": 'mpjax.DynamicLossScale, inside make_train_step(loss_fn, tx, "16-mixed")',
    "DynamicScale": "mpjax.DynamicLossScale",
    "DynamicGradScaler": "mpjax.DynamicLossScale",
    "LossScaleOptimizer": "mpjax.with_loss_scale(tx, mpjax.DynamicLossScale())",
    "StaticScale": "mpjax.StaticLossScale",
    "amp": 'mpjax.autocast(fun, "bf16-mixed")',
    "initialize": 'mpjax.make_train_step(loss_fn, tx, "O1")',
    "Accelerator": 'mpjax.make_train_step(loss_fn, tx, "bf16-mixed")',
    "set_policy": "mpjax.linen.with_policy, mpjax.nnx.set_policy, or mpjax.default_policy",
    "set_global_policy": "mpjax.default_policy, in a with block",
    "set_dtype_policy": "mpjax.default_policy, in a with block",
    "DTypePolicy": "mpjax.Policy",
    "force_full_precision": "mpjax.full_precision",
    "filter_value_and_grad": "mpjax.value_and_grad, with eqx.partition",
    "filter_grad": "mpjax.grad, with eqx.partition",
    "cast_tree": "mpjax.get_policy(policy).cast_to_compute",
}
"""What stands here for a name of another library."""

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
AUTOCAST: dict[str, str] = {"dtype": "policy", "precision": "dot_precision", "enabled": "policy"}


def names_keywords(names: dict[str, str], where: str = "") -> Callable[[F], F]:
    """Decorates a function so that a keyword it does not know is an error with the right name.

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
    fix = f"Type {meant}= instead of {name}=." if meant else f"Drop {name}=."
    return message(where, f"unknown keyword {name}=.", f"Allowed: {', '.join(allowed)}.", fix)


def no_attribute(name: str) -> str:
    """Returns what is said of a name that `mpjax` does not have."""
    got = f"has no attribute {name!r}."
    here = ATTRIBUTES.get(name)
    return message("module 'mpjax'", got, *([f"Here it is {here}."] if here else []))


def folded(name: str) -> str:
    """Returns a policy's name as it is looked up: BF16-Mixed, bf16_mixed and o1 are understood."""
    return name.lower().replace("_", "-")


def unknown_policy(name: str, names: list[str]) -> str:
    """Returns what is said of a name that is none of the policies' `names`."""
    if folded(name) in ("tf32", "tensorfloat32", "tf32x3"):
        got = f"{name!r} is how float32 products are computed, and no dtype of a policy."
        fix = "Type mpjax.autocast(fun, '32-true', dot_precision='tf32')."
        return message("get_policy", got, fix)
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
