"""Which kernel runs an attention, and where; chosen where it is lowered.

cuDNN's on NVIDIA GPUs, the flash kernel that JAX ships on TPUs, for what each of them takes; XLA's
form everywhere else. A kernel reads `Operands`, and adds to its logits what keeps keys from rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from mpjax import _compat
from mpjax._autocast.attention import cudnn, flash
from mpjax._autocast.attention.program import Empty, Operands, Program, Spec
from mpjax._errors import message

MULTIPLIED = 3  # operands, which come first: query, key and value
KERNELS = {"cuda": cudnn, "tpu": flash}
_CALLED = {"GPUs": cudnn, "TPUs": flash}  # as a person calls them
_NEVER = 1e30  # as the logarithm of a row's sum: the row's weights are 0, whatever its logits are


def register(
    primitive: Any, form: Callable[..., Any], by_kernel: Callable[..., Any], others: int
) -> None:
    """Lowers an operation as a kernel where one takes it, or else as XLA's form.

    Args:
      primitive: the operation.
      form: it, as XLA computes it.
      by_kernel: it, by a kernel, which comes first.
      others: how many of its operands are not the attention's, but come behind.
    """
    for platform in (None, *KERNELS):

        def rule(ctx: Any, *args: Any, platform: Any = platform, **params: Any) -> Any:
            avals = ctx.avals_in[: len(args) - others]
            kernel = _chosen(platform, ctx, avals, params["program"])
            if max(params.get("wrt", ()), default=0) >= MULTIPLIED:
                kernel = None  # cuDNN's gradient of a bias of several examples is 0, silently
            fun = form if kernel is None else functools.partial(by_kernel, kernel)
            run = functools.partial(fun, **params)
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

        mlir.register_lowering(primitive, rule, platform=platform, inline=False)


def _chosen(platform: str | None, ctx: Any, avals: Sequence[Any], program: Program) -> Any:
    kernel = KERNELS.get(platform or "")
    if program.implementation == "cudnn" and kernel is not cudnn:
        platforms = ", ".join(ctx.module_context.platforms)
        raise NotImplementedError(_no_cudnn(f"the program is lowered for {platforms}"))
    if kernel is None or program.implementation == "xla":
        return None
    why = why_not(kernel, program, avals) or _why_not_here(kernel, ctx)
    if not why:
        why = kernel.why_not_installed(_operands(program, avals), program.spec)
    if why and program.implementation == "cudnn":
        raise NotImplementedError(_no_cudnn(why))
    return None if why else kernel


def _no_cudnn(why: str) -> str:
    return message(
        "dot_product_attention(implementation='cudnn')",
        f"{why}.",
        "Allowed: bfloat16 or float16 on an NVIDIA GPU, in shapes that cuDNN takes.",
        "Leave implementation= out: the kernel is chosen where the program is compiled, or XLA's "
        "form runs.",
    )


def why_not(kernel: ModuleType, program: Program, avals: Sequence[Any]) -> str:
    """Returns why a kernel does not run an attention of such operands, empty where it does."""
    found, spec = _operands(program, avals), program.spec
    if not all(isinstance(n, int) for x in found[:3] for n in x.shape):
        return "a length is left open"
    _, _, queries, keys = found.sizes
    if spec.has_empty_rows(queries, keys):
        return "its window leaves rows without keys"
    if 0 in (*found.query.shape, *found.value.shape):
        return "it is of size zero"
    return kernel.why_not(found, spec)


def where(program: Program, avals: Sequence[Any]) -> str:
    """Returns which kernel runs an attention on which platform, and why XLA's form does."""
    if program.implementation == "xla":
        return "attention in XLA's form: implementation= asks for it"
    found = {platform: why_not(kernel, program, avals) for platform, kernel in _CALLED.items()}
    taken = [
        f"{_CALLED[platform].NAME} on {platform}" for platform, why in found.items() if not why
    ]
    why = [f"not on {platform}: {why}" for platform, why in found.items() if why]
    kind = "attention in one kernel" if taken else "attention in XLA's form"
    return f"{kind}: {'; '.join([*taken, *why])}"


def _operands(program: Program, avals: Sequence[Any]) -> Operands:
    structs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    return program.once(("read", structs), lambda: jax.eval_shape(program.operands, *structs))


def _why_not_here(kernel: ModuleType, ctx: Any) -> str:
    """Returns why a kernel cannot be part of the program that is lowered."""
    if not _compat.is_for_one_device(ctx):
        return "XLA splits the program over devices; inside jax.shard_map there is one"
    if kernel is flash and any(a.manual_axis_type.varying for a in ctx.avals_in):
        return "Pallas needs jax.shard_map(..., check_vma=False)"
    if kernel is cudnn and ctx.module_context.lowering_parameters.for_export:
        return "an exported program cannot call cuDNN"
    return ""


# -- both passes of a kernel -----------------------------------------------------------------------


def forward(kernel: ModuleType, *arrays: Any, program: Program) -> tuple[Any, Any]:
    """Returns the result and the logarithm of each row's sum, by a kernel."""
    found, spec = program.operands(*arrays), program.spec
    reads = rows_with_keys(found, spec)
    out, rows = kernel.forward(_ready(found, spec, reads), spec)
    out = _with_empty_rows(out, found, spec, reads)
    return program.result(out), rows.reshape(*program.lead, *rows.shape[1:])


def backward(kernel: ModuleType, *args: Any, program: Program, wrt: tuple[int, ...]) -> list[Any]:
    """Returns the cotangents of query, key and value, by a kernel."""
    *arrays, out, rows, ct = args
    spec = program.spec

    def operands(*moving: Any) -> tuple[Any, Any]:
        full = list(arrays)
        for i, x in zip(wrt, moving, strict=True):
            full[i] = x
        found = program.operands(*full)
        return found[:MULTIPLIED], found[MULTIPLIED:]

    floats, pull, others = jax.vjp(operands, *(arrays[i] for i in wrt), has_aux=True)
    found = Operands(*floats, *others)
    batch, heads, queries, _ = found.sizes
    turned = functools.partial(_untransposed, program, (batch, queries, heads, _size(found)))
    out, ct = turned(out), turned(ct)
    rows = rows.reshape(batch, heads, queries)
    reads = rows_with_keys(found, spec)
    given = _ready(found, spec, reads)
    by_kernel, at_empty = ct, (0.0, 0.0, 0.0)
    if reads is not None and spec.empty is not Empty.ALL:
        by_kernel = jnp.where(_as_result(reads), ct, jnp.zeros((), ct.dtype))
        rows = jnp.where(reads[..., 0], rows, _NEVER)

        def empty(*floats: Any) -> Any:
            own = Operands(*floats, *others)
            return _with_empty_rows(jnp.zeros_like(ct), own, spec, reads)

        at_empty = jax.vjp(empty, *floats)[1](ct)
    grads = kernel.backward(given, spec, out, rows, by_kernel)
    return list(pull(tuple(a + b for a, b in zip(grads, at_empty, strict=True))))


def _size(found: Operands) -> int:
    return found.value.shape[-1]


def _untransposed(program: Program, shape: tuple[int, ...], x: Any) -> Any:
    """Returns what the author calls a result in the order of a kernel's axes."""
    # `jax.linear_transpose` asserts inside a `shard_map` that tracks varying axes.
    zeros, x = _compat.equally_varying(jnp.zeros(shape, x.dtype), x)
    return jax.vjp(program.result, zeros)[1](x)[0]


# -- what keeps keys from rows ---------------------------------------------------------------------


def rows_with_keys(found: Operands, spec: Spec) -> Any:
    """Returns which rows read any key, bool[.., .., .., 1] on the axes of the logits, or None.

    Of a row without keys, kernels and XLA know different things: XLA's weights are all equal. The
    logarithm of its sum is so large that float32 loses what the kernel's gradient needs of it.
    """
    read = None if found.mask is None else found.mask
    _, _, queries, keys = found.sizes
    if found.lengths is not None:
        first = jnp.arange(keys) < found.lengths[:, None, None, None]
        read = first if read is None else read & first
    if read is None:
        return None
    band = spec.band(queries, keys)
    if band is not None:
        read = read & band
    return jnp.any(read, axis=-1, keepdims=True)


def _as_result(reads: Any) -> Any:
    return reads.swapaxes(1, 2)  # [batch, heads, queries, 1] to [batch, queries, heads, 1]


def _with_empty_rows(out: Any, found: Operands, spec: Spec, reads: Any) -> Any:
    """Returns a kernel's result, and in rows without keys what XLA gives: see `Empty`."""
    if reads is None or spec.empty is Empty.ALL:
        return out
    groups, keys = found.query.shape[2] // found.value.shape[2], found.sizes[3]
    value, key = (
        jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (found.value, found.key)
    )
    weight = jnp.where(reads, 0.0, jnp.nan if spec.empty is Empty.NAN else 1 / keys)
    empty = _as_result(weight) * jnp.sum(value, axis=1, keepdims=True)
    if spec.empty is Empty.THROUGH:
        centred = jax.lax.stop_gradient(value - jnp.mean(value, axis=1, keepdims=True))
        together = jnp.einsum("bsnh,bsnv->bnhv", key, centred) * (spec.scale / keys)
        moved = jnp.einsum("btnh,bnhv->btnv", found.query.astype(jnp.float32), together)
        empty = empty + (moved - jax.lax.stop_gradient(moved))
    return jnp.where(_as_result(reads), out, empty.astype(out.dtype))


def _ready(found: Operands, spec: Spec, reads: Any) -> Operands:
    """Returns operands of which a bias holds the mask; a row without keys reads all in a mask."""
    if found.bias is not None:
        dtype = found.query.dtype
        bias = _ready_bias(found.bias, found.mask, spec, dtype, found.sizes)
        return found._replace(bias=bias, mask=None)
    if found.mask is not None:
        return found._replace(mask=found.mask | ~reads)
    return found


def _ready_bias(bias: Any, mask: Any, spec: Spec, dtype: Any, sizes: Any) -> Any:
    """Returns a bias as a kernel adds it, low: each row is shifted so that its largest is 0.

    That changes no weight. Rounded, what counts of a bias is near 0, and exact; and a row whose
    keys are all kept away by -1e9 keeps the logarithm of its sum.
    """
    bias = bias.astype(jnp.float32)
    if mask is not None:
        bias = jnp.where(mask, bias, -jnp.inf)
    band = spec.band(*sizes[2:])
    seen = bias if band is None else jnp.where(band, bias, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(seen, axis=-1, keepdims=True))
    bias = bias - jnp.where(jnp.isneginf(largest), 0.0, largest)
    least = float(jnp.finfo(dtype).min) / 2 if dtype == jnp.float16 else -(2.0**41)
    shape = (*bias.shape[:2], *sizes[2:])
    return jnp.broadcast_to(jnp.maximum(bias, least), shape).astype(dtype)
