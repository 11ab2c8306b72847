"""Any JAX function in mixed precision, unedited: decide, then bind again.

`api` traces a function, `planning` makes its plan (`decide`, then `arrange`), `run` binds it again,
`why` says what was decided. README.md says which folder to open for what.
"""

from mpjax._autocast.api import autocast, full_precision
from mpjax._autocast.attention import dot_product_attention
from mpjax._autocast.why.explain import explain
from mpjax._autocast.with_history import with_amax_history

__all__ = ["autocast", "dot_product_attention", "explain", "full_precision", "with_amax_history"]
