"""Measures the spread of gradients within blocks whose second moments are stored in 8 bits."""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp

from mpjax._base.donated import refuse_donated
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.shown import Shown, html_table
from mpjax._base.tree import leaf_paths, path_str
from mpjax._base.typing import Array, KeyPath, PyTree
from mpjax._low_precision.codes import SecondMoment, is_coded, shares
from mpjax._low_precision.moments import with_classes
from mpjax._scaling.optim_state import gradient_params
from mpjax._scaling.transformation import refuse_state

WIDE = 1e3
"""From this spread on, a single update can be 1.5 times Adam's and more."""
_LEAST = 1e-3  # the share of a parameter's numbers from which on it is reported


@dataclasses.dataclass(frozen=True, repr=False)
class MomentSpread(Shown):
    """The spread of gradients within a block, for each second moment in 8 bits."""

    # A parameter's path · the widest block's largest gradient over its smallest, in the root mean
    # square · the share of the numbers that are a thousand times smaller than their block's largest
    rows: tuple[tuple[str, float, float], ...]

    @property
    def rules(self) -> dict[str, str]:
        """The rules for parameters that are too wide, for `with_quantized_state(tx, rules=...)`."""
        wide = [path for path, spread, share in self.rows if spread > WIDE and share >= _LEAST]
        return dict.fromkeys(wide, "bfloat16")

    def _headline(self) -> str:
        return f"{self._title()}: {len(self.rules)} of {len(self.rows)} wide"

    def _title(self) -> str:
        return "spread of gradients within a block"

    def _cells(self) -> list[tuple[str, str, str]]:
        return [(path, f"{spread:.0e}", f"{share:.1%}") for path, spread, share in self.rows]

    def __str__(self) -> str:
        header = ("parameter", "widest", "below 1/1000")
        rows = [header, *self._cells()]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        advice = [f"Type rules={self.rules!r}."] if self.rules else []
        return "\n".join((self._title(), *lines, *advice))

    def _repr_html_(self) -> str:
        notes = [f"Type rules={self.rules!r}."] if self.rules else []
        header = ("parameter", "widest", "below 1/1000")
        return html_table(self._title(), header, self._cells(), notes)


@names_keywords()
def moment_spread(opt_state: PyTree, params: PyTree | None = None) -> MomentSpread:
    """Returns the spread of gradients within blocks, for second moments stored in 8 bits.

    The codes of `with_quantized_state` are the coarser, the smaller a number is beside its block's
    largest. Look after some steps: where gradients of one block are 1000 times apart, a single
    update can be 1.5 times Adam's and more. The report's `rules` store such parameters' moments in
    bfloat16, which follow Adam at any spread. It runs on the host and waits for the step.

    Args:
      opt_state: an optimizer's state, or any tree with one inside.
      params: the parameters, for their paths; None for paths in the state.

    Returns:
      A `MomentSpread` with `rows` and `rules`, of all second moments in 8 bits.

    Raises:
      TypeError: the state was given as the parameters.
      ValueError: the state is traced, or has been donated to a step.

    Example:
      >>> tx = mpjax.optim.with_quantized_state(optax.adam(1e-3))
      >>> params = {"w": jnp.ones((64, 256))}
      >>> grads = {"w": jnp.ones((64, 256)).at[:, 5].set(1e5)}  # one column is 1e5 times the rest
      >>> _, state = tx.update(grads, tx.init(params), params)
      >>> print(mpjax.optim.moment_spread(state, params))
      spread of gradients within a block
      parameter  widest  below 1/1000
      w           1e+05         99.6%
      Type rules={'w': 'bfloat16'}.
    """
    refuse_state(params, "moment_spread(opt_state, params)")
    refuse_donated(opt_state, "moment_spread")
    plain = gradient_params(params)
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(plain))
    known = dict(zip(paths, leaf_paths(plain), strict=True))
    rows: list[tuple[str, float, float]] = []
    opt_state = with_classes(opt_state)
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_coded):
        if not isinstance(x, SecondMoment):
            continue
        codes, scales = (jax.tree.leaves(part)[0] for part in x)  # NNX wraps each in a variable
        if isinstance(codes, jax.core.Tracer):
            got = "it was called inside a traced function."
            fix = "Call it on the host, on the state that the jitted step returned."
            raise ValueError(message("moment_spread", got, fix))
        widest, share = _measured(codes, jnp.isfinite(scales).all())
        rows.append((_param(path, known), float(widest), float(share)))
    return MomentSpread(tuple(rows))


def spread_text(opt_state: PyTree, params: PyTree | None, where: str) -> str | None:
    """Returns a warning about moments in 8 bits whose blocks are wide; None if none is."""
    wide = moment_spread(opt_state, params)
    if not wide.rules:
        return None
    widest = {path: spread for path, spread, _ in wide.rows}
    first = max(wide.rules, key=widest.__getitem__)
    others = len(wide.rules) - 1
    got = f"gradients within a block of {first!r} are {widest[first]:.0e} times apart"
    got += f" ({others} more parameters are wide)" if others else ""
    got += (
        ", too far for moments in 8 bits: single updates of Adam are up to 3 times float32's, and "
    )
    got += "of others more (of Adan 8 times)."
    fix = "Type with_quantized_state(tx, rules=mpjax.optim.moment_spread(opt_state, params).rules),"
    return message(where, got, f"{fix} and take the state over with mpjax.optim.adopt_state.")


def _param(path: KeyPath, known: dict[KeyPath, str]) -> str:
    ends = (known[path[i:]] for i in range(len(path)) if path[i:] in known)
    return next(ends, path_str(path))


@jax.jit
def _measured(codes: Array, is_sound: Array) -> tuple[Array, Array]:
    """Returns the widest spread of a moment's gradients, and the share of small ones."""
    size = jnp.sqrt(shares(codes, is_second=True))
    widest = 1 / jnp.min(jnp.where(size > 0, size, 1.0))
    small = jnp.mean((size > 0) & (size < 1 / WIDE), dtype=jnp.float32)
    return jnp.where(is_sound, widest, 1.0), jnp.where(is_sound, small, 0.0)
