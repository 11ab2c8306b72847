"""An attention kernel that runs anywhere, in formulas: what a kernel reads and gives, for tests.

`in_place_of(kernel)` lets programs for this CPU run it where a GPU or a TPU runs its own.
"""

import contextlib

import jax
import jax.numpy as jnp

from mpjax._autocast.attention import flash, kernels, recomputed

# fmt: off
__all__ = [  # the one door of tests to attention's kernels
    "NAME", "backward", "everywhere", "forward", "why_not", "why_not_installed",
    "flash", "kernels", "recomputed",
]
# fmt: on

NAME = "formulas"
_NEVER = -(2.0**41)


def why_not(found, spec):
    del found, spec
    return ""


why_not_installed = why_not


def _logits(found, spec):
    """Returns the logits that a kernel computes, and values of as many heads as they have."""
    query, key, value = (x.astype(jnp.float32) for x in found[:3])
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * spec.scale
    if found.bias is not None:
        assert found.bias.dtype == found.query.dtype
        logits += found.bias.astype(jnp.float32)
    if found.mask is not None:
        logits += jnp.where(found.mask, 0.0, _NEVER)
    read = spec.band(*found.sizes[2:])
    if read is not None:
        logits = jnp.where(read, logits, _NEVER)
    if found.lengths is not None:
        first = jnp.arange(found.sizes[3]) < found.lengths[:, None, None, None]
        logits = jnp.where(first, logits, _NEVER)
    return logits, value


def forward(found, spec):
    logits, value = _logits(found, spec)
    rows = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - rows[..., None]).astype(found.query.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(jnp.float32), value)
    return out.astype(found.query.dtype), rows


def backward(found, spec, out, rows, ct):
    """As kernels do: weights again from the rows' sums, whatever these are."""

    def of(*floats):
        return _logits(type(found)(*floats, *found[3:]), spec)

    (logits, value), pull = jax.vjp(of, *found[:3])
    weights = jnp.exp(logits - rows[..., None])
    ct, out = ct.astype(jnp.float32), out.astype(jnp.float32)
    to_values = jnp.einsum("bnts,btnh->bsnh", weights, ct)
    to_weights = jnp.einsum("btnh,bsnh->bnts", ct, value)
    mean = jnp.sum(ct * out, axis=-1).swapaxes(1, 2)[..., None]
    return pull((weights * (to_weights - mean), to_values))


@contextlib.contextmanager
def everywhere(kernel):
    """Runs a kernel on every platform that has none of its own."""
    jax.clear_caches()
    kernels.KERNELS[""] = kernel
    try:
        yield
    finally:
        del kernels.KERNELS[""]
        jax.clear_caches()
