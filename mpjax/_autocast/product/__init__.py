"""Products on low operands: the dtypes of each direction (`config`), programs, derivatives.

`config` is data; `bilinear` runs a product and finds its transposed and batched forms;
`primitives` gives it a derivative of its own.
"""

from mpjax._autocast.product.config import ArrayRole, Config, current, low, quantized
from mpjax._autocast.product.primitives import hidden, product, with_precision

__all__ = [
    "ArrayRole",
    "Config",
    "current",
    "hidden",
    "low",
    "product",
    "quantized",
    "with_precision",
]
