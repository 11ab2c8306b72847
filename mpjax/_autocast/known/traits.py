"""Traits of operations, beside the class that `mpjax._jaxpr.op_rules` gives them: one table.

An operation stands in one row, with a word for each trait; below, what a word means and who asks.
An operation in no row has no trait: it runs by its class alone, in a kernel of its own. Traits
under "how it is run" and "what its derivative keeps" cost speed where they are left out. All
others decide dtypes, so a new operation needs each of them that is true of it. `fusible` implies
`of_few`, unless `statistic` stands beside it.
"""

_TABLE = """
add sub                                 | fusible alone stays_kept adds linear hands_on shifts of_totals parts
add_any                                 | fusible alone stays_kept adds linear hands_on
mul                                     | fusible alone stays_kept hands_on scales of_totals parts
div                                     | fusible alone stays_kept hands_on scales of_totals parts
neg                                     | fusible chooses hands_on parts
rem                                     | fusible native stays_kept angles
abs                                     | fusible chooses positive
copy stop_gradient                      | fusible chooses
max                                     | fusible alone stays_kept chooses accumulates of_norms of_totals widened limits
min                                     | fusible alone stays_kept chooses accumulates of_norms widened limits
clamp                                   | fusible alone stays_kept chooses accumulates limits
select_n                                | fusible alone stays_kept chooses accumulates linear joins limits
floor ceil round                        | fusible linear decides
convert_element_type                    | fusible linear hands_on of_totals
square                                  | fusible of_totals powers positive
integer_pow                             | fusible of_totals powers
sqrt                                    | fusible of_totals powers relative positive
tanh                                    | fusible bends of_norms costly parts saturates
logistic                                | fusible bends of_norms saturates positive
erf                                     | fusible bends of_norms costly saturates
exp exp2                                | fusible absolute saturates positive
expm1                                   | fusible absolute saturates
pow                                     | fusible distances relative
log log2                                | fusible distances relative
log1p                                   | fusible distances
rsqrt                                   | fusible relative positive
cbrt                                    | fusible distances relative
sin cos tan                             | fusible absolute saturates angles
sinh cosh                               | fusible absolute saturates
asin acos acosh atanh                   | fusible distances
atan asinh                              | fusible distances saturates
atan2                                   | fusible distances
erfc                                    | fusible costly saturates
erf_inv one_minus_square                | fusible distances
sign                                    | fusible saturates
lt le gt ge                             | fusible chooses linear looks decides
lt_to le_to                             | fusible chooses linear looks decides
eq ne eq_to                             | fusible chooses linear looks decides equals
is_finite                               | fusible chooses linear looks
argmax argmin                           | chooses linear looks decides
and or not                              | fusible chooses linear logic
xor                                     | fusible linear logic
concatenate stack                       | fusible alone stays_kept linear accumulates joins puts_together
pad                                     | fusible alone stays_kept linear accumulates turns puts_together
reshape squeeze expand_dims             | fusible chooses turns permutes reshapes
transpose                               | fusible chooses turns permutes
rev                                     | fusible turns permutes
slice                                   | fusible resizes turns slices
split unstack                           | fusible resizes permutes slices
broadcast_in_dim                        | fusible chooses resizes repeats
dynamic_slice                           | resizes picks
gather                                  | resizes picks repeats
dynamic_update_slice                    | updates native stays_kept accumulates
scatter scatter-max scatter-min         | updates native stays_kept accumulates selects
scatter-add scatter-sub                 | updates native accumulates scatters
scatter-mul                             | updates native
psum psum_invariant unreduced_psum      | across hands_on linear of_totals
reduce_scatter unreduced_reduce_scatter | across hands_on linear of_totals
psum_scatter                            | across hands_on linear of_totals
lgamma digamma polygamma                | of_few distances
igamma igammac igamma_grad_a            | of_few unforgiving
bessel_i0e bessel_i1e                   | of_few distances
nextafter                               | of_few
random_gamma_grad zeta                  | of_few unforgiving
regularized_incomplete_beta polynomial  | of_few unforgiving
complex real imag conj                  | of_few hands_on linear complex
reduce_sum                              | fusible linear statistic totals
reduce_prod                             | fusible statistic distances
reduce_max                              | fusible statistic totals resizes selects extreme
reduce_min                              | fusible statistic resizes selects extreme
reduce_and reduce_or                    | fusible
cummax cummin                           | extreme decides
sort top_k                              | selects decides
tile pvary pcast pbroadcast             | repeats
all_gather all_gather_invariant         | repeats gathers
all_gather_reduced                      | gathers
cumsum cumlogsumexp                     | unforgiving running
cumprod fft                             | unforgiving
cholesky lu qr geqrf svd schur eig eigh | unforgiving solves
hessenberg householder_product          | unforgiving solves
triangular_solve custom_linear_solve    | unforgiving solves
tridiagonal tridiagonal_solve           | unforgiving solves
cholesky_update geqp3 ormqr             | unforgiving solves
spsolve linear_solve                    | unforgiving solves
symmetric_product                       | unforgiving
debug_callback debug_print              | looks
"""  # fmt: skip  # noqa: E501
_ROWS = [[part.split() for part in line.split("|")] for line in _TABLE.strip().splitlines()]


def _having(word: str) -> frozenset[str]:
    return frozenset(name for names, words in _ROWS for name in names if word in words)


# -- how it is run: groups, fusible, exact, sums ---------------------------------------------------

FUSIBLE = _having("fusible")
"""XLA computes it in one kernel with its neighbours, cheaply enough to do it again."""

ALONE = _having("alone")
"""Runs on low operands where it is alone in its group: one rounding either way.

Not `tanh`: its derivative reads how far its result is from 1. Nor `logistic`: some backends make
1 / (1 + exp(-x)) of it, each step rounded.
"""

COSTLY = _having("costly")
"""XLA:GPU stores its result in float32 for a second kernel rather than compute it there."""

NATIVE = _having("native")
"""Follows its operands' dtype outside of any group."""

CHOOSES = _having("chooses")
"""Only chooses, compares or moves: low values in, the same result; its derivative saves a mask.

A function of these alone, such as `relu`, runs on low values (`speed/exact`). Which operations give
the same result, each by itself, is `op_rules.EXACT` and `MOVES`: these, and more.
"""

PERMUTES = _having("permutes")
"""Each element of its operand stands in its results once, unchanged."""

RESHAPES = _having("reshapes")
"""Gives the elements of its operand another shape, in the same order."""

PUTS_TOGETHER = _having("puts_together")
"""Its operands stand in its result beside each other."""

SLICES = _having("slices")
"""Each of its results is a part of its operand, told by where it starts and ends."""

PARTS = _having("parts")
"""A part of its result is computed of the same parts of its operands."""

WIDENED = _having("widened")
"""On TPUs its low operands are widened explicitly, or XLA:TPU transposes what follows."""

REPEATS = _having("repeats")
"""Linear; its cotangent is a sum over copies."""

SELECTS = _having("selects")
"""Its derivative asks again which values were chosen, and may sum over ties."""

# -- what it does to kept values and streams: decide, streams, carries, norms ----------------------

STAYS_KEPT = _having("stays_kept")
"""A value that is kept in float32 goes through it and is kept."""

ADDS = _having("adds")
"""Adds two values: a step of a solver, a branch of a residual stream."""

SCATTERS = _having("scatters")
"""Adds its third operand to parts of its first one, or takes it off."""

UPDATES = _having("updates")
"""Updates part of its first operand."""

JOINS = _having("joins")
"""Each value of its result is one of its operands', unchanged."""

LOGIC = _having("logic")
"""Joins booleans or bits."""

PICKS = _having("picks")
"""Takes rows that its other operands name."""

EXTREME = _having("extreme")
"""Gives values that it was given, the largest or the smallest."""

STATISTIC = _having("statistic")
"""Makes few numbers of many."""

OF_FEW = _having("of_few") | _having("fusible") - _having("statistic")
"""Each element of its result is made of one element, or a few, of its operands.

Of those at the same place, as by `exp`, or of another, as by `transpose`. Or it is a boolean.
"""

COMPLEX = _having("complex")
"""Parts of complex numbers, and numbers of their parts."""

ACROSS = _having("across")
"""Adds up what devices hold: on one device the same value."""

GATHERS = _having("gathers")
"""Joins what devices hold, along an axis or a new one."""

RUNNING = _having("running")
"""Adds up: its results are large beside what sets them apart, which rounding would lose."""

BENDS = _having("bends")
"""Bounded: forgets how large its operand was."""

SCALES = _having("scales")
"""Multiplies or divides."""

SHIFTS = _having("shifts")
"""Adds or subtracts as the author wrote it: `ADDS` has also what JAX adds up in a derivative."""

OF_NORMS = _having("of_norms")
"""Applied to a norm's result, it gives a value that still counts as normalised."""

TOTALS, OF_TOTALS = _having("totals"), _having("of_totals")
"""Operations that make the statistic of a norm, and those that combine statistics."""

# -- what its derivative keeps: linear, product ----------------------------------------------------

LINEAR = _having("linear")
"""Differentiating it keeps nothing in float32."""

TURNS = _having("turns")
"""May stand beside the product in the small function that is one product to its derivative."""

# -- how its result tells what is asked of its operands: reads -------------------------------------

UNFORGIVING = _having("unforgiving")
"""Amplifies what its operand was rounded by: factorisations, running sums, transforms."""

SOLVES = _having("solves")
"""Factorises a matrix or solves for one: its results are large where the matrix is nearly singular,
and what is made of them cancels.
"""

ABSOLUTE = _having("absolute")
"""Sensitive to absolute error: bfloat16 rounds 40.1 to 40, and sin(40.1) is not like sin(40)."""

DISTANCES = _having("distances")
"""Reads how far its operand is from 0, 1 or -1: `log` near 1, `acos` at both ends.

Or from an offset, which is taken off its results: `lgamma(z) - lgamma(z).mean(0)` of `z = 300 + y`.
"""

RELATIVE = _having("relative")
"""Reads a small value as exactly as a large one: a logarithm, a root."""

ANGLES = _having("angles")
"""Has a period, beside which a rounding may be large: `sin(300 + z)`, `(300 + z) % 24`."""

DECIDES = _having("decides")
"""Compares: rounded, values may be equal, or on the other side of a threshold."""

EQUALS = _having("equals")
"""Asks whether values are equal: rounded, different ones may be."""

SATURATES = _having("saturates")
"""Smooth in its operand, also where its result is close to a constant."""

HANDS_ON = _having("hands_on")
"""An output, or a float32 accumulator, that reads its result reads its operands."""

ACCUMULATES = _having("accumulates")
"""Puts its operands into what a loop may carry in float32."""

RESIZES = _having("resizes")
"""Its result has another size than its operand: a low copy of the whole is not worth it."""

POWERS = _having("powers")
"""A power of a sum, or a root: what was added, or cancels, goes through it."""

LIMITS = _having("limits")
"""Gives elements of several operands: what was added to one, or cancels, goes through it."""

POSITIVE = _having("positive")
"""Its result is 0 or more: the sum of two such cancels nothing."""

LOOKS = _having("looks")
"""Reads values and computes no float of them: a comparison, a print."""
