"""What each JAX operation does with a low-precision operand: a table, as data.

Four classes. *lower*: runs on low operands. *full*: reads float32, gives a float32 result.
*follow*: takes the dtype of its operands. *keep*: moves values without rounding any.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpjax._errors import message, nearest
from mpjax._foreign_names import PRIMITIVES


class OpClass(enum.Enum):
    """How autocast treats an operation."""

    LOWER = "lower"
    FULL = "full"
    FOLLOW = "follow"
    KEEP = "keep"


@dataclass(frozen=True)
class OpRule:
    """One row: the primitive, its class, why, and what PyTorch's autocast calls its list."""

    primitive: str
    op_class: OpClass
    reason: str
    torch: str = ""  # "lower", "fp32" or "promote"; empty where PyTorch lists no counterpart


_LOWER = """
dot_general            | matrix product: low operands, float32 accumulation | lower
conv_general_dilated   | convolution: low operands, float32 accumulation    | lower
ragged_dot_general     | grouped product: low operands, float32 accumulation | lower
"""

_FULL = """
exp                    | range: overflows float16 past 11                   | fp32
exp2                   | range: overflows float16 past 16                   |
expm1                  | range, and small results cancel                    | fp32
log                    | relative error of the result grows near 1          | fp32
log2                   | relative error of the result grows near 1          | fp32
log1p                  | relative error of the result near 0                | fp32
pow                    | the exponent multiplies the rounding error         | fp32
rsqrt                  | range: reciprocal of a small variance              | fp32
cbrt                   | derivative unbounded at 0                          |
sin                    | period: a rounded large argument is another angle  |
cos                    | period: a rounded large argument is another angle  |
tan                    | poles: the derivative is unbounded                 | fp32
asin                   | derivative unbounded at the ends                   | fp32
acos                   | derivative unbounded at the ends                   | fp32
atan                   | inverse: read in float32                           |
atan2                  | inverse: read in float32                           |
sinh                   | range: grows like exp                              | fp32
cosh                   | range: grows like exp                              | fp32
asinh                  | inverse: cancels near 0                            |
acosh                  | inverse: derivative unbounded at 1                 |
atanh                  | inverse: derivative unbounded at the ends          |
erf_inv                | derivative unbounded at the ends                   | fp32
erfc                   | relative error of the tail                         |
lgamma                 | range and cancellation                             |
digamma                | poles                                              |
polygamma              | poles                                              |
zeta                   | series: terms of differing magnitude               |
igamma                 | series: terms of differing magnitude               |
igammac                | series: terms of differing magnitude               |
igamma_grad_a          | series: terms of differing magnitude               |
random_gamma_grad      | series: terms of differing magnitude               |
regularized_incomplete_beta | series: terms of differing magnitude          |
bessel_i0e             | series: terms of differing magnitude               |
bessel_i1e             | series: terms of differing magnitude               |
one_minus_square       | cancellation near 1                                |
polynomial             | sum of terms of differing magnitude                |
reduce_sum             | a sum: rounding and range add up                   | fp32
reduce_prod            | a product: range                                   | fp32
reduce                 | its function is unknown: read in float32           |
reduce_window          | its function is unknown: read in float32           |
reduce_window_sum      | a sum: average pooling                             |
cumsum                 | a running sum                                      | fp32
cumprod                | a running product                                  | fp32
cumlogsumexp           | a running sum of exponentials                      |
scatter-add            | a sum over equal indices                           |
scatter-sub            | a sum over equal indices                           |
scatter-mul            | a product over equal indices                       |
select_and_gather_add  | pooling and its derivative                         |
select_and_scatter     | its function is unknown: read in float32           |
select_and_scatter_add | a sum: derivative of max pooling                   |
psum                   | a sum across devices                               |
psum_invariant         | a sum across devices                               |
reduce_scatter         | a sum across devices                               |
psum_scatter           | a sum across devices                               |
fft                    | a sum; no low kernels                              |
cholesky               | linear algebra: conditioning                       | fp32
eig                    | linear algebra: conditioning                       |
eigh                   | linear algebra: conditioning                       |
hessenberg             | linear algebra: conditioning                       |
householder_product    | linear algebra: conditioning                       |
lu                     | linear algebra: conditioning                       |
qr                     | linear algebra: conditioning                       |
geqrf                  | linear algebra: conditioning                       |
schur                  | linear algebra: conditioning                       |
svd                    | linear algebra: conditioning                       |
triangular_solve       | linear algebra: conditioning                       |
tridiagonal            | linear algebra: conditioning                       |
tridiagonal_solve      | linear algebra: conditioning                       |
custom_linear_solve    | linear algebra: conditioning                       |
nextafter              | the answer depends on the dtype                    |
complex                | complex numbers have float32 parts                 |
"""

_FOLLOW = """
add                    | one rounding                                       | promote
add_any                | one rounding: a sum of cotangents                  | promote
sub                    | one rounding                                       | promote
mul                    | one rounding                                       | promote
div                    | one rounding                                       | promote
rem                    | one rounding                                       |
max                    | exact                                              | promote
min                    | exact                                              | promote
select_n               | exact                                              | promote
clamp                  | exact                                              | promote
concatenate            | exact                                              | promote
stack                  | exact                                              | promote
dynamic_update_slice   | exact                                              |
scatter                | exact                                              |
scatter-max            | exact                                              |
scatter-min            | exact                                              |
pad                    | exact                                              |
sqrt                   | one rounding, halves the relative error            |
square                 | one rounding                                       |
integer_pow            | one rounding                                       | fp32
tanh                   | bounded, one rounding                              |
logistic               | bounded, one rounding                              |
erf                    | bounded, one rounding                              |
floor                  | integer-valued                                     |
ceil                   | integer-valued                                     |
round                  | integer-valued                                     |
"""

_KEEP = """
abs                    | exact                                              |
neg                    | exact                                              |
sign                   | exact                                              |
copy                   | exact                                              |
copy_p                 | exact                                              |
reshape                | moves values                                       |
squeeze                | moves values                                       |
expand_dims            | moves values                                       |
transpose              | moves values                                       |
rev                    | moves values                                       |
broadcast_in_dim       | repeats values                                     |
slice                  | picks values                                       |
dynamic_slice          | picks values                                       |
gather                 | picks values                                       |
split                  | picks values                                       |
unstack                | picks values                                       |
tile                   | repeats values                                     |
reduce_max             | picks a value                                      |
reduce_min             | picks a value                                      |
reduce_window_max      | picks a value                                      |
reduce_window_min      | picks a value                                      |
cummax                 | picks values                                       |
cummin                 | picks values                                       |
sort                   | moves values                                       |
top_k                  | picks values                                       |
approx_top_k           | picks values                                       |
stop_gradient          | the same value                                     |
name                   | the same value, named for a checkpoint policy      |
optimization_barrier   | the same values                                    |
sharding_constraint    | the same value, placed                             |
mesh_cast              | the same value, placed                             |
reshard                | the same value, placed                             |
pvary                  | the same value                                     |
pcast                  | the same value                                     |
device_put             | the same value, placed                             |
all_gather             | moves values across devices                        |
all_gather_invariant   | moves values across devices                        |
all_to_all             | moves values across devices                        |
ppermute               | moves values across devices                        |
pbroadcast             | moves values across devices                        |
pmax                   | picks a value across devices                       |
pmin                   | picks a value across devices                       |
"""

_ACTIVATIONS = """
celu elu gelu glu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid mish relu relu6
selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus swish
"""

_COMPARE = """
argmax argmin eq eq_to ne lt lt_to le le_to gt ge is_finite
"""

_STRUCTURE = """
call closed_call cond custom_jvp_call custom_vjp_call eval_jaxpr jit remat2 scan shard_map while
"""

_AS_TRACED = """
after_all and axis_index bitcast_convert_type call_hi_primitive clz conj convert_element_type
create_token custom_lin empty2 get imag iota not or population_count ragged_all_to_all random_bits
random_fold_in random_gamma random_seed random_split random_unwrap random_wrap real reduce_and
reduce_or reduce_precision reduce_xor rng_bit_generator rng_uniform shift_left
shift_right_arithmetic shift_right_logical swap threefry2x32 xor addupdate debug_callback
debug_print io_callback pure_callback ffi_call pallas_call dot_product_attention_fwd
"""


def _rows(text: str, op_class: OpClass) -> dict[str, OpRule]:
    rows: dict[str, OpRule] = {}
    for line in text.strip().splitlines():
        name, reason, torch = (part.strip() for part in line.split("|"))
        rows[name] = OpRule(name, op_class, reason, torch)
    return rows


OP_RULES: dict[str, OpRule] = {
    **_rows(_LOWER, OpClass.LOWER),
    **_rows(_FULL, OpClass.FULL),
    **_rows(_FOLLOW, OpClass.FOLLOW),
    **_rows(_KEEP, OpClass.KEEP),
}

PRODUCTS: frozenset[str] = frozenset(_rows(_LOWER, OpClass.LOWER))
"""What matrix units are for."""

ACTIVATIONS: frozenset[str] = frozenset(_ACTIVATIONS.split())
"""Functions taken as a whole: a low operand gives a low result, computed in float32 between."""

COMPARISONS: frozenset[str] = frozenset(_COMPARE.split())
"""Read values and give integers or booleans: computed in float32, where a low value is exact."""

STRUCTURE: frozenset[str] = frozenset(_STRUCTURE.split())
"""Hold programs: autocast goes inside."""

AS_TRACED: frozenset[str] = frozenset(_AS_TRACED.split())
"""Unknown on purpose: integers, random bits, effects, foreign kernels; get what they were given."""


def op_class(name: str, overrides: Mapping[str, OpClass]) -> OpClass | None:
    """Returns the class of a primitive, the user's choice first; None where there is none."""
    if name in overrides:
        return overrides[name]
    rule = OP_RULES.get(name)
    return rule.op_class if rule else None


def parse_rules(rules: str | Mapping[str, str] | None) -> tuple[dict[str, OpClass], bool]:
    """Returns autocast's `rules=` as classes by primitive, and whether float32 operands win.

    Raises:
      ValueError: a primitive or a class that is unknown; the message names the nearest.
    """
    if rules is None:
        return {}, False
    if isinstance(rules, str):
        if rules == "widest":
            return {}, True
        raise ValueError(
            message(
                "autocast(rules=)",
                f"unknown set of rules {rules!r}.",
                "Accepted: 'widest', or a dict of primitive and class.",
                'Type rules="widest", or for example rules={"tanh": "full"}.',
            )
        )
    if not isinstance(rules, Mapping):
        raise TypeError(
            message(
                "autocast(rules=)",
                f"got {rules!r}.",
                "Accepted: 'widest', or a dict of primitive and class.",
                'Type, for example, rules={"tanh": "full"}.',
            )
        )
    return {name: _override(name, word) for name, word in rules.items()}, False


def _override(name: str, word: str) -> OpClass:
    if name not in OP_RULES and name not in ACTIVATIONS:
        raise ValueError(_unknown(name))
    allowed = {c.value: c for c in OpClass}
    if not isinstance(word, str) or word not in allowed:
        raise ValueError(
            message(
                "autocast(rules=)",
                f"unknown class {word!r} for {name!r}.",
                "Accepted: 'lower', 'full', 'follow', 'keep'.",
                f'Type rules={{"{name}": "full"}} to compute it in float32.',
            )
        )
    given = OP_RULES[name].op_class if name in OP_RULES else OpClass.FOLLOW
    if word == "lower" and given is not OpClass.LOWER:
        raise ValueError(
            message(
                "autocast(rules=)",
                f"{name!r} cannot be 'lower'.",
                "Only products are: 'dot_general', 'conv_general_dilated', 'ragged_dot_general'.",
                f'Type rules={{"{name}": "follow"}} to let it take its operands\' dtype.',
            )
        )
    if word == "keep" and given is not OpClass.KEEP:
        return OpClass.FOLLOW
    return allowed[word]


def _unknown(name: Any) -> str:
    """Returns what is said of a rule for something that has none."""
    type_this = (
        "Type the name of an operation inside it, as jax.make_jaxpr prints it, or "
        "`with mpjax.full_precision():` around it."
    )
    if not isinstance(name, str):
        got, allowed = f"got {name!r} as a name.", "Accepted: the names of operations, as strings."
        type_this = 'Type, for example, rules={"tanh": "full"}.'
    elif name in STRUCTURE:
        got, allowed = f"{name!r} holds a program.", "Rules are for the operations in it."
    elif name in AS_TRACED:
        got, allowed = f"{name!r} has no class.", "It runs on what it was traced with."
    else:
        known = (*OP_RULES, *sorted(ACTIVATIONS))
        part = PRIMITIVES.get(name)
        close = ", ".join(map(repr, nearest(name, known))) or "'tanh', 'exp', 'dot_general'"
        got = f"unknown primitive {name!r}."
        allowed = f"It consists of others, such as {part!r}." if part else f"Nearest: {close}."
        type_this = "Type the name that jax.make_jaxpr prints; mpjax.explain lists them."
        if not part:
            own = "A function of your own has none: type `with mpjax.full_precision():` in it."
            type_this = f"{type_this} {own}"
    return message("autocast(rules=)", got, allowed, type_this)


def only_moves(eqn: Any) -> bool:
    """Whether an equation leaves values as they are: a reshape, a slice, a broadcast."""
    rule = OP_RULES.get(eqn.primitive.name)
    return rule is not None and rule.op_class is OpClass.KEEP
