"""Flags for how a value is read: `reads` sets them backwards, `equations` asks for them.

Flags of safety say what rounding the value would do to a reader, however far away. Flags of place
say what comes later.
"""

from __future__ import annotations

# -- what comes later ------------------------------------------------------------------------------

PRODUCT = 1 << 0
"""Read by a product, directly or moved."""
OUTPUT = 1 << 1
"""Read by an output of the program, directly, moved, or through sums; or data are taken off it.

These may be an earlier call's output: `logp(w, x) - old`.
"""
LATER = 1 << 2
"""Some product depends on it."""
WHOLE = 1 << 3
"""Read by a product with all of its elements: worth a low copy outside a loop."""
ACCUMULATOR = 1 << 4
"""Goes into a carry that a loop holds in float32: an accumulator."""
CARRIED = 1 << 5
"""Goes into a carry that a loop holds in either dtype."""
STACKED = 1 << 6
"""A loop stacks it, and it is made of a carry, which may be float32."""
FORWARD = 1 << 7
"""Some product depends on it that is no part of a derivative taken inside the program."""

# -- what rounding would do ------------------------------------------------------------------------

GRADIENT = 1 << 8
"""A derivative taken inside the program, which the rest of the program reads."""
RUINED = 1 << 9
"""Rounding ruins a reader: a factorisation, a running sum, a comparison, one without a rule."""
ABSOLUTE = 1 << 10
"""A sine or an exponential reads it: of a large value, rounding leaves nothing."""
NEAR = 1 << 11
"""A reader asks how far it is from a constant: `log(1 - q)`, `acos(c)`."""
TESTED = 1 << 12
"""A loop stops when it is small enough."""
CANCELS = 1 << 13
"""It is added to a sum over the same values, as in `|a|² + |b|² - 2ab`."""
BELOW = 1 << 14
"""It cancels, and so does what it is a sum of: `blur(blur(h * h))` of two blurs."""
SAME = 1 << 15
"""The same product is float32 elsewhere in the program."""
DIFFERENCE = 1 << 16
"""A value that may be almost the same is subtracted from it: `f(z + 0.01) - f(z)`."""
AGAIN = 1 << 17
"""The same products are computed again elsewhere, and what is made of both may cancel."""
SCALED = 1 << 18
"""A large or an unknown number scales it before anything else: float16 may not hold it."""
RESULT = 1 << 19
"""As `NEAR`, and the product's own result is not rounded either: a logarithm reads `1 - e / e.sum`,
where the sum is a product with ones, or the difference of two places of one result.
"""
SOLUTION = 1 << 25
"""A product that reads what a solve made, or makes what one reads: its large terms cancel, as in
`k - a @ solve(b, a.T)`. Or one of which a logarithm reads a transform, as of a spectrum. Or one of
a linear iteration, whose errors the next turns multiply.
"""
RELATIVE = 1 << 26
"""A logarithm reads what a product makes of it: small elements count as much as large ones."""
SMALL = 1 << 27
"""A product by a rotation, by constants of few columns, or into few cells."""

DIVIDED = 1 << 29
"""A product is divided by a sum of its weights, however small these are: float16 holds none that
is less than 6e-8.
"""
UNHELD = 1 << 30
"""A product reads it that is float32 under float16, which might not hold an operand of it."""
PROPORTION = 1 << 31
"""A logarithm, a root or a division reads it, however small it is: float16 holds 0 below 6e-8."""
AS_TESTED = 1 << 32
"""The same is computed in each turn of a loop, which stops when that is small enough."""

# -- whose cotangents add up -----------------------------------------------------------------------

READ = 1 << 20
"""Some operation gives it a cotangent; moves, such as a reshape, hand on those of their results."""
APART = 1 << 21
"""A reader shares no kernel with others: a loop, a sort, a function with rules, a region."""
SUMMED, SHARED = 1 << 22, 1 << 23
"""A sum over devices is made of it, or of a statistic of it."""
MEET = 1 << 24
"""Several readers give it cotangents, one of them apart: they add up in float32."""
TURNS = 1 << 28
"""Each turn of a loop reads it, and gives it a cotangent: `MEET`, also where a product reads it."""

UNROUNDED = RUINED | NEAR | TESTED | AS_TESTED | CANCELS | BELOW | DIFFERENCE | AGAIN | RESULT
"""Where one of these is set, the value is float32 for that reader, whatever lies between."""
SPOILED = OUTPUT | ACCUMULATOR | ABSOLUTE | UNROUNDED
"""Where one of these is set, the value is not rounded because a product reads it too."""
AT_THE_END = OUTPUT | GRADIENT
"""Asked of the last carry of a loop, not of each."""
COTANGENTS = READ | APART | SUMMED | SHARED | MEET | TURNS
