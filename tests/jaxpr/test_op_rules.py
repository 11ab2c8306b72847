"""The table of operations: complete, in one place each, and open to the user's overrides."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from mpjax._autocast.known import traits
from mpjax._jaxpr import op_rules

_EXTENSIONS = ("flax", "equinox", "optax", "lineax", "optimistix", "diffrax")  # where installed
_PACKAGES = [p for p in ("jax", *_EXTENSIONS) if importlib.util.find_spec(p)]
# These occur only inside kernels (Pallas, Mosaic): no jaxpr that autocast traces has them.
_NAMES = """
_copysign all_reduce_ffs all_reduce_population_count async_copy_scales_to_tmem
async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem async_load async_prefetch
async_store_smem async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive
barrier_arrive_and_wait barrier_test barrier_wait bitcast broadcast_to commit_group commit_smem
commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem debug_barrier debug_barrier_p delay dma_start
dma_wait einshape_lo elementwise_inline_asm elementwise_inline_asm_p emit_pipeline
get_barrier_semaphore get_global griddepcontrol_launch_dependents griddepcontrol_wait inline_mgpu
inline_mgpu_p jaxpr_call layout_cast load masked_cummax masked_cummin masked_cumsum masked_load
masked_sort masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs
max_contiguous mgpu_atomic_store mma mosaic_gpu_p mosaic_gpu_reduce_max mosaic_gpu_reduce_min
mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum multimem_load_reduce multimem_store multiple_of
num_programs pack pack_dtype pack_elementwise parallel_loop pipeline_body print_layout prng_join
prng_random_bits prng_seed prng_split program_id program_order query_cluster_cancel reciprocal
relayout roll run_scoped sc_fetch_and_add scan_count semaphore_read semaphore_signal
semaphore_signal_multicast semaphore_signal_parallel semaphore_wait set_max_registers
set_max_registers_p stochastic_round store tcgen05_commit_arrive tcgen05_mma thunky.all_gather
thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start thunky.call_jax
thunky.call_thunky_nested thunky.collective_group thunky.collective_permute thunky.cond thunky.copy
thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero thunky.ptx_kernel
thunky.reduce_scatter thunky.while try_cluster_cancel unpack unpack_dtype unpack_elementwise
wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref
wgmma_accumulator_deref_p wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
"""
_IN_KERNELS = frozenset(_NAMES.split())


@functools.cache
def every_primitive():
    """The names of all that JAX, and those who extend it, can bind; in a process of its own."""
    script = pathlib.Path(__file__).with_name("_all_primitives.py")
    command = [sys.executable, str(script), *_PACKAGES]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def unknown(rules=op_rules.OP_RULES):
    known = (
        rules.keys() | op_rules.COMPARISONS | op_rules.STRUCTURE | op_rules.AS_TRACED | _IN_KERNELS
    )
    return sorted(name for name in every_primitive() if name not in known)


def test_every_primitive_that_can_be_bound_has_a_rule_or_is_unknown_on_purpose():
    assert {"dot_general", "pallas_call", "bcoo_dot_general"} <= set(every_primitive())
    assert unknown() == [], "give each a row in _jaxpr/op_rules.py, or its name here"


def test_the_completeness_test_sees_a_missing_row():
    assert unknown(
        {name: op_rules.OP_RULES[name] for name in op_rules.OP_RULES if name != "tanh"}
    ) == ["tanh"]


# Each has a kernel of its own, and a sum or a function that no trait tells.
_WITHOUT_TRAITS = """
polynomial reduce reduce_window reduce_window_sum
select_and_gather_add select_and_scatter select_and_scatter_add
"""


def test_every_operation_that_computes_has_a_row_of_traits():
    computing = (op_rules.OpClass.FULL, op_rules.OpClass.FOLLOW)
    asked = {name for name, rule in op_rules.OP_RULES.items() if rule.op_class in computing}
    told = {name for names, _ in traits._ROWS for name in names}
    missing = asked - told - {*_WITHOUT_TRAITS.split()}
    assert missing == set(), "give each a row in _autocast/known/traits.py: its docstring says how"


def test_no_primitive_stands_in_two_places():
    places = [
        op_rules.OP_RULES.keys(),
        op_rules.COMPARISONS,
        op_rules.STRUCTURE,
        op_rules.AS_TRACED,
        _IN_KERNELS,
    ]
    names = [name for place in places for name in place]
    assert len(names) == len(set(names))


def test_every_trait_is_of_operations_with_a_rule_that_stand_in_one_row_each():
    names = [name for names, _ in traits._ROWS for name in names]
    assert len(names) == len(set(names))
    assert [
        n
        for n in names
        if n not in op_rules.OP_RULES.keys() | op_rules.COMPARISONS | op_rules.AS_TRACED
    ] == []


def test_every_word_of_the_table_is_a_trait_that_is_asked_for():
    words = {word for _, words in traits._ROWS for word in words}
    folder = pathlib.Path(traits.__file__).parents[1]
    asked = "".join(p.read_text() for p in folder.rglob("*.py") if p.name != "traits.py")
    assert [w for w in sorted(words) if f"traits.{w.upper()}" not in asked] == []
    constants = {name: found for name, found in vars(traits).items() if name.isupper()}
    assert {name for name in constants if not name.startswith("_")} == {w.upper() for w in words}


@pytest.mark.parametrize("rule", op_rules.OP_RULES.values(), ids=lambda rule: rule.primitive)
def test_every_row_has_a_reason_and_a_known_torch_list(rule):
    assert rule.reason
    assert rule.torch in ("", "lower", "fp32", "promote")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dot_general", op_rules.OpClass.LOWER),
        ("conv_general_dilated", op_rules.OpClass.LOWER),
        ("exp", op_rules.OpClass.FULL),
        ("reduce_sum", op_rules.OpClass.FULL),
        ("cholesky", op_rules.OpClass.FULL),
        ("add", op_rules.OpClass.FOLLOW),
        ("tanh", op_rules.OpClass.FOLLOW),
        ("reshape", op_rules.OpClass.KEEP),
        ("reduce_max", op_rules.OpClass.KEEP),
    ],
)
def test_classes_of_the_common_operations(name, expected):
    assert op_rules.op_class(name, {}) is expected
    assert op_rules.op_class(name, {name: op_rules.OpClass.FULL}) is op_rules.OpClass.FULL


def test_what_only_chooses_gives_the_same_result_by_its_rule_too():
    same = op_rules.EXACT | op_rules.MOVES | op_rules.COMPARISONS | traits.LOGIC
    assert traits.CHOOSES - same == set()
