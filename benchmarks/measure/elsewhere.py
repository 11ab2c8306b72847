"""A program as JAX lowers it for another platform, run on this CPU.

What autocast asks of a GPU or a TPU is in the program that JAX lowers for it: which results are
low, what is rounded once and what twice, which mask is read. Run here, it gives the values, though
not the speed, that it has there.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import export
from jaxlib.mlir.dialects import stablehlo

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# A 16-bit product with a float32 result, which XLA:CPU cannot run at every size.
_PRODUCT = re.compile(
    r"^( *)(%\S+) = stablehlo\.(dot_general |convolution\()(%[\w#]+), (%[\w#]+)(.*)"
    r" : \((tensor<\S*(?:bf16|f16)>), (tensor<\S*(?:bf16|f16)>)\) -> (tensor<\S*f32>)",
    re.MULTILINE,
)


def lowered_for(platform: str, fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns `fun`, for arguments like these, as it is for a platform; it runs on this CPU.

    Args:
      platform: one of `PLATFORMS`.
      fun: what to lower; without library calls of that platform, such as a GPU's LU.
      args: arrays.
    """
    if platform == "cpu":
        return fun
    anywhere = [export.DisabledSafetyCheck.platform()]
    made = export.export(jax.jit(fun), platforms=[platform], disabled_checks=anywhere)(*args)
    text = _PRODUCT.sub(_widened, made.mlir_module())
    artifact = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    return dataclasses.replace(made, mlir_module_serialized=artifact).call


def _widened(product: re.Match[str]) -> str:
    """Returns a product of float32 operands: the same one, as 16-bit values fit into them."""
    indent, result, name, *operands, rest, type_x, type_y, out = product.groups()
    lines: list[str] = []
    wide_types: list[str] = []
    for i, (operand, narrow) in enumerate(zip(operands, (type_x, type_y), strict=True)):
        wide = re.sub(r"b?f16>$", "f32>", narrow)
        new = f"%wide_{result[1:]}_{i}"
        lines.append(f"{indent}{new} = stablehlo.convert {operand} : ({narrow}) -> {wide}")
        operands[i] = new
        wide_types.append(wide)
    types = ", ".join(wide_types)
    lines.append(
        f"{indent}{result} = stablehlo.{name}{', '.join(operands)}{rest} : ({types}) -> {out}"
    )
    return "\n".join(lines)
