"""Rounding to a narrow dtype: the cast's result, chances with an exact mean, landing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax._low_precision.rounding import TINY, land, nearest, scattered, stochastic
from mpjax.testing import assert_bitwise_equal

NARROW = {"bf16": jnp.bfloat16, "f16": jnp.float16}
dtypes = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
COUNT = 100_000


def floats(count=COUNT, seed=0):
    """Returns finite float32 numbers of every exponent, normal ones and zeros."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) >= TINY), x, np.float32(0))
    return np.concatenate([x, np.array([0.0, -0.0], np.float32)])


@dtypes
def test_nearest_is_the_cast_also_where_float16_is_subnormal(dtype):
    small = (floats(seed=1) % 2**-13).astype(np.float32)
    x = np.concatenate([floats(), small, np.array([np.inf, -np.inf, np.nan], np.float32)])
    with np.errstate(over="ignore"):
        want = x.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(lambda x: nearest(x, jnp.dtype(dtype)))(x))
    is_seen = ~np.isnan(want) & ~((np.abs(want) < TINY) & (want != 0))
    np.testing.assert_array_equal(got[is_seen].view(np.uint32), want[is_seen].view(np.uint32))
    assert np.isnan(got[np.isnan(want)]).all()


@pytest.mark.parametrize("dtype", [*NARROW.values(), jnp.float8_e4m3fn], ids=[*NARROW, "f8"])
def test_chance_chooses_one_of_the_two_neighbours_and_keeps_what_fits(dtype):
    x = floats()
    info = ml_dtypes.finfo(dtype)
    x = x[np.abs(x) < float(info.max)]
    x = np.concatenate([x, (floats(seed=1) % np.float32(4 * float(info.smallest_normal)))])
    x = x[np.isfinite(x)].astype(np.float32)
    fits = x.astype(dtype).astype(np.float32)
    random = np.random.default_rng(2).integers(0, 2**32, x.shape, np.uint32)
    round_ = jax.jit(lambda x, r: stochastic(x, jnp.dtype(dtype), r))
    kept = np.abs(fits) >= TINY
    np.testing.assert_array_equal(np.asarray(round_(fits, random))[kept], fits[kept])
    low, high = (np.asarray(round_(x, np.full_like(random, r))) for r in (0, 2**32 - 1))
    got = np.asarray(round_(x, random))
    for y in (low, high, got):
        np.testing.assert_array_equal(y.astype(dtype).astype(np.float32), y)
        assert ((y == low) | (y == high)).all()
    assert (np.abs(low) <= np.abs(x)).all()
    # Where values are equally spaced, a chance below 2⁻¹³ is none.
    never = float(info.smallest_subnormal) * 2.0**-13 if info.minexp > -126 else 0
    assert (np.abs(got - x) <= np.maximum(np.abs(high - low), never)).all()


@pytest.mark.parametrize("dtype", [*NARROW.values(), jnp.float8_e4m3fn], ids=[*NARROW, "f8"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-17], ids=["normal", "below"])
def test_the_mean_of_chances_is_the_number(dtype, scale):
    info = ml_dtypes.finfo(dtype)
    least = float(info.smallest_normal)
    start = np.float32(max(scale, least / 8) if scale < 1 else 1.0)
    step = np.abs(np.float32(np.asarray(start, dtype)) * float(info.eps))
    x = np.float32(start + step * 0.3)
    draws = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)
    got = np.asarray(stochastic(jnp.full(2**16, x), jnp.dtype(dtype), jnp.asarray(draws)))
    gap = got.max() - got.min()
    assert gap > 0
    # The standard error of the mean is gap · sqrt(p(1-p)/n): 2⁻⁹ of the gap; five of them.
    assert abs(got.mean(dtype=np.float64) - x) < 5 * 2.0**-9 * gap


def test_chance_leaves_infinities_and_nan_and_does_not_make_them():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = jnp.array([largest, -largest, np.inf, -np.inf], jnp.float32)
    worst = jnp.full(4, 2**32 - 1, jnp.uint32)
    np.testing.assert_array_equal(stochastic(x, jnp.dtype(jnp.bfloat16), worst), x)
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(stochastic(jnp.asarray(nans), jnp.dtype(jnp.bfloat16), worst[:3])).all()
    beyond = jnp.array([500.0, -1e30], jnp.float32)
    clipped = stochastic(beyond, jnp.dtype(jnp.float8_e4m3fn), worst[:2])
    np.testing.assert_array_equal(clipped, [448.0, -448.0])


@dtypes
def test_law_17_updates_land_bit_for_bit_on_sums_of_every_size(dtype):
    dtype = jnp.dtype(dtype)
    random = np.random.default_rng(3)
    p = random.integers(0, 2**16, 500_000, np.uint16).view(dtype)  # every exponent
    wide = p.astype(np.float32)
    p = p[np.isfinite(wide) & ((np.abs(wide) >= TINY) | (wide == 0))]
    wide = p.astype(np.float32)
    # Steps of every size beside their parameter, and many that nearly cancel it.
    with np.errstate(over="ignore"):
        size = np.ldexp(random.normal(size=len(p)), random.integers(-30, 30, len(p)))
        steps = np.where(wide == 0, 1, wide) * size
        near = -wide * (1 + np.ldexp(random.normal(size=len(p)), -random.integers(0, 24, len(p))))
        steps = np.where(random.random(len(p)) < 0.5, steps, near).astype(np.float32)
    steps = np.where(np.isfinite(steps), steps, 0).astype(np.float32)

    @jax.jit
    def move(p, step):
        full = p.astype(jnp.float32)
        target = nearest(full + step, dtype)
        update, place = land(full, target)
        return target, place, update, (full + update).astype(dtype)

    target, place, update, moved = map(np.asarray, move(jnp.asarray(p), jnp.asarray(steps)))
    seen = np.isfinite(target)
    assert_bitwise_equal(moved[seen], place.astype(dtype)[seen])
    # The place is the target but for what float32 calls zero, and for the sign of zero.
    other = seen & (place != target)
    assert (np.abs(target[other] - wide[other]) < TINY).all()
    stays = np.asarray(update == 0)
    assert np.signbit(update[stays]).all()
    assert_bitwise_equal(moved[stays], p[stays])
    assert seen.sum() > 350_000


def test_hashed_numbers_look_random_in_place_and_in_time():
    draw = jax.jit(lambda count: scattered((64, 64), count, 7))
    many = np.stack([np.asarray(draw(jnp.int32(count))) for count in range(64)])
    uniform = many / 2.0**32
    error = 1 / np.sqrt(12 * many.size)
    assert abs(uniform.mean() - 0.5) < 5 * error
    centred = uniform - 0.5
    for axis in range(3):
        product = (centred * np.roll(centred, 1, axis)).mean() * 12
        assert abs(product) < 5 / np.sqrt(many.size), axis
    assert len(np.unique(many)) > 0.9999 * many.size * (1 - many.size / 2.0**33)
    assert not np.array_equal(many[0], scattered((64, 64), jnp.int32(0), 8))
