import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slidedp_jax.state import split_float
from slidedp_jax.state.weight_rounding import NEAREST, WeightRounding


def bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).view(np.uint32)


def patterns() -> np.ndarray:
    """Every exponent and sign with mantissas around the rounding edges, and random patterns."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)[None]
    random = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)
    return np.concatenate([(upper | lower).ravel(), random])


DITHERS = {
    "nearest": lambda size: np.full(size, NEAREST),
    "dither": lambda size: WeightRounding.of("dither", seed=1).dither("a", 0, size),
    "least": lambda size: np.zeros(size, np.uint32),
    "most": lambda size: np.full(size, 0xFFFF, np.uint32),
    # At, just below and just above what carries.
    "edge": lambda size: (
        (0xFFFF + np.arange(size, dtype=np.uint32) % 3 - (patterns()[:size] & 0xFFFF)) & 0xFFFF
    ),
}


@pytest.fixture(params=DITHERS)
def dithers(request):
    return DITHERS[request.param]


@pytest.fixture(params=["numpy", "jax"])
def functions(request, dithers):
    """`split` and `join` of whole arrays, by the dithers of the first elements."""
    all_of_them = dithers(len(patterns()))

    def dither_of(start, size):
        return all_of_them[start : start + size]

    if request.param == "numpy":
        return (
            lambda master: split_float.split_numpy(master, dither_of),
            lambda high, low: split_float.join_numpy(high, low, dither_of),
        )
    split, join = jax.jit(split_float.split), jax.jit(split_float.join)

    def split_jax(master):
        halves = split(jnp.asarray(master), dither_of(0, len(master)))
        return tuple(map(np.asarray, halves))

    return split_jax, lambda high, low: np.asarray(
        join(jnp.asarray(high), jnp.asarray(low), dither_of(0, len(high)))
    )


def test_every_number_comes_back_bit_for_bit(functions):
    split, join = functions
    master = patterns().view(np.float32)
    back = join(*split(master))
    number = ~np.isnan(master)
    np.testing.assert_array_equal(bits(back)[number], bits(master)[number])


def test_high_is_the_upper_half_and_one_more_above_the_threshold(functions, dithers):
    split, _ = functions
    master = patterns().view(np.float32)
    high, low = split(master)
    lower = bits(master) & 0xFFFF
    threshold = 0xFFFF - dithers(len(master))
    expected = (bits(master) >> 16) + (lower > threshold)
    number = ~np.isnan(master)
    np.testing.assert_array_equal(high.view(np.uint16)[number], expected[number])
    np.testing.assert_array_equal(low.view(np.uint16), lower)


def test_nan_stays_nan_in_both_and_keeps_its_payload(functions):
    split, join = functions
    master = patterns().view(np.float32)
    nan = master[np.isnan(master)]
    high, low = split(nan)
    assert np.isnan(high.astype(np.float32)).all()
    back = join(high, low)
    assert np.isnan(back).all()
    expressible = (bits(nan) >> 16) & 0x7F != 0
    np.testing.assert_array_equal(bits(back)[expressible], bits(nan)[expressible])


def test_high_is_nan_only_for_nan_and_infinite_only_beyond_the_largest(functions):
    split, _ = functions
    master = patterns().view(np.float32)
    high = split(master)[0].astype(np.float32)
    np.testing.assert_array_equal(np.isnan(high), np.isnan(master))
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    assert (np.abs(master[np.isinf(high)]) > largest).all()
    assert np.isinf(high[np.isinf(master)]).all()
    signs = np.signbit(master) == np.signbit(high)
    assert signs[~np.isnan(master)].all()


def test_what_lies_on_the_grid_stays_there(functions):
    split, _ = functions
    on_grid = np.arange(2**16, dtype=np.uint32) << 16
    master = on_grid.view(np.float32)
    high, low = split(master)
    np.testing.assert_array_equal(high.view(np.uint16), on_grid >> 16)
    assert not low.any()


def test_nearest_rounds_ties_away_from_zero():
    master = np.array([0x3F808000, 0xBF808000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    high = split_float.rounded(master, WeightRounding.of("nearest", seed=0), "a")
    expected = np.array([0x3F81, 0xBF81, 0x3F81, 0x3F80], np.uint16)
    np.testing.assert_array_equal(high.view(np.uint16), expected)


def test_nearest_is_what_astype_gives_but_for_ties():
    master = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    master = master[(bits(master) & 0xFFFF) != 0x8000]
    high = split_float.rounded(master, WeightRounding.of("nearest", seed=0), "a")
    np.testing.assert_array_equal(
        high.view(np.uint16), master.astype(ml_dtypes.bfloat16).view(np.uint16)
    )


def test_pieces_are_rounded_as_the_whole_is():
    """NumPy's walk over blocks, and a parameter of several dimensions."""
    master = np.random.default_rng(2).standard_normal((3, (1 << 16) + 7)).astype(np.float32)
    rounding = WeightRounding.of("dither", seed=4)
    high = split_float.rounded(master, rounding, "a.b")
    flat, dither = master.reshape(-1), rounding.dither("a.b", 0, master.size)
    expected, _ = split_float.split(jnp.asarray(flat), jnp.asarray(dither))
    assert high.tobytes() == np.asarray(expected).tobytes()
