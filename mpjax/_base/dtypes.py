"""Translates any spelling of a dtype to one canonical dtype and short name; ranges of dtypes.

A policy names one of four dtypes. Short names are those that JAX prints (`bf16[8,128]`).
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._base.errors import message, nearest, of_one_width
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import DTypeSpec

DType = np.dtype[Any]

# short name, NumPy's name, other spellings in use (jmp: full; torch and Lightning: fp16 ...)
_FLOATS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("f16", "float16", ("fp16",)),
    ("bf16", "bfloat16", ()),
    ("f32", "float32", ("fp32", "full", "single")),
    ("f64", "float64", ("fp64", "double")),
)

POLICY_DTYPES: dict[str, DType] = {short: jnp.dtype(name) for short, name, _ in _FLOATS}
_SPELLINGS: dict[str, DType] = {
    spelling: jnp.dtype(name)
    for short, name, others in _FLOATS
    for spelling in (short, name, *others)
}
_SHORT = {dtype: short for short, dtype in POLICY_DTYPES.items()}
_KIND_LETTERS = {"int": "i", "uint": "u", "float": "f", "complex": "c"}

FLOAT32: DType = POLICY_DTYPES["f32"]
FLOAT16: DType = POLICY_DTYPES["f16"]
FLOAT64: DType = POLICY_DTYPES["f64"]


def is_dtype_name(name: str) -> bool:
    """Whether `name` spells one of the dtypes that a policy can have ('half' included)."""
    return name in _SPELLINGS or name == "half"


def dtype_names() -> list[str]:
    """Returns every accepted spelling of a dtype."""
    return [*_SPELLINGS, "half"]


@names_keywords()
def half_dtype() -> DType:
    """Returns the 16-bit dtype of the default backend: bfloat16 on TPU, float16 elsewhere.

    The rule is jmp's, so that code written for it runs unchanged. It asks for the backend when
    it is called, never before.

    Example:
      >>> mpjax.half_dtype()
      dtype('float16')

    References:
      jmp, `half_dtype`
    """
    return POLICY_DTYPES["bf16" if jax.default_backend() == "tpu" else "f16"]


def canonical_dtype(spec: DTypeSpec, where: str) -> DType:
    """Returns the floating dtype that `spec` names.

    Args:
      spec: a name ('bf16', 'bfloat16', 'full', 'half'), a scalar type or a NumPy dtype.
      where: the argument that it was given for, for the message.

    Raises:
      ValueError: it names no dtype.
      TypeError: it names a dtype that a policy cannot have: an integer, complex or 8-bit one.
    """
    if isinstance(spec, str):
        if spec == "half":
            return half_dtype()
        dtype = _SPELLINGS[spec] if spec in _SPELLINGS else existing_dtype(spec)
    else:
        dtype = _dtype_of_object(spec)
    if dtype is None:
        raise ValueError(_unknown(spec, where))
    if dtype in _SHORT:
        return dtype
    raise TypeError(_unfit(dtype, where))


def existing_dtype(name: str) -> DType | None:
    """Returns the dtype with the full name `name`, None for none.

    NumPy's codes are no names here: to it 'O4' is an object, 'e' a float16 and 'float' a float64.
    """
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError):
        return None
    return dtype if dtype.name == name else None


def torch_dtype(spec: Any) -> str | None:
    """Returns the name of a dtype of PyTorch, 'float16' of `torch.float16`; None for all else."""
    kind = type(spec)
    is_torch = kind.__module__ == "torch" and kind.__name__ == "dtype"
    return repr(spec).rpartition(".")[2] if is_torch else None


def _dtype_of_object(spec: Any) -> DType | None:
    # numpy.dtype(None) is float64, and an array would be taken for its dtype.
    if spec is None or isinstance(spec, (jax.Array, np.ndarray, np.generic)):
        return None
    try:
        return jnp.dtype(spec).newbyteorder("=")
    except (TypeError, ValueError):
        return None


def _unknown(spec: object, where: str) -> str:
    if (name := torch_dtype(spec)) is not None:
        return message(where, f"got {spec!r}, a dtype of PyTorch.", f"Type jnp.{name}.")
    close = _nearest(spec) if isinstance(spec, str) else []
    fix = [f"Did you mean {close[0]!r}?"] if close else ["Type, for example, 'bfloat16'."]
    if isinstance(spec, str) and "8" in re.findall(r"\d+", spec):
        fix = ["For 8-bit products, type the policy 'float8_from_mixed_bfloat16'."]
    if hasattr(spec, "loss_scale"):
        fix = ["A loss scale has a place of its own: make_train_step(..., loss_scale=it)."]
    is_word = spec is None or isinstance(spec, (str, bytes, int, float, complex))
    shown = repr(spec) if is_word else describe(spec)  # a model's repr would fill the screen
    return message(
        where, f"unknown dtype {shown}.", "Accepted: float16, bfloat16, float32, float64.", *fix
    )


def _nearest(name: str) -> list[str]:
    close = nearest(name, of_one_width(name, dtype_names()), 1)
    return ["float32"] if name == "float" else close  # float64 has the same letters


def _unfit(dtype: DType, where: str) -> str:
    if "float" in dtype.name:
        why = "8-bit and narrower floats need a scale per tensor, which a policy has no place for."
        fix = "Use 'bfloat16' here; for 8-bit products, type 'float8_from_mixed_bfloat16'."
    elif dtype.kind == "c":
        why = "A policy moves real floating values only; complex values keep their dtype."
        fix = "Use 'float32'."
    else:
        why = "A policy moves floating values only; integers and booleans keep their dtype."
        fix = "Use 'bfloat16', 'float16' or 'float32'; "
        fix += "for 8-bit products, type 'int8_from_mixed_bfloat16'."
    allowed = "Accepted: float16, bfloat16, float32, float64."
    return message(where, f"{dtype.name} is no dtype to compute in.", why, allowed, fix)


def short_name(dtype: Any) -> str:
    """Returns a dtype's name as JAX prints it in types: 'bf16', 'i32', 'f8_e4m3fn', 'key<fry>'."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):  # of PRNG keys
        return str(dtype)
    dtype = jnp.dtype(dtype) if not isinstance(dtype, np.dtype) else dtype
    if dtype in _SHORT:
        return _SHORT[dtype]
    for word, letter in _KIND_LETTERS.items():
        if dtype.name.startswith(word):
            return letter + dtype.name[len(word) :]
    return dtype.name


def describe(x: Any) -> str:
    """Returns `x`'s type as users read it in JAX: 'bf16[8,128]', else its Python type's name."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        return type(x).__name__
    return f"{short_name(x.dtype)}[{','.join(map(str, x.shape))}]"


def require_x64(dtype: DType, where: str) -> None:
    """Raises ValueError where JAX would silently compute float64 in float32."""
    if dtype == FLOAT64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            message(
                where,
                "float64 was asked for, and 64-bit types are off in JAX (it would give float32).",
                "Allowed with 64-bit types off: float16, bfloat16, float32.",
                'Type jax.config.update("jax_enable_x64", True) at the start, or use "32-true".',
            )
        )


def normal_powers_of_two(dtype: DType) -> tuple[float, float]:
    """Returns the least and the largest power of two that is normal: 2⁻¹⁴ and 2¹⁵ for float16."""
    info = jnp.finfo(dtype)
    return 2.0 ** int(info.minexp), 2.0 ** (int(info.maxexp) - 1)


def keeps(dtype: Any, value: float) -> bool:
    """Whether a number keeps its meaning in a dtype: no overflow, no underflow, exact integers."""
    if value == 0 or not math.isfinite(value):
        return True
    with np.errstate(all="ignore"):
        rounded = float(np.asarray(value, dtype=dtype))
    if not math.isfinite(rounded) or abs(value) < float(jnp.finfo(dtype).tiny):
        return False
    return rounded == value if value == int(value) else True
