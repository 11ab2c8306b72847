"""Helps compilers to save memory and time. Nothing here decides which values may be low.

The other rooms import these names and nothing else. They are of four kinds, and `hints` has a row
for each: its platforms, and the bytes that it saves there. Two have no row, since they take place
before a plan is made (`batch_counted_rows`, `mark_permutations`): gathers in a simpler form.

Cuts: low values that are stored where a group would compute them again (`cuts`).
Marks: instructions for a backend about a group's values (`marked`).
Ways: the same values by other operations, in a group (`Ways`) or alone (`pick`, `native`).
Arounds: operations around a product's operands and result, where it is lowered (`alone`).
"""

from mpjax._autocast.speed.cuts import of_program as cuts
from mpjax._autocast.speed.enumerated import batch_counted_rows
from mpjax._autocast.speed.epilogue import alone, spread
from mpjax._autocast.speed.exact import is_exact
from mpjax._autocast.speed.exact import run as native
from mpjax._autocast.speed.hints import hint
from mpjax._autocast.speed.lowerings import behind_barrier, read_low, stored, stored_cotangent
from mpjax._autocast.speed.marks import FusedGroup, Marks, low_cotangent
from mpjax._autocast.speed.marks import of_groups as marked
from mpjax._autocast.speed.order import smaller_first
from mpjax._autocast.speed.permuted import mark_permutations
from mpjax._autocast.speed.picks import run as pick
from mpjax._autocast.speed.pooled import bind as bind_pooled
from mpjax._autocast.speed.recompute import recomputed
from mpjax._autocast.speed.storage import MOST_AGAIN, SMALLER, kept_apart, largest_size
from mpjax._autocast.speed.ways import Ways

__all__ = [
    "MOST_AGAIN",
    "SMALLER",
    "FusedGroup",
    "Marks",
    "Ways",
    "alone",
    "batch_counted_rows",
    "behind_barrier",
    "bind_pooled",
    "cuts",
    "hint",
    "is_exact",
    "kept_apart",
    "largest_size",
    "low_cotangent",
    "mark_permutations",
    "marked",
    "native",
    "pick",
    "read_low",
    "recomputed",
    "smaller_first",
    "spread",
    "stored",
    "stored_cotangent",
]
