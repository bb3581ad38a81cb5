import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from slidedp_jax.state import split_float


def bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).view(np.uint32)


def patterns() -> np.ndarray:
    """Every exponent and sign with mantissas around the rounding edges, and random patterns."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)[None]
    random = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32)
    return np.concatenate([(upper | lower).ravel(), random])


@pytest.fixture(params=["numpy", "jax"])
def functions(request):
    if request.param == "numpy":
        return split_float.split_numpy, split_float.join_numpy
    split, join = jax.jit(split_float.split), jax.jit(split_float.join)
    return lambda x: tuple(map(np.asarray, split(jnp.asarray(x)))), lambda h, low: np.asarray(
        join(jnp.asarray(h), jnp.asarray(low))
    )


def test_every_number_comes_back_bit_for_bit(functions):
    split, join = functions
    master = patterns().view(np.float32)
    back = join(*split(master))
    number = ~np.isnan(master)
    np.testing.assert_array_equal(bits(back)[number], bits(master)[number])


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


def test_high_is_nan_only_for_nan(functions):
    split, _ = functions
    master = patterns().view(np.float32)
    high, _ = split(master)
    np.testing.assert_array_equal(np.isnan(high.astype(np.float32)), np.isnan(master))


def test_high_rounds_to_nearest_with_ties_away_from_zero(functions):
    split, _ = functions
    master = np.array([0x3F808000, 0xBF808000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    high, _ = split(master)
    expected = np.array([0x3F81, 0xBF81, 0x3F81, 0x3F80], np.uint16)
    np.testing.assert_array_equal(high.view(np.uint16), expected)


def test_high_is_what_astype_gives_but_for_ties(functions):
    split, _ = functions
    master = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    master = master[(bits(master) & 0xFFFF) != 0x8000]
    high, _ = split(master)
    np.testing.assert_array_equal(
        high.view(np.uint16), master.astype(ml_dtypes.bfloat16).view(np.uint16)
    )
