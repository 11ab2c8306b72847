"""Chooses the kernel of an attention where it is lowered, when the platform is known.

cuDNN's on NVIDIA GPUs, JAX's flash kernel on TPUs, for operands that they take; XLA's form for all
others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.interpreters import mlir

from mpjax._autocast.attention import cudnn, flash, recomputed
from mpjax._autocast.attention.program import AttentionProgram, Operands
from mpjax._autocast.known.named_attention import MULTIPLIED
from mpjax._base import compat
from mpjax._base.errors import message

KERNELS = {"cuda": cudnn, "tpu": flash}
_CALLED = {"GPUs": cudnn, "TPUs": flash}  # words for `explain`


def register(
    primitive: Any, form: Callable[..., Any], by_kernel: Callable[..., Any], others: int
) -> None:
    """Lowers a primitive as a call of a kernel if one takes its operands, else as XLA's form.

    Args:
      primitive: the primitive.
      form: computes it by XLA's operations.
      by_kernel: computes it by a kernel, its first argument.
      others: how many operands follow those of the attention: results, cotangents.
    """
    for platform in (None, *KERNELS):

        def rule(ctx: Any, *args: Any, platform: Any = platform, **params: Any) -> Any:
            avals = ctx.avals_in[: len(args) - others]
            kernel = _chosen(platform, ctx, avals, params["program"])
            if kernel is None and others and platform == "tpu":
                kernel = _recomputing(params["program"], avals)
            if max(params.get("wrt", ()), default=0) >= MULTIPLIED:
                kernel = None  # cuDNN's gradient of a bias of several examples is 0, silently
            fun = form if kernel is None else functools.partial(by_kernel, kernel)
            run = functools.partial(fun, **params)
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

        mlir.register_lowering(primitive, rule, platform=platform, inline=False)


def _chosen(platform: str | None, ctx: Any, avals: Sequence[Any], program: AttentionProgram) -> Any:
    kernel = KERNELS.get(platform or "")
    if program.implementation == "cudnn" and kernel is not cudnn:
        platforms = ", ".join(ctx.module_context.platforms)
        raise NotImplementedError(_no_cudnn(f"the program is lowered for {platforms}"))
    if kernel is None or program.implementation == "xla":
        return None
    why = why_not(kernel, program, avals) or _why_not_here(kernel, ctx)
    if not why:
        why = _why_not_installed(kernel, program, avals)
    if why and program.implementation == "cudnn":
        raise NotImplementedError(_no_cudnn(why))
    return None if why else kernel


def _recomputing(program: AttentionProgram, avals: Sequence[Any]) -> Any:
    """Returns XLA's backward pass from the rows' sums, None where operands are not for it."""
    return None if why_not(recomputed, program, avals) else recomputed


def _no_cudnn(why: str) -> str:
    return message(
        "dot_product_attention(implementation='cudnn')",
        f"{why}.",
        "Allowed: bfloat16 or float16 on an NVIDIA GPU, in shapes that cuDNN takes.",
        "Leave implementation= out: the kernel is chosen where the program is compiled, or XLA's "
        "form runs.",
    )


def why_not(kernel: ModuleType, program: AttentionProgram, avals: Sequence[Any]) -> str:
    """Returns why a kernel does not run an attention of such operands, empty if it does."""
    operands, spec = _operands(program, avals), program.spec
    if not all(isinstance(n, int) for x in operands[:3] for n in x.shape):
        return "a length is left open"
    _, _, queries, keys = operands.sizes
    if spec.has_empty_rows(queries, keys):
        return "its window leaves rows without keys"
    if program.shows_rows and operands.bias is not None:
        return "return_residual=True beside a bias: kernels shift it"
    if 0 in (*operands.query.shape, *operands.value.shape):
        return "it is of size zero"
    return kernel.why_not(operands, spec)


def where(program: AttentionProgram, avals: Sequence[Any], types: Sequence[Any]) -> str:
    """Returns the sentence of `explain`: the kernel on each platform, or why it is XLA's form.

    Args:
      program: the attention.
      avals: shapes and dtypes of its operands.
      types: the types of its operands in the program, with the devices over which XLA splits them.
    """
    if program.implementation == "xla":
        return "attention in XLA's form: implementation= asks for it"
    reasons = {
        platform: why_not(kernel, program, avals) or _why_not_mapped(kernel, types)
        for platform, kernel in _CALLED.items()
    }
    taken = [
        f"{_CALLED[platform].NAME} on {platform}" for platform, why in reasons.items() if not why
    ]
    why = [f"not on {platform}: {why}" for platform, why in reasons.items() if why]
    devices = max(map(compat.devices_shared_by, types))
    if devices > 1 and taken:
        split = f"XLA splits the program over {devices} devices"
        return f"attention in XLA's form: {split}; inside jax.shard_map, {'; '.join(taken)}"
    kind = "attention in one kernel" if taken else "attention in XLA's form"
    return f"{kind}: {'; '.join([*taken, *why])}"


def _operands(program: AttentionProgram, avals: Sequence[Any]) -> Operands:
    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    return program.once(("read", structs), lambda: jax.eval_shape(program.operands, *structs))


def _why_not_installed(kernel: ModuleType, program: AttentionProgram, avals: Sequence[Any]) -> str:
    """Returns why JAX refuses a kernel here, or ''; asked by both passes, traced once."""
    operands = _operands(program, avals)
    key = "installed", kernel.NAME, tuple((a.shape, a.dtype) for a in avals)
    return program.once(key, lambda: kernel.why_not_installed(operands, program.spec))


def _why_not_here(kernel: ModuleType, ctx: Any) -> str:
    """Returns why a kernel cannot be part of the program that is lowered, or ''."""
    if not compat.is_for_one_device(ctx):
        return "XLA splits the program over devices; inside jax.shard_map there is one"
    if kernel is cudnn and ctx.module_context.lowering_parameters.for_export:
        return "an exported program cannot call cuDNN"
    return _why_not_mapped(kernel, ctx.avals_in)


def _why_not_mapped(kernel: ModuleType, types: Sequence[Any]) -> str:
    if kernel is flash and any(a.manual_axis_type.varying for a in types):
        return "Pallas needs jax.shard_map(..., check_vma=False)"
    return ""
