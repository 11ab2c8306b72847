"""Products on low operands: what each direction reads (`config`), how it is run and differentiated.

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
