"""Convolutions with a kernel of one point, as matrix products.

The gradient of such a kernel is a product too: any device multiplies low operands and accumulates
in float32. As a convolution it would need float32 operands, whole activations: cuDNN gives a low
result for low ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

_PLAIN = {"feature_group_count": 1, "batch_group_count": 1}


def is_pointwise(params: dict[str, Any], structs: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether a convolution's kernel is one point, read at places that need no padding."""
    kernel = structs[1].shape
    _, _, *spatial = params["dimension_numbers"].rhs_spec
    return (
        all(kernel[axis] == 1 for axis in spatial)
        and all(low == high == 0 for low, high in params["padding"])
        and all(step == 1 for step in params["lhs_dilation"])
        and all(params[name] == count for name, count in _PLAIN.items())
        and all(struct.sharding is None for struct in structs)
    )


def pointwise(params: dict[str, Any]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the product of an image and the one point of a kernel."""
    dims = params["dimension_numbers"]
    feature = dims.lhs_spec[1]
    strides = dict(zip(dims.lhs_spec[2:], params["window_strides"], strict=True))
    # The axes of the product: those of the image without its features, then the new features.
    others = [axis for axis in range(len(dims.lhs_spec)) if axis != feature]
    made = {axis: place for place, axis in enumerate(others)} | {feature: len(others)}
    order = [made[axis] for _, axis in sorted(zip(dims.out_spec, dims.lhs_spec, strict=True))]

    def fun(image: jax.Array, kernel: jax.Array) -> jax.Array:
        steps = [strides.get(axis, 1) for axis in range(image.ndim)]
        if any(step > 1 for step in steps):
            image = lax.slice(image, [0] * image.ndim, image.shape, steps)
        point = lax.squeeze(kernel, dims.rhs_spec[2:])
        read = int(dims.rhs_spec[1] > dims.rhs_spec[0])
        out = lax.dot_general(
            image, point, (((feature,), (read,)), ((), ())), precision=params["precision"]
        )
        return lax.transpose(out, order)

    return fun
