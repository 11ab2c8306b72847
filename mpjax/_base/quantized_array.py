"""An array in 8 bits with its scales; reads trees that hold some as trees of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message
from mpjax._base.exported import exported, tell_flax
from mpjax._base.keywords import names_keywords
from mpjax._base.public import public


@exported
@public
@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """A weight in 8 bits: it represents its values times its scales.

    It is a pytree of the two arrays, for checkpoints and shardings. `mpjax.quantize` makes it.
    `autocast` and a policy's `cast_to_compute` read it as the array that it represents.

    Args:
      values: int8, float8_e4m3fn or float8_e5m2.
      scale: f32 of as many axes, of size 1 where values share a scale.

    Dtypes:
      `dtype` is float32: that of the array that it represents.

    Transforms:
      jit, vmap, scan (over a first axis that scales have too). Not differentiable.

    Example:
      >>> w = mpjax.quantize({"w": jnp.ones((64, 64))}, "int8_from_mixed_bfloat16")["w"]
      >>> w
      QuantizedArray(int8[64,64], scale f32[1,64])

    References:
      Jacob et al., Quantization and Training of Neural Networks, 2018, https://arxiv.org/abs/1712.05877
    """

    def __init__(self, values: Any, scale: Any) -> None:
        self.values = values
        self.scale = scale
        tell_flax()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it represents."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """The number of bytes that values and scales take."""
        return self.values.nbytes + self.scale.nbytes

    @property
    def dtype(self) -> Any:
        """float32, the dtype of the array that it represents."""
        return FLOAT32

    def dequantize(self, dtype: Any = FLOAT32) -> jax.Array:
        """Returns the array that it represents, rounded once."""
        return dequantized(self.values, self.scale).astype(dtype)

    def __jax_array__(self) -> jax.Array:
        """Raises TypeError: a function that does not know 8-bit weights was given one."""
        got = f"a function was given {self!r} as an array."
        fix = "Type mpjax.autocast(fun, 'bf16-mixed')(params, ...), or fun(mpjax.dequantize(params)"
        raise TypeError(message("quantize", got, f"{fix}, ...)."))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """Raises TypeError: NumPy would make an array of one object."""
        got = f"NumPy was given {self!r} as an array."
        fix = "Type np.asarray(x.dequantize()), or np.asarray(x.values) for the 8-bit values."
        raise TypeError(message("quantize", got, fix))

    def tree_flatten_with_keys(self) -> Any:
        """Returns both arrays with their names."""
        names = map(jax.tree_util.GetAttrKey, ("values", "scale"))
        return tuple(zip(names, (self.values, self.scale), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> QuantizedArray:
        """Returns one of other leaves."""
        return cls(*children)

    def __repr__(self) -> str:
        return f"QuantizedArray({_shown(self.values)}, scale {_shown(self.scale, 'f32')})"


def _shown(x: Any, name: str = "") -> str:
    if not hasattr(x, "shape"):  # a tree of something else, such as shardings
        return repr(x)
    return f"{name or x.dtype.name}[{','.join(map(str, x.shape))}]"


def is_quantized(x: Any) -> bool:
    """Whether `x` is an array in 8 bits with scales."""
    return isinstance(x, QuantizedArray)


def holds_quantized(tree: Any) -> bool:
    """Whether a tree holds one."""
    return any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


@names_keywords()
def dequantize(tree: Any, dtype: Any = FLOAT32) -> Any:
    """Returns `tree` with plain arrays in place of the 8-bit weights that `quantize` made.

    Args:
      tree: any pytree.
      dtype: of these arrays; nothing else is cast.

    Dtypes:
      float32, or `dtype`. Values times scales are rounded once, in float32.

    Transforms:
      jit, vmap.

    Example:
      >>> params = {"w": jnp.full((64, 64), 0.5)}
      >>> small = mpjax.quantize(params, "float8_from_mixed_bfloat16")
      >>> mpjax.dequantize(small)["w"].dtype
      dtype('float32')
    """

    def plain(x: Any) -> Any:
        return x.dequantize(dtype) if is_quantized(x) else x

    return jax.tree.map(plain, tree, is_leaf=is_quantized)


# A primitive, so that autocast recognises the operand of a product as 8-bit values.
dequantized_p = Primitive("dequantized")


def dequantized(values: Any, scale: Any) -> jax.Array:
    """Returns values times scales in float32."""
    return dequantized_p.bind(jnp.asarray(values), jnp.asarray(scale))


def _multiplied(values: jax.Array, scale: jax.Array) -> jax.Array:
    return values.astype(FLOAT32) * scale


def _refuse(*_: Any, **__: Any) -> Any:
    got = "a weight in 8 bits was differentiated: it cannot be trained."
    fix = "Differentiate with respect to other arguments, or train mpjax.dequantize(params)."
    raise TypeError(message("quantize", got, fix))


def _batch(args: Any, dims: Any) -> Any:
    return dequantized_p.bind(*compat.all_batched(args, dims)), 0


dequantized_p.def_impl(jax.jit(_multiplied))
dequantized_p.def_abstract_eval(lambda values, _: values.update(dtype=FLOAT32, weak_type=False))
mlir.register_lowering(dequantized_p, mlir.lower_fun(_multiplied, multiple_results=False))
ad.primitive_jvps[dequantized_p] = _refuse
batching.primitive_batchers[dequantized_p] = _batch
