"""Any JAX function in mixed precision, unedited: decide, then bind again.

`api` traces a function; `plan` (with `states`, `demand`, `groups` and `control`) decides the dtype
of every value; `rebind` (with `group_functions`, `rebind_calls`, `custom_rules`, `remat` and
`product`) runs it. `explain` prints what was decided.
"""

from mpjax._autocast.api import autocast, full_precision
from mpjax._autocast.attention import dot_product_attention
from mpjax._autocast.why.explain import explain
from mpjax._autocast.with_history import with_amax_history

__all__ = ["autocast", "dot_product_attention", "explain", "full_precision", "with_amax_history"]
