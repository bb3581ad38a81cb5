"""The dithers: uniform, unlike each other, and the same in every realisation."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.state.split_float import rounded
from slidedp_jax.state.traced_dither import dither_of_parameter
from slidedp_jax.state.weight_rounding import (
    NEAREST,
    WeightRounding,
)

DITHER = WeightRounding.of("dither", seed=0)
NAME = "model.layers.0.mlp.up_proj.weight"
SIZE = 1 << 17
NUM_BINS = 1 << 10


def lowbias32(x: int) -> int:
    """As its author writes it."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    return x


def test_a_dither_is_multiply_shift_by_a_known_hash():
    text = b"7\n" + NAME.encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    found = WeightRounding.of("dither", seed=7).dither(NAME, 1000, 500)
    expected = []
    for index in range(1000, 1500):
        start = lowbias32((own + index // 64) * 0x9E3779B9 % 2**32)
        factor = lowbias32(start * 0x9E3779B9 % 2**32)
        expected.append((factor * (index % 64) + start) % 2**32 >> 16)
    assert found.tolist() == expected


def z_score(observed: float, expected: float, deviation: float) -> float:
    return abs(observed - expected) / deviation


def is_uniform(dithers: np.ndarray) -> bool:
    """By chi-squared over 1,024 bins of the upper and of the lower bits; six deviations."""
    scores = []
    for part in (dithers >> 6, dithers & (NUM_BINS - 1)):
        counts = np.bincount(part, minlength=NUM_BINS)
        expected = dithers.size / NUM_BINS
        chi_squared = float(np.sum((counts - expected) ** 2) / expected)
        scores.append(z_score(chi_squared, NUM_BINS - 1, np.sqrt(2 * (NUM_BINS - 1))))
    return max(scores) < 6


def are_unlike(one: np.ndarray, other: np.ndarray) -> bool:
    """Correlation, and how often both are equal, are those of independent numbers."""
    size = one.size
    correlation = float(np.corrcoef(one, other)[0, 1])
    expected = size / 2**16
    equal = z_score(int(np.sum(one == other)), expected, np.sqrt(expected))
    # Of the sum modulo 2**16, which any fixed offset between the two would make lumpy.
    difference = (one - other) & 0xFFFF
    return abs(correlation) < 6 / np.sqrt(size) and equal < 6 and is_uniform(difference)


@pytest.mark.parametrize("seed", [0, 42])
def test_dithers_are_uniform(seed):
    dithers = WeightRounding.of("dither", seed=seed).dither(NAME, 0, SIZE)
    assert dithers.dtype == np.uint32
    assert dithers.max() < 2**16
    assert is_uniform(dithers)


@pytest.mark.parametrize("lane", [0, 1, 40])
@pytest.mark.parametrize("distance", [1, 2, 3, 16, 21, 63, 64, 576, 4096, 65536])
def test_neighbours_are_unlike(distance, lane):
    """One pair of each unit, since pairs of one unit are not independent of each other."""
    dithers = DITHER.dither(NAME, 0, 64 * SIZE + distance)
    assert are_unlike(dithers[lane::64][:SIZE], dithers[lane + distance :: 64][:SIZE])


def test_errors_add_up_as_those_of_independent_dithers():
    """The sum over a row of a matrix with inputs of either sign: its variance is that of a row of
    independent roundings, whatever the input."""
    columns, rows = 576, 4096
    dithers = DITHER.dither(NAME, 0, rows * columns).reshape(rows, columns)
    lower = 20000
    error = (lower > 0xFFFF - dithers).astype(np.float64) - lower / 2**16
    rng = np.random.default_rng(0)
    inputs = [np.ones(columns), (-1.0) ** np.arange(columns), rng.standard_normal(columns)]
    share = lower / 2**16
    for values in inputs:
        expected = share * (1 - share) * float(np.sum(values**2))
        assert np.var(error @ values) == pytest.approx(expected, rel=6 * np.sqrt(2 / rows))


@pytest.mark.parametrize(
    ("seed", "name"),
    [(1, NAME), (2**31, NAME), (-1, NAME), (0, NAME.replace(".0.", ".1.")), (0, "a")],
)
def test_parameters_and_seeds_are_unlike(seed, name):
    other = WeightRounding.of("dither", seed=seed).dither(name, 0, SIZE)
    assert are_unlike(DITHER.dither(NAME, 0, SIZE), other)


def test_the_statistics_notice_what_they_look_for():
    ramp = np.arange(SIZE, dtype=np.uint32) & 0xFFFF
    assert not is_uniform(ramp >> 1)
    assert not are_unlike(ramp, (ramp + 1) & 0xFFFF)
    fair = DITHER.dither(NAME, 0, SIZE)
    assert not are_unlike(fair, fair)
    assert not are_unlike(fair, (fair + 12345) & 0xFFFF)
    assert not is_uniform(np.where(fair < 1000, np.uint32(0), fair))


def test_the_share_that_is_rounded_up_is_the_share_of_the_way():
    """So small steps reach the forward pass in proportion, from the first on."""
    start = np.float32(0.1).view(np.uint32) & 0xFFFF0000
    for share in (0.0, 2.0**-16, 0.001, 0.04, 0.5, 0.97):
        master = np.full(SIZE, start + int(share * 2**16), np.uint32).view(np.float32)
        up = rounded(master, DITHER, NAME).view(np.uint16) > (start >> 16)
        share = int(share * 2**16) / 2**16
        assert abs(up.mean() - share) <= 6 * np.sqrt(share * (1 - share) / SIZE)


def test_any_piece_of_a_parameter_has_the_dithers_of_its_place():
    whole = DITHER.dither(NAME, 0, 5000)
    for start, size in ((0, 1), (17, 1000), (4999, 1), (4000, 1000), (123, 0)):
        assert DITHER.dither(NAME, start, size).tolist() == whole[start : start + size].tolist()


def test_indices_beyond_32_bits_have_dithers_of_their_own():
    """Of parameters larger than 2**32 elements, and the sum of key and unit may wrap around."""
    start = 2**32 - 1000
    across = DITHER.dither(NAME, start, 2000)
    assert across[:1000].tolist() == DITHER.dither(NAME, start, 1000).tolist()
    assert across[1000:].tolist() == DITHER.dither(NAME, 2**32, 1000).tolist()
    assert (across[1000:] == DITHER.dither(NAME, 0, 1000)).sum() < 5
    wrapping = (2**32 - DITHER.key(NAME)) * 64
    around = DITHER.dither(NAME, wrapping - 64, 128)
    assert around[64] == lowbias32(0) >> 16
    assert around[0] == lowbias32((2**32 - 1) * 0x9E3779B9 % 2**32) >> 16


@pytest.mark.parametrize("size", [1, 63, 64, 5000])
def test_traced_dithers_are_numpys(size):
    key = jnp.uint32(DITHER.key(NAME))
    found = jax.jit(dither_of_parameter, static_argnums=1)(key, size)
    assert np.asarray(found).tolist() == DITHER.dither(NAME, 0, size).tolist()


def test_nearest_has_one_dither_for_all():
    nearest = WeightRounding.of("nearest", seed=3)
    assert nearest.seed is None
    assert nearest.key(NAME) is None
    assert nearest.dither(NAME, 5, 10) == NEAREST
    assert dither_of_parameter(None, 10) == NEAREST


def test_what_is_recorded_comes_back():
    for rounding in (WeightRounding.of("dither", seed=-5), WeightRounding.of("nearest", seed=1)):
        assert WeightRounding.recorded(rounding.record()) == rounding
    assert WeightRounding.recorded(None) == WeightRounding.of("nearest", seed=0)


@pytest.mark.parametrize(
    "values",
    [
        {"rounding": "up", "seed": None},
        {"rounding": "dither", "seed": None},
        {"rounding": "dither", "seed": "1"},
        {"rounding": "nearest", "seed": 1},
        {"rounding": "dither"},
        {"seed": 1},
        {"rounding": "dither", "seed": 1, "more": 2},
        ["dither"],
        "dither",
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(values):
    with pytest.raises(ValueError, match=r"dither|weight_rounding"):
        WeightRounding.recorded(values)
