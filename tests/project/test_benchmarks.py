"""The benchmarks measure what they say: networks, counts, and the files they write."""

import jax
import jax.numpy as jnp
import pytest
from _hinted import hints
from _hlo_text import LOOP, parsed

import mpjax
from benchmarks.measure import compiled, hbm, jaxprs, prefetches, slices, tables, targets
from benchmarks.measure.store import Store
from benchmarks.networks import NETWORKS

names = pytest.mark.parametrize("name", NETWORKS)
# Of each way to write a network one; CI's stage `fuzz` takes the rest.
OFTEN = ("mlp", "llama", "unet", "gru", "graph", "bert")


@pytest.mark.sampled(3)
@names
def test_plain_networks_are_float32_without_a_cast(name):
    network = NETWORKS[name]("tiny")
    assert jaxprs.converts(network.loss, network.params, network.batch) == 0


@pytest.mark.standard_promotion("Flax's norms promote bfloat16 to float32 by promote_types")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.slow]) for n in NETWORKS]
)
def test_networks_cast_by_hand_are_low_inside_and_float32_outside(name):
    network = NETWORKS[name]("tiny")
    step = jax.value_and_grad(network.hand_cast(jnp.bfloat16))
    loss, grads = jax.eval_shape(step, network.params, network.batch)
    assert {x.dtype for x in jax.tree.leaves((loss, grads))} == {jnp.dtype("float32")}
    plain = jaxprs.residuals(network.loss, network.params, network.batch)
    low = jaxprs.residuals(network.hand_cast(jnp.bfloat16), network.params, network.batch)
    assert low.activations < plain.activations
    assert low.weights > plain.weights


def test_residuals_leave_inputs_out_and_weights_apart():
    def loss(params, x):
        hidden = jnp.sin(x @ params["a"])  # keeps its cosine, f32[8,4]; x is an input
        low = hidden.astype(jnp.bfloat16) @ params["b"].astype(jnp.bfloat16)  # bf16[8,4], bf16[4,2]
        return jnp.sum(low.astype(jnp.float32))

    f32 = jnp.float32
    params = {"a": jax.ShapeDtypeStruct((16, 4), f32), "b": jax.ShapeDtypeStruct((4, 2), f32)}
    found = jaxprs.residuals(loss, params, jax.ShapeDtypeStruct((8, 16), f32))
    assert found == jaxprs.Residuals(activations=8 * 4 * 4 + 8 * 4 * 2, weights=4 * 2 * 2)


@pytest.mark.ci
def test_most_of_what_a_transformer_keeps_is_no_operand_that_8_bits_could_shrink():
    """The shares in docs/eight_bits.md: attention's logits and weights, the vocabulary's logits."""
    network = NETWORKS["transformer"]("full")
    loss = mpjax.autocast(network.loss, "float8_from_mixed_bfloat16")
    with hints.without("attended"):  # as XLA runs attention
        kept = jax.eval_shape(lambda p, b: jax.vjp(loss, p, b)[1], network.params, network.batch)
        total = jaxprs.residuals(loss, network.params, network.batch).activations
    low = [x for x in jax.tree.leaves(kept) if x.dtype == jnp.bfloat16]
    in_attention = 2 * sum(x.size for x in low if x.shape[-2:] == (1024, 1024))
    of_vocabulary = 2 * sum(x.size for x in low if x.shape[-1] == 32000 and x.ndim == 3)
    assert (round(100 * in_attention / total), round(100 * of_vocabulary / total)) == (61, 7)


def test_residuals_of_a_carry_that_starts_constant_depend_on_the_batch():
    def loss(w, xs):
        def step(carry, x):
            return jnp.sin(carry * w) + x, None  # keeps the carry and the cosine

        return jax.lax.scan(step, jnp.float32(0), xs)[0]

    spec = jax.ShapeDtypeStruct
    found = jaxprs.residuals(loss, spec((), jnp.float32), spec((10,), jnp.float32))
    assert found == jaxprs.Residuals(activations=2 * 10 * 4, weights=0)


@pytest.mark.parametrize("nested", [False, True])
def test_loops_cost_their_body_as_often_as_it_runs(nested):
    def repeat(fun, turns):
        return lambda w, x: jax.lax.scan(lambda c, _: (fun(w, c), None), x, None, turns)[0]

    def product(w, x):
        return jnp.tanh(x @ w)

    once = repeat(repeat(product, 4), 5) if nested else repeat(product, 20)
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = compiled.compile_for(once, targets.get_target("cpu"), spec, spec)
    products = 20 * 2 * 64**3
    assert products <= found.flops <= 1.05 * products  # tanh and the counter add a little


STACKED = """HloModule m, is_scheduled=true

%fused (stack: f32[8,64,64], index: s32[]) -> f32[1,4096] {
  %stack = f32[8,64,64]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = f32[8,4096]{1,0} bitcast(%stack)
  ROOT %row = f32[1,4096]{1,0} dynamic-slice(%flat, %index, %zero), dynamic_slice_sizes={1,4096}
}

ENTRY %main (stack: f32[8,64,64], index: s32[]) -> f32[1,4096] {
  %stack = f32[8,64,64]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  ROOT %row = f32[1,4096]{1,0} fusion(%stack, %index), kind=kLoop, calls=%fused
}
"""


def test_a_stack_under_another_shape_is_read_as_its_slice():
    module = parsed(STACKED)
    assert slices.counted_in_vain(module, module.entry) == 7 * 4096 * 4
    both = STACKED.replace("ROOT %row = f32[1,4096]{1,0} dyn", "%part = f32[1,4096]{1,0} dyn")
    both = both.replace("-> f32[1,4096]", "-> f32[8,4096]").replace(
        "= f32[1,4096]{1,0} f", "= f32[8,4096]{1,0} f"
    )
    both = both.replace("4096}\n}", "4096}\n  ROOT %all = f32[8,4096]{1,0} negate(%flat)\n}", 1)
    module = parsed(both)
    assert slices.counted_in_vain(module, module.entry) == 0  # all of it is read too


def test_what_no_turn_of_a_loop_reads_is_taken_off_for_each(monkeypatch):
    def turns(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x + w), None), x, ws)[0]

    spec = jax.ShapeDtypeStruct
    args = spec((10, 64), jnp.float32), spec((64,), jnp.float32)
    all_of_it = compiled.compile_for(turns, targets.get_target("cpu"), *args).bytes_accessed
    monkeypatch.setattr(slices, "counted_in_vain", lambda *_: 3.0)
    found = compiled.compile_for(turns, targets.get_target("cpu"), *args).bytes_accessed
    assert found is None or all_of_it - found == 10 * 3


PREFETCHED = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[64,8], y: f32[64,8]) -> f32[64,8] {
  %x = f32[64,8]{1,0:T(8,128)} parameter(0)
  %y = f32[64,8]{1,0:T(8,128)} parameter(1)
  %slice-start = ((f32[64,8]{1,0}), f32[32,8]{1,0:S(1)}, s32[]) slice-start(%x), slice={[0:32]}
  %slice-start.1 = ((f32[64,8]{1,0}), f32[32,8]{1,0:S(1)}, s32[]) slice-start(%x), slice={[32:64]}
  %copy-start = (f32[64,8]{1,0:S(1)}, f32[64,8]{1,0}, u32[]{:S(2)}) copy-start(%y)
  %slice-done = f32[32,8]{1,0:S(1)} slice-done(%slice-start)
  %slice-done.1 = f32[32,8]{1,0:S(1)} slice-done(%slice-start.1)
  %both = f32[64,8]{1,0:S(1)} custom-call(%slice-done, %slice-done.1), custom_call_target="ConcatBitcast"
  %copy-done = f32[64,8]{1,0:S(1)} copy-done(%copy-start)
  ROOT %sum = f32[64,8]{1,0} add(%both, %copy-done)
}
"""  # noqa: E501


def test_what_a_tpu_moves_ahead_is_no_operand_of_its_own():
    text = prefetches.without(PREFETCHED)
    found = [line.split(" = ")[1].split("}")[-1] for line in text.splitlines() if " = " in line]
    assert found == [" parameter(0)", " parameter(1)", " bitcast(%x)", " bitcast(%y)"] + [
        " add(%both, %copy-done)"
    ]
    cost = compiled.module_cost(text)
    assert cost is None or cost["bytes accessed"] == 3 * 64 * 8 * 4
    other = PREFETCHED.replace(
        "slice-start(%x), slice={[32:64]}", "slice-start(%y), slice={[32:64]}"
    )
    with pytest.raises(ValueError, match="parts of several arrays"):
        prefetches.without(other)


def test_a_slice_that_a_tpu_moves_ahead_and_reads_by_itself_is_no_operand_of_its_own():
    text = PREFETCHED.replace("f32[64,8] {", "f32[32,8] {").replace(
        "%sum = f32[64,8]{1,0} add(%both, %copy-done)",
        "%sum = f32[32,8]{1,0} add(%slice-done, %slice-done.1)",
    )
    text = prefetches.without(text)
    assert text.count("bitcast(%x)") == 3  # both slices, and both together
    assert "slice-" not in text.replace("%slice-done", "")
    cost = compiled.module_cost(text)
    assert cost is None or cost["bytes accessed"] == 3 * 32 * 8 * 4


def test_only_what_lies_in_hbm_is_traffic_and_a_slice_is_a_slice():
    assert hbm.traffic(parsed(PREFETCHED)) == 3 * 64 * 8 * 4  # x in halves, y, and the sum
    on_chip = PREFETCHED.replace("ROOT %sum = f32[64,8]{1,0}", "ROOT %sum = f32[64,8]{1,0:S(1)}")
    assert hbm.traffic(parsed(on_chip)) == 2 * 64 * 8 * 4
    assert hbm.traffic(parsed(LOOP)) is None


def test_a_later_run_renews_its_rows_and_keeps_the_rest(tmp_path):
    path = tmp_path / "found.json"
    first, second = (("errors", "cpu", "bf16", "tiny", name, "f32") for name in ("mlp", "lstm"))
    for error in (1.0, 2.0):
        store = Store.read(path)
        store.begin(command=f"run {error}")
        store.put(*first, error=error)
        if error == 1.0:
            store.put(*second, error=error)
    store = Store.read(path)
    assert [(row["error"], row["run"]) for row in store.part("errors")] == [(2.0, 2), (1.0, 1)]
    assert [run["command"] for _, run in store.used_runs()] == ["run 1.0", "run 2.0"]
    store.drop("errors", "cpu", "bf16", "tiny", "mlp")
    assert [row["network"] for row in store.part("errors")] == ["lstm"]


def test_errors_are_paired_over_the_seeds_that_both_rows_have(tmp_path):
    store = Store.read(tmp_path / "found.json")
    store.begin(command="a run that renewed one row with more seeds")
    store.put("errors", "cpu", "bf16", "tiny", "mlp", "hand-cast", errors=[1.0, 2.0, 99.0])
    store.put("errors", "cpu", "bf16", "tiny", "mlp", "autocast", errors=[2.0, 4.0])
    (table,) = tables.grids(store)
    assert "| mlp | autocast | 3.00e+00 | 2.000 ± 0.000 |" in table.markdown()
