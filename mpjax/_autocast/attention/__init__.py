"""Attention in one kernel: cuDNN's on GPUs, a flash kernel on TPUs, XLA's form elsewhere.

`program` describes an attention, `primitives` makes it one operation with its own derivative,
`kernels` chooses the kernel, and `cudnn` and `flash` call JAX's kernels. `by_name` is the public
function, and `written` its form for XLA. `pattern` finds attention in a jaxpr, and `steps` puts it
into a plan.
"""

from mpjax._autocast.attention.by_name import dot_product_attention
from mpjax._autocast.attention.primitives import attention

__all__ = ["attention", "dot_product_attention"]
