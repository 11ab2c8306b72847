"""Attention in one kernel: cuDNN's on GPUs, a flash kernel on TPUs, XLA's form elsewhere.

`program` says what an attention is, `primitives` make it one operation with a derivative of its
own, `kernels` chooses who runs it, and `cudnn` and `flash` call JAX's kernels. `by_name` is the
public function, with `written` as its form.
"""

from mpjax._autocast.attention.by_name import dot_product_attention
from mpjax._autocast.attention.primitives import attention

__all__ = ["attention", "dot_product_attention"]
