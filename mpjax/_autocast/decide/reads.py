"""Flags for how a value is read: `demand` sets them backwards, `equations` asks for them.

Flags of safety say what rounding the value would do to a reader, however far away. Flags of place
say what comes later.
"""

from __future__ import annotations

# -- what comes later ------------------------------------------------------------------------------

PRODUCT = 1
"""Read by a product, directly or moved."""
OUTPUT = 2
"""Read by an output of the program, directly, moved, or through sums."""
LATER = 4
"""Some product depends on it."""
WHOLE = 8
"""Read by a product with all of its elements: worth a low copy outside a loop."""
FULL = 16
"""Goes into a carry that a loop holds in float32: an accumulator."""
CARRIED = 64
"""Goes into a carry that a loop holds in either dtype."""
STACKED = 256
"""A loop stacks it: a copy of a carry that may be float32."""
FORWARD = 2048
"""Some product depends on it that is no part of a derivative taken inside the program."""

# -- what rounding would do ------------------------------------------------------------------------

GRADIENT = 32
"""A derivative taken inside the program, which the rest of the program reads."""
EXACT = 128
"""Rounding ruins a reader: a factorisation, a running sum, an operation without a rule."""
ABSOLUTE = 512
"""A sine or an exponential reads it: of a large value, rounding leaves nothing."""
NEAR = 1024
"""A reader asks how far it is from a constant: `log(1 - q)`, `acos(c)`."""
TESTED = 4096
"""A loop stops when it is small enough."""
CANCELS = 8192
"""It is added to a sum over the same values, as in `|a|² + |b|² - 2ab`."""
BELOW = 1 << 20
"""It cancels, and so does what it is a sum of: `blur(blur(h * h))` of two blurs."""
SAME = 16384
"""The same product is float32 elsewhere in the program."""
DIFFERENCE = 1 << 18
"""A value that may be almost the same is subtracted from it: `f(z + 0.01) - f(z)`."""
AGAIN = 1 << 19
"""The same products are computed again elsewhere, and what is made of both may cancel."""
LARGE = 1 << 24
"""It is made much smaller before anything else: float16 may not hold it."""
RESULT = 1 << 21
"""Nor may the result of a product be rounded that it is made of: a logarithm reads `1 - e / e.sum`,
where the sum is a product with ones, or the difference is of two places of one result.
"""

# -- whose cotangents add up -----------------------------------------------------------------------

READ = 1 << 15
"""Some operation gives it a cotangent; moves, such as a reshape, hand on those of their results."""
APART = 1 << 16
"""A reader shares no kernel with others: a loop, a sort, a function with rules, a region."""
SUMMED, SHARED = 1 << 22, 1 << 23
"""A sum over devices is made of it, or of a statistic of it."""
MEET = 1 << 17
"""Several readers give it cotangents, one of them apart: they add up in float32."""

UNROUNDED = EXACT | NEAR | TESTED | CANCELS | BELOW | DIFFERENCE | AGAIN | RESULT
"""Where one of these is set, the value is float32 for that reader, whatever lies between."""
AT_THE_END = OUTPUT | GRADIENT
"""Asked of the last carry of a loop, not of each."""
COTANGENTS = READ | APART | SUMMED | SHARED | MEET
