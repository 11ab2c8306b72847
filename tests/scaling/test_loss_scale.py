"""Loss scales: every field survives, scaling is exact, and no sequence leads to 0, inf or NaN."""

import copy
import dataclasses
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _helpers import bits, count_casts
from _optimizers import through_orbax
from flax.training.dynamic_scale import DynamicScale
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import mpjax
from mpjax.testing import assert_bitwise_equal, assert_one_compilation

DYNAMIC = {
    "loss_scale": 512.0,
    "counter": 3,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_loss_scale": 128.0,
    "max_loss_scale": 4096.0,
}
FIELDS = tuple(DYNAMIC)
LARGEST, SMALLEST = 2.0**126, 2.0**-126


def off_default(**changes):
    return mpjax.DynamicLossScale(**{**DYNAMIC, **changes})


def values_of(ls):
    return {field: float(getattr(ls, field)) for field in FIELDS}


def run(ls, flags):
    """Returns the scale and counter after each step, the steps taken in one jitted scan."""

    scales, counters = run_scan(ls, jnp.array(flags))
    return list(zip(scales.tolist(), counters.tolist(), strict=True))


@jax.jit
def run_scan(ls, flags):
    def body(ls, finite):
        ls = ls.adjust(finite)
        return ls, (ls.loss_scale, ls.counter)

    return jax.lax.scan(body, ls, flags)[1]


run_all = jax.jit(jax.vmap(run_scan))


# -- law 4: every field, off its default, survives ------------------------------------------------


ROUTES = {
    "jit": lambda ls: jax.jit(lambda x: x)(ls),
    "scan": lambda ls: jax.lax.scan(lambda c, _: (c, None), ls, None, length=3)[0],
    "while_loop": lambda ls: jax.lax.while_loop(
        lambda c: c[1] < 2, lambda c: (c[0], c[1] + 1), (ls, 0)
    )[0],
    "cond": lambda ls: jax.lax.cond(jnp.array(True), lambda x: x, lambda x: x, ls),
    "vmap": lambda ls: jax.tree.map(
        lambda x: x[1], jax.vmap(lambda x: x)(jax.tree.map(lambda x: jnp.stack([x, x]), ls))
    ),
    "tree.map": lambda ls: jax.tree.map(lambda x: x, ls),
    "flatten": lambda ls: jax.tree.unflatten(jax.tree.structure(ls), jax.tree.leaves(ls)),
    "pickle": lambda ls: pickle.loads(pickle.dumps(ls)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "device_get": lambda ls: jax.device_put(jax.device_get(ls)),
    "eval_shape": lambda ls: jax.tree.map(
        lambda s, x: jnp.asarray(x, s.dtype), jax.eval_shape(lambda x: x, ls), ls
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ls", [off_default(), mpjax.StaticLossScale(48.0)], ids=repr)
def test_law_04_every_field_survives(route, ls):
    got = ROUTES[route](ls)
    assert type(got) is type(ls)
    assert_bitwise_equal(got, ls)


@pytest.mark.parametrize("ls", [off_default(), mpjax.StaticLossScale(48.0)], ids=repr)
def test_law_04_every_field_survives_a_checkpoint(ls, tmp_path):
    got = through_orbax({"ls": ls}, {"ls": jax.tree.map(jnp.zeros_like, ls)}, tmp_path)["ls"]
    assert type(got) is type(ls)
    assert_bitwise_equal(got, ls)


def test_law_04_every_field_is_a_leaf_off_its_default():
    default = values_of(mpjax.DynamicLossScale())
    assert all(default[field] != value for field, value in DYNAMIC.items())
    assert values_of(off_default()) == DYNAMIC
    assert len(jax.tree.leaves(off_default())) == len(FIELDS)


@pytest.mark.parametrize("finite", [True, False])
def test_law_04_adjust_keeps_the_configuration(finite):
    after = values_of(jax.jit(lambda ls: ls.adjust(finite))(off_default()))
    for field in FIELDS[2:]:
        assert after[field] == DYNAMIC[field]


def test_law_04_floor_holds_after_jit():
    # jmp's pytree drops min_loss_scale: its floor is 1 after one jit.
    ls = jax.jit(lambda x: x)(mpjax.DynamicLossScale(512, min_loss_scale=128))
    assert [s for s, _ in run(ls, [False] * 4)] == [256, 128, 128, 128]


def test_law_04_fields_are_strongly_typed_scalars():
    restored = jax.tree.map(float, off_default())
    for ls in (off_default(), off_default().adjust(True), restored.adjust(True)):
        for field in FIELDS:
            leaf = getattr(ls, field)
            integer = field in ("counter", "growth_interval")
            assert leaf.dtype == (jnp.int32 if integer else jnp.float32)
            assert leaf.shape == ()
            assert not leaf.weak_type


def test_keys_of_leaves_are_the_names_of_fields():
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path({"ls": off_default()})]
    assert [jax.tree_util.keystr(p) for p in paths] == [f"['ls'].{field}" for field in FIELDS]


# -- law 5: scaling is exact ---------------------------------------------------------------------

MAX = float(np.finfo(np.float32).max)


floats = st.floats(width=32, allow_subnormal=False, allow_nan=False)
round_trip = jax.jit(lambda ls, x: (ls.scale(x), ls.unscale(ls.scale(x))))


@settings(max_examples=50)
@given(arrays(np.float32, 64, elements=floats), st.integers(-126, 126))
def test_law_05_round_trip_is_exact_for_powers_of_two(x, exponent):
    want = x.astype(np.float64) * 2.0**exponent  # exact in float64
    size = np.abs(want)
    # What leaves the normal range of float32 is left out: CPUs flush there, and beyond it is inf.
    x = np.where((size == 0) | np.isinf(size) | ((size >= SMALLEST) & (size <= MAX)), x, 0)
    scaled, back = round_trip(mpjax.StaticLossScale(2.0**exponent), x)
    assert bits(back) == bits(x)
    np.testing.assert_array_equal(scaled, np.where(x == 0, x, want))


@pytest.mark.parametrize("exponent", [-126, -1, 0, 15, 24, 126])
def test_law_05_round_trip_is_exact_under_jit(exponent):
    # XLA may turn a division into a multiplication: exact as long as the reciprocal is normal.
    ls = mpjax.StaticLossScale(2.0**exponent)
    mantissas = np.random.default_rng(0).uniform(1, 2, 1000).astype(np.float32)
    x = jnp.asarray(mantissas * np.float32(2.0 ** -(exponent // 2)))
    for transform in (jax.jit, lambda f: f):
        assert bits(transform(lambda ls, x: ls.unscale(ls.scale(x)))(ls, x)) == bits(x)
        assert bits(transform(lambda x, ls=ls: ls.unscale(ls.scale(x)))(x)) == bits(x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_law_05_every_16_bit_value_round_trips_through_float32(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    exponents = (-24, -1, 15, 24) if dtype == jnp.float16 else (0,)  # bfloat16 spans float32
    for exponent in exponents:
        _, back = round_trip(mpjax.StaticLossScale(2.0**exponent), values)
        assert back.dtype == jnp.float32
        normal = np.abs(values.astype(np.float32)) >= SMALLEST
        assert bits(np.asarray(back).astype(dtype)[normal]) == bits(values[normal])


def test_law_05_loss_is_scaled_in_float32():
    scaled = mpjax.StaticLossScale(65536).scale(jnp.float16(3.0))
    assert (float(scaled), scaled.dtype) == (196608.0, jnp.float32)


def test_law_05_unscaling_brings_back_what_float16_cannot_hold():
    # 1e-4 × 1e-4 vanishes in float16; scaled by 1024 the product comes back as 1.0012e-8.
    a = jnp.float16(1e-4)
    assert a * a == 0
    ls = mpjax.StaticLossScale(1024)
    scaled = jnp.float16(ls.scale(a)) * a
    assert abs(float(ls.unscale(scaled)) - 1.0012e-8) < 1e-12


@pytest.mark.parametrize("method", ["scale", "unscale"])
@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (jnp.float16(2), "float32"),
        (jnp.bfloat16(2), "float32"),
        (jnp.float32(2), "float32"),
        (np.float32(2), "float32"),
        (np.float64(2), "float32"),  # what it is to JAX with 64-bit types off
        (np.ones(2), "float32"),
        (2.0, "float32"),
        (jnp.complex64(2), "complex64"),
        (np.complex128(2), "complex64"),
        (2j, "complex64"),
    ],
)
def test_law_05_dtypes_of_scaled_values(method, x, dtype):
    factor = 8.0 if method == "scale" else 0.125
    for ls in (mpjax.StaticLossScale(8), mpjax.DynamicLossScale(8)):
        got = getattr(ls, method)([x])[0]
        assert got.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(got, np.asarray(x).astype(dtype) * factor)


def test_law_05_float64_and_complex128_keep_their_precision():
    with jax.enable_x64(True):
        third = jnp.float64(1) / 3
        got = mpjax.StaticLossScale(8).unscale({"r": third, "c": jax.lax.complex(third, third)})
        assert (got["r"].dtype, got["c"].dtype) == (jnp.float64, jnp.complex128)
        assert float(got["r"]) == (1 / 3) / 8


@pytest.mark.parametrize("exponent", [-120, -70, 70, 120])
def test_law_05_complex_round_trip_does_not_square_the_scale(exponent):
    ls = mpjax.StaticLossScale(2.0**exponent)
    x = jnp.array([1 + 2j, -0.75 + 0.5j, -3j], jnp.complex64)
    assert bits(ls.unscale(ls.scale(x))) == bits(x)


@pytest.mark.parametrize(
    "x",
    [3, True, None, "s", jnp.arange(2), jnp.ones(1, jnp.float8_e4m3fn), jax.random.key(0)],
    ids=str,
)
def test_what_is_not_floating_is_not_scaled(x):
    for ls in (mpjax.StaticLossScale(8), mpjax.NoOpLossScale()):
        assert ls.scale([x])[0] is x
        assert ls.unscale([x])[0] is x


def test_gradients_of_integers_are_not_scaled():
    zero = np.zeros(2, jax.dtypes.float0)
    assert mpjax.StaticLossScale(8).unscale(zero) is zero


@pytest.mark.parametrize("route", ["jit", "tree.map", "pickle", "copy", "deepcopy"])
def test_no_op_survives_too(route):
    assert ROUTES[route](mpjax.NoOpLossScale()) == mpjax.NoOpLossScale()


def test_no_op_leaves_no_operation():
    ls = mpjax.NoOpLossScale()
    tree = {"w": jnp.ones(2, jnp.float16)}
    assert ls.scale(tree) is tree
    assert ls.unscale(tree) is tree
    assert ls.adjust(False) is ls
    assert ls.loss_scale == 1
    assert jax.tree.leaves(ls) == []
    assert ls == mpjax.NoOpLossScale()
    assert hash(ls) == hash(mpjax.NoOpLossScale())


def test_static_never_adjusts():
    ls = mpjax.StaticLossScale(8)
    assert ls.adjust(False) is ls
    assert count_casts(ls.scale, jnp.ones(2)) == 0


# -- law 7: the update rule ----------------------------------------------------------------------


# Fields, whether each step was finite, and the scale and the counter after each.
TRAJECTORIES = [
    ((4, {"backoff_factor": 0.25, "growth_interval": 2}), "yyn", [(4, 1), (8, 0), (2, 0)]),
    ((128, {"growth_interval": 1}), "yyny", [(256, 0), (512, 0), (256, 0), (512, 0)]),
    ((2.0**16, {}), "nnn", [(32768, 0), (16384, 0), (8192, 0)]),
    ((512, {"min_loss_scale": 128}), "nnnn", [(256, 0), (128, 0), (128, 0), (128, 0)]),
    ((4, {"growth_interval": 1, "max_loss_scale": 10}), "yyn", [(8, 0), (10, 0), (5, 0)]),
    ((4, {"growth_interval": 3}), "yyny", [(4, 1), (4, 2), (2, 0), (2, 1)]),
]


@pytest.mark.parametrize(("fields", "finite", "want"), TRAJECTORIES)
def test_law_07_trajectories(fields, finite, want):
    start, options = fields
    assert run(mpjax.DynamicLossScale(start, **options), [f == "y" for f in finite]) == want


def test_law_07_two_thousand_finite_steps_double_the_scale():
    steps = run(mpjax.DynamicLossScale(2.0**16), [False] * 3 + [True] * 2000)[3:]
    assert steps[:1999] == [(8192, n + 1) for n in range(1999)]
    assert steps[1999] == (16384, 0)


@pytest.mark.parametrize("counter", [6, 7, 100, 2**31 - 1])
def test_law_07_restored_counter_past_the_interval_still_grows(counter):
    assert run(off_default(counter=counter), [True]) == [(2048, 0)]
    assert run(off_default(counter=counter), [False]) == [(128, 0)]


@pytest.mark.parametrize("flag", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_law_07_any_boolean_scalar_will_do(flag):
    assert float(off_default(counter=6).adjust(flag).loss_scale) == 2048


def test_law_07_defaults_are_those_documented():
    assert values_of(mpjax.DynamicLossScale()) == {
        "loss_scale": 2.0**15,
        "counter": 0,
        "growth_factor": 2,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_loss_scale": 1,
        "max_loss_scale": 2.0**24,
    }


# -- law 8: against a model in plain Python, from any start ----------------------------------------


@dataclasses.dataclass
class Model:
    """The update rule in Python, each product rounded to float32 as the fields are."""

    scale: float
    growth: float
    backoff: float
    interval: int
    low: float
    high: float
    counter: int = 0

    def adjust(self, finite):
        with np.errstate(all="ignore"):
            product = np.float32(self.scale) * np.float32(self.growth if finite else self.backoff)
        if not finite:
            self.scale, self.counter = max(self.low, float(product)), 0
        elif self.counter + 1 >= self.interval:
            self.scale, self.counter = min(self.high, float(product)), 0
        else:
            self.counter += 1
        return self.scale, self.counter


EXTREMES = [SMALLEST, 2.0**-64, 0.5, 1.0, 3.0, 1000.0, 2.0**15, 2.0**24, 2.0**100, LARGEST]
SEQUENCES, STEPS = 500, 40


@st.composite
def batches(draw):
    """Draws many configurations at a time, and the steps that each goes through."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    growths, backoffs = [1.5, 2.0, 3.0, 2.0**64], [2.0**-64, 0.25, 0.5, 0.7]
    configs = []
    for _ in range(SEQUENCES):
        low, start, high = sorted(rng.choice(EXTREMES, 3))
        growth, backoff = rng.choice(growths), rng.choice(backoffs)
        configs.append((start, growth, backoff, int(rng.integers(1, 6)), low, high))
    share = draw(st.sampled_from([0.05, 0.5, 0.95]))
    return configs, rng.random((SEQUENCES, STEPS)) < share


def from_fields(start, growth, backoff, interval, low, high):
    floats = map(np.float32, (growth, backoff))
    bounds = map(np.float32, (low, high))
    return [np.float32(start), np.int32(0), *floats, np.int32(interval), *bounds]


@settings(max_examples=20)
@given(batches())
def test_law_08_ten_thousand_sequences_agree_with_the_model(batch):
    configs, flags = batch
    fields = [np.stack(column) for column in zip(*(from_fields(*c) for c in configs), strict=True)]
    ls = mpjax.DynamicLossScale.tree_unflatten(None, fields)
    scales, counters = map(np.asarray, run_all(ls, flags))
    assert np.isfinite(scales).all()
    assert (scales >= SMALLEST).all()
    for config, row, got_scales, got_counters in zip(configs, flags, scales, counters, strict=True):
        model = Model(*config)
        want = [model.adjust(bool(finite)) for finite in row]
        assert list(zip(got_scales.tolist(), got_counters.tolist(), strict=True)) == want


BROKEN = [0.0, -0.0, -1.0, 2.0**-149, 2.0**127, 3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("start", BROKEN)
@pytest.mark.parametrize("flags", [[True] * 5, [False] * 5, [True, False, True]])
def test_law_08_restored_scale_is_brought_back_within_the_bounds(start, flags):
    ls = mpjax.DynamicLossScale.tree_unflatten(
        None, [jnp.float32(start), *jax.tree.leaves(off_default())[1:]]
    )
    for scale, _ in run(ls, flags):
        assert 128 <= scale <= 4096


@pytest.mark.parametrize("field", FIELDS[2:])
@pytest.mark.parametrize("value", BROKEN)
def test_law_08_restored_configuration_never_makes_it_0_inf_or_nan(field, value):
    index = FIELDS.index(field)
    leaves = jax.tree.leaves(off_default(growth_interval=1))
    is_count = field == "growth_interval"
    leaves[index] = jnp.int32(-(2**31)) if is_count else jnp.float32(value)
    ls = mpjax.DynamicLossScale.tree_unflatten(None, leaves)
    for flags in ([True] * 200, [False] * 200, [True, False] * 20):
        scales = [scale for scale, _ in run(ls, flags)]
        assert all(math.isfinite(scale) and scale >= SMALLEST for scale in scales)


@given(
    exponents=st.lists(st.integers(-126, 126), min_size=3, max_size=3).map(sorted),
    growth=st.integers(1, 60),
    backoff=st.integers(-60, -1),
    flags=st.lists(st.booleans(), min_size=20, max_size=20),
)
@settings(max_examples=50)
def test_law_08_powers_of_two_stay_powers_of_two(exponents, growth, backoff, flags):
    low, start, high = (2.0**e for e in exponents)
    fields = from_fields(start, 2.0**growth, 2.0**backoff, 1, low, high)
    ls = jax.tree.map(lambda x: x[None], mpjax.DynamicLossScale.tree_unflatten(None, fields))
    scales, _ = run_all(ls, np.array(flags)[None])
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales[0].tolist())


def test_law_08_restored_numpy_values_overflow_without_a_warning():
    ls = jax.tree.map(np.asarray, off_default(loss_scale=4096, counter=6))
    huge = mpjax.DynamicLossScale.tree_unflatten(None, [np.float32(3e38), *jax.tree.leaves(ls)[1:]])
    assert float(huge.adjust(True).loss_scale) == 4096


def test_law_08_largest_scale_has_a_normal_reciprocal():
    x = jnp.float32(LARGEST)
    assert float(jax.jit(lambda x: 1 / x)(x)) == SMALLEST
    assert float(mpjax.StaticLossScale(LARGEST).unscale(x)) == 1


# -- law 9: one compilation ----------------------------------------------------------------------


def test_law_09_second_call_does_not_retrace():
    with assert_one_compilation(lambda ls, finite: ls.adjust(finite)) as step:
        ls = mpjax.DynamicLossScale()
        for finite in (True, True, False):
            ls = step(ls, jnp.array(finite))
        ls = step(off_default(), jnp.array(True))
        step(jax.tree.map(jnp.asarray, jax.device_get(ls)), jnp.array(True))


def test_law_09_configuration_is_data():
    with assert_one_compilation(lambda ls: ls.adjust(True)) as step:
        for interval in (1, 2, 3):
            largest = 2.0**interval * 2**15
            step(mpjax.DynamicLossScale(growth_interval=interval, max_loss_scale=largest))


# -- many at once --------------------------------------------------------------------------------


def test_construction_under_jit():
    got = jax.jit(lambda x: mpjax.DynamicLossScale(x, growth_interval=1).adjust(True))(8.0)
    assert float(got.loss_scale) == 16


def test_repr_shows_every_field():
    assert repr(off_default()) == (
        "DynamicLossScale(loss_scale=512, counter=3, growth_factor=4, backoff_factor=0.25, "
        "growth_interval=7, min_loss_scale=128, max_loss_scale=4096)"
    )
    assert repr(mpjax.StaticLossScale(0.5)) == "StaticLossScale(loss_scale=0.5)"


def test_repr_under_jit_shows_types():
    texts = []
    jax.jit(lambda ls: texts.append(repr(ls)))(mpjax.StaticLossScale(2))
    assert re.fullmatch(r"StaticLossScale\(loss_scale=.*float32\[\].*\)", texts[0])


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("floor", [2.0**-126, 4.0])
def test_flaxs_dynamic_scale_is_matched_by_one_more_step_of_the_interval(interval, floor):
    theirs = DynamicScale(scale=64.0, growth_interval=interval, minimum_scale=floor)
    ours = mpjax.DynamicLossScale(
        64.0, growth_interval=interval + 1, min_loss_scale=floor, max_loss_scale=LARGEST
    )
    flags = np.random.default_rng(interval).random(60) < 0.8
    for finite in [*flags, *[False] * 8, *[True] * 8]:
        grad = theirs.value_and_grad(lambda p, f=finite: p * (1.0 if f else jnp.inf))
        theirs, is_finite, *_ = grad(jnp.float32(1))
        assert is_finite == finite
        ours = ours.adjust(is_finite)
        assert ours.loss_scale == theirs.scale
