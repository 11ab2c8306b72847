"""`default_policy`: a policy for a `with` block."""

from contextlib import ContextDecorator
from typing import Any

from mpjax._base.errors import message, warn
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import PolicySpec
from mpjax._base.uncalled import SaysToCall
from mpjax._policies.policy import chosen_policy, default


class default_policy(ContextDecorator, metaclass=SaysToCall):
    """Makes `get_policy(None)` return `policy` inside a `with` block.

    JAX reads the default while it traces a function, and the default belongs to the key of JAX's
    compilation cache: a jitted function that is called under another default is traced again.
    Nothing process-wide changes, and other threads do not see it. It also works as a decorator.

    Args:
      policy: whatever `get_policy` takes.

    Warns:
      PolicyWarning: the block was never entered, and no function was decorated, so nothing changed.

    Example:
      >>> with mpjax.default_policy("bf16-mixed"):
      ...     print(mpjax.get_policy())
      p=f32,c=bf16,o=f32
      >>> print(mpjax.get_policy())
      p=f32,c=f32,o=f32

    References:
      Keras, `set_dtype_policy`, which is process-wide
    """

    _call = "default_policy('bf16-mixed')"
    _used = True  # an error in __init__ is no call without `with`

    @names_keywords(POLICIES_OF, "default_policy")
    def __init__(self, policy: PolicySpec) -> None:
        self._policy = chosen_policy(policy, "default_policy")
        self._contexts: list[Any] = []
        self._used = False

    def __call__(self, func: Any) -> Any:
        self._used = True
        return super().__call__(func)

    def __enter__(self) -> None:
        self._used = True
        context = default(self._policy)
        context.__enter__()
        self._contexts.append(context)

    def __exit__(self, *exc: Any) -> None:
        self._contexts.pop().__exit__(*exc)

    def __del__(self) -> None:
        if not self._used:
            got = f"{self._policy} was made the default of no block: it has changed nothing."
            fix = f"Type `with mpjax.default_policy({str(self._policy)!r}):` above what it is for."
            warn(message("default_policy", got, fix))
