"""The table of JAX's operations: each in one of four classes, by the dtypes that it runs in.

*lower*: reads low operands (`dot_general`). *full*: reads float32 and gives float32 (`exp`).
*follow*: computes in the dtype of its operands (`add`). *keep*: moves values and rounds none
(`reshape`). The reason "exact" is read by the code (`EXACT`): write it only where low operands give
the result of float32.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpjax._base.errors import message, nearest
from mpjax._base.foreign_names import PRIMITIVES
from mpjax._jaxpr.equation import Eqn


class OpClass(enum.Enum):
    """The class of an operation: see the module."""

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
unreduced_psum         | a sum across devices                               |
unreduced_reduce_scatter | a sum across devices                             |
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
cholesky_update        | linear algebra: conditioning                       |
geqp3                  | linear algebra: conditioning                       |
ormqr                  | linear algebra: conditioning                       |
symmetric_product      | linear algebra: conditioning                       |
spsolve                | linear algebra: conditioning                       |
linear_solve           | linear algebra: conditioning                       |
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
layout_constraint      | the same value, laid out                           |
with_memory_space_constraint | the same value, placed                       |
xla_metadata_value     | the same value, marked                             |
vary_unreduced_cast    | the same value                                     |
reduced_vary_cast      | the same value                                     |
vary_unreduced_cast_p  | the same value                                     |
reduced_vary_cast_p    | the same value                                     |
shard_alike            | the same values, placed alike                      |
preduced               | the same value                                     |
nonbatchable           | the same value                                     |
nondifferentiable_backward | the same value                                 |
pvary                  | the same value                                     |
pcast                  | the same value                                     |
device_put             | the same value, placed                             |
all_gather             | moves values across devices                        |
all_gather_invariant   | moves values across devices                        |
all_gather_reduced     | moves values across devices                        |
all_to_all             | moves values across devices                        |
ppermute               | moves values across devices                        |
pbroadcast             | moves values across devices                        |
pmax                   | picks a value across devices                       |
pmin                   | picks a value across devices                       |
unreduced_pmax         | picks a value across devices                       |
unreduced_pmin         | picks a value across devices                       |
"""

_ACTIVATIONS = """
celu elu gelu glu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid mish relu relu6
selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus swish
"""

_COMPARE = """
argmax argmin eq eq_to ne lt lt_to le le_to gt ge is_finite
"""

_STRUCTURE = """
call call_hi_primitive closed_call composite compute_on cond custom_jvp_call custom_partitioning
custom_vjp_call custom_vmap_call eval_jaxpr jit linear_call remat2 remat_opt scan shard_map while
xla_metadata_call
"""

# These make, read or mark values and do no arithmetic on floats: `explain` has no row for them.
_SILENT = """
accum_grad_in_ref add_dependency addupdate after_all and announce_jaxpr assert_consumed_value
axis_index bitcast_convert_type box_get box_set check clz conj consume convert_element_type
create_linear create_token custom_lin dce_sink debug_callback debug_print dequantized dim_as_value
dimension_size empty empty2 empty_ref free_ref freeze from_edtype get get_variable has_memory_space
imag inspect_sharding iota iota_2x32_shape log_extend log_read lu_pivots_to_permutation maybe_set
mulhi new_box new_log new_ref new_variable not or philox2x32 philox4x32 pin platform_index
population_count random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap real reduce_and reduce_or reduce_precision reduce_xor rng_bit_generator
rng_uniform select_if_vmap set_variable shape_assertion shift_left shift_right_arithmetic
shift_right_logical stage swap threefry2x32 threefry4x32 tie to_edtype trace_value unpin unreachable
unvmap_all unvmap_any unvmap_max xor zeros_like
"""

# Kernels of other libraries, calls to the host, programs that autocast cannot enter: a row says so.
_OPAQUE = """
all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start
bcoo_broadcast_in_dim bcoo_concatenate bcoo_dot_general bcoo_dot_general_sampled bcoo_extract
bcoo_fromdense bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense buffer_callback call_exported
call_hi_primitive_linearized coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense
core_map csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense cudnn_fusion
custom_fusion custom_jvp_call_jaxpr dot_product_attention_bwd dot_product_attention_bwd_wrapper
dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper
ffi_call fused_call fusible global_array_to_host_local_array host_local_array_to_global_array
io_callback mpmd_map noinline nontraceable pallas_call pbroadcast_done pbroadcast_dynamic
pbroadcast_start ppermute_done ppermute_start precv psend psum_done psum_invariant_start psum_start
pure_callback ragged_all_to_all reduce_scatter_done reduce_scatter_start remove_memory_space rnn_bwd
rnn_fwd run_state scaled_dot scaled_matmul scaled_matmul_wrapper todense tpu_custom_call unique
unreduced_psum_start unreduced_reduce_scatter_start vprim
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
"""Products that matrix units compute."""

MOVES: frozenset[str] = frozenset(_rows(_KEEP, OpClass.KEEP))
"""Operations that leave the values of elements as they are."""

EXACT: frozenset[str] = frozenset(n for n, rule in OP_RULES.items() if rule.reason == "exact")
"""Operations that give the same result on low operands as on float32.

`explain` says so of one that runs alone on low values; moves, which give it too, have reasons of
their own. What whole functions on low values consist of is `known/traits.CHOOSES`.
"""

ACTIVATIONS: frozenset[str] = frozenset(_ACTIVATIONS.split())
"""Functions that count as one operation: low operand, low result, float32 between them."""

COMPARISONS: frozenset[str] = frozenset(_COMPARE.split())
"""Operations whose results are integers or booleans. They read float32, into which a low value
widens exactly."""

STRUCTURE: frozenset[str] = frozenset(_STRUCTURE.split())
"""Operations with programs inside, which autocast enters."""

SILENT: frozenset[str] = frozenset(_SILENT.split())
"""Operations on integers, random bits, references and effects: they read what they were traced
on."""

AS_TRACED: frozenset[str] = SILENT | frozenset(_OPAQUE.split())
"""Operations without a class on purpose: silent ones and foreign kernels. They read what they were
traced on."""


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
        raise ValueError(
            message(
                "autocast(rules=)",
                f"{name!r} cannot be 'keep': it computes.",
                "Only what moves values is, such as a reshape.",
                f'Type rules={{"{name}": "follow"}} to let it take its operands\' dtype.',
            )
        )
    return allowed[word]


def _unknown(name: Any) -> str:
    """Returns the message about a rule for a name that can have none."""
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


def only_moves(eqn: Eqn) -> bool:
    """Whether an equation leaves the values of elements as they are: a reshape, a slice."""
    return eqn.primitive.name in MOVES


def has_effects(eqn: Eqn) -> bool:
    """Whether an equation does more than compute: one that JAX marks, such as a print.

    Of a collective, the mark only names the axis of devices.
    """
    return bool(eqn.effects) and eqn.primitive.name not in OP_RULES


def hands_on_each(eqn: Eqn, *, sorts: bool = False) -> bool:
    """Whether each result is made of one operand: a barrier, a collective of several arrays.

    Args:
      eqn: the equation.
      sorts: whether to count a sort of several arrays: the first say where the elements of all go.
    """
    count = len(eqn.outvars)
    if not (only_moves(eqn) and len(eqn.invars) == count > 1):
        return False
    return sorts or eqn.primitive.name != "sort"
