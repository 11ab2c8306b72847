"""`check_support`: checks a policy for an accelerator that the user names."""

from typing import Any

from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import PolicySpec
from mpjax._hardware import DeviceLike, SupportReport, check_policy
from mpjax._policies.policy import get_policy


@names_keywords(POLICIES_OF)
def check_support(
    policy: PolicySpec = None, device: DeviceLike | str | None = None
) -> SupportReport:
    """Returns the support of a policy on an accelerator; warns if slow, raises if impossible.

    The hardware need not be here: give its name to check a job before it starts. A policy that is
    slow on a CPU is in the report and gives no warning, because people try code on CPUs.

    Args:
      policy: whatever `get_policy` takes: a name, a `Policy`, a `PolicyMap`, None for the scoped
        default.
      device: a `jax.Device`; or a name: 'v5e', 'v5litepod-16', 'h100', 'sm_90', 'gfx942', 'cpu'
        (the processor of this machine); or None for `jax.devices()[0]`.

    Returns:
      A report: `ok`, `status` ('native', 'slow', 'unsupported' or 'unknown') and `findings`, one
      for each dtype, with the reason and what to type instead.

    Raises:
      ValueError: a dtype cannot run (float64 with 64-bit types off), or a name is unknown.
      TypeError: `device` is neither a device nor a name.

    Warns:
      SupportWarning: a dtype is emulated there, or no faster than a wider one.

    Dtypes:
      The compute dtype is judged by products; the other dtypes are only stored.

    Transforms:
      None: it reads no array. With a name for `device` it starts no backend either.

    Example:
      >>> mpjax.check_support("bf16-mixed", "v5e").ok
      True
      >>> print(mpjax.check_support("bf16-mixed", "cpu-plain"))
      'bf16-mixed' on CPU without bfloat16 units: slow
        param, output float32 is native: stored and added, not multiplied
        compute bfloat16 is slow: no unit takes it; float32 products, which saves memory only
        Type '32-true' instead.

    References:
      Lightning, "precision by accelerator"; where each fact comes from: `mpjax/_hardware/table.py`
    """
    chosen: Any = get_policy(policy)
    return check_policy(chosen, device, where="check_support")
