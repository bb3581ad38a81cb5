"""The dithers: uniform, unlike each other, and the same in every realisation."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.state.split_float import rounded
from slidedp_jax.state.traced_dither import dither_of_parameter
from slidedp_jax.state.weight_rounding import NEAREST, SECTION, TABLE, WeightRounding, begin

DITHER = WeightRounding.of("dither", seed=0)
NAME = "model.layers.0.mlp.up_proj.weight"
SIZE = 1 << 20
NUM_BINS = 1 << 8


def lowbias32(x: int) -> int:
    """As its author writes it."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    return x


def permuted(x: int) -> int:
    """The permutation of 16-bit numbers, written out."""
    x ^= x >> 5
    x = x * 0x1749 % 2**16
    x ^= x >> 5
    x = x * 0xDF21 % 2**16
    x ^= x >> 7
    x = x * 0x9C2F % 2**16
    x ^= x >> 5
    return x


def test_a_dither_is_found_in_a_permutation_from_where_a_known_hash_begins():
    text = b"7\n" + NAME.encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    found = WeightRounding.of("dither", seed=7).dither(NAME, 65000, 1500)
    expected = []
    for index in range(65000, 66500):
        first = lowbias32((own + index // 65536) * 0x9E3779B9 % 2**32)
        expected.append(permuted((first + index) % 2**16))
    assert found.tolist() == expected


def is_uniform(numbers: np.ndarray) -> bool:
    """By chi-squared over 256 bins of the upper and of the lower of 16 bits; five deviations."""
    scores = []
    for part in (numbers >> 8, numbers & (NUM_BINS - 1)):
        expected = numbers.size / NUM_BINS
        counts = np.bincount(part, minlength=NUM_BINS)
        chi_squared = float(np.sum((counts - expected) ** 2) / expected)
        scores.append(abs(chi_squared - (NUM_BINS - 1)) / np.sqrt(2 * (NUM_BINS - 1)))
    return max(scores) < 5


def are_unlike(one: np.ndarray, other: np.ndarray) -> bool:
    """Correlation, equality and differences are those of independent numbers."""
    correlation = float(np.corrcoef(one, other)[0, 1])
    expected = one.size / 2**16
    equal = abs(int(np.sum(one == other)) - expected) / np.sqrt(expected)
    # Of a difference modulo 2**16, which any fixed offset between the two would make lumpy.
    return (
        abs(correlation) < 5 / np.sqrt(one.size)
        and equal < 5
        and is_uniform((one - other) & 0xFFFF)
    )


def test_every_threshold_occurs_once_in_each_section():
    """So they are exactly uniform, in all 16 bits."""
    assert sorted(TABLE.tolist()) == list(range(2**16))
    for section in (0, 1, 7, 65536):
        dithers = DITHER.dither(NAME, section * SECTION, SECTION)
        assert dithers.dtype == np.uint16
        assert (np.bincount(dithers) == 1).all() and len(np.bincount(dithers)) == 2**16


def test_no_distance_shows_a_correlation():
    """Of 65,535 distances of independent numbers, the largest correlation is 4.2 deviations."""
    numbers = TABLE - TABLE.mean()
    spectrum = np.abs(np.fft.rfft(numbers)) ** 2
    correlations = np.fft.irfft(spectrum)[1:] / np.sum(numbers**2)
    assert np.abs(correlations).max() * np.sqrt(SECTION) < 4.5
    # Nor does any frequency stand out: of 32,768, each with an exponential distribution.
    assert (spectrum[1:] / spectrum[1:].mean()).max() < np.log(SECTION // 2) + 5


@pytest.mark.parametrize("distance", [1, 2, 3, 7, 64, 576, 1536, 4096, 30000])
def test_neighbours_are_unlike(distance):
    table = TABLE.astype(np.uint32)
    assert are_unlike(table, np.roll(table, -distance))


def test_sections_begin_anywhere():
    begins = np.array([begin(DITHER.key(NAME), section) for section in range(1 << 14)])
    assert is_uniform(begins) and is_uniform(np.diff(begins) & 0xFFFF)
    assert len(set(begins.tolist())) > 0.85 * len(begins)


@pytest.mark.parametrize(
    ("seed", "name"),
    [(1, NAME), (2**31, NAME), (-1, NAME), (0, NAME.replace(".0.", ".1.")), (0, "a")],
)
def test_parameters_and_seeds_are_unlike(seed, name):
    other = WeightRounding.of("dither", seed=seed).dither(name, 0, SIZE)
    assert are_unlike(DITHER.dither(NAME, 0, SIZE), other)


def test_the_statistics_notice_what_they_look_for():
    ramp = np.arange(SECTION, dtype=np.uint32)
    fair = DITHER.dither(NAME, 0, SECTION)
    assert not is_uniform(ramp >> 1)
    assert not are_unlike(ramp, (ramp + 1) & 0xFFFF)
    assert not are_unlike(fair, fair)
    assert not are_unlike(fair, (fair + 12345) & 0xFFFF)
    assert not is_uniform(np.where(fair < 1000, np.uint32(0), fair))


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


def test_the_share_that_is_rounded_up_is_the_share_of_the_way():
    """So small steps reach the forward pass in proportion, from the first on."""
    start = np.float32(0.1).view(np.uint32) & 0xFFFF0000
    for share in (0.0, 2.0**-16, 0.001, 0.04, 0.5, 0.97):
        master = np.full(SIZE, start + int(share * 2**16), np.uint32).view(np.float32)
        up = rounded(master, DITHER, NAME).view(np.uint16) > (start >> 16)
        share = int(share * 2**16) / 2**16
        assert up.mean() == share


def test_any_piece_of_a_parameter_has_the_dithers_of_its_place():
    whole = DITHER.dither(NAME, 0, 5000)
    for start, size in ((0, 1), (17, 1000), (4999, 1), (4000, 1000), (123, 0)):
        assert DITHER.dither(NAME, start, size).tolist() == whole[start : start + size].tolist()


def test_indices_beyond_32_bits_have_dithers_of_their_own():
    """Of parameters larger than 2**32 elements, and the sum of key and section may wrap around."""
    start = 2**32 - 1000
    across = DITHER.dither(NAME, start, 2000)
    assert across[:1000].tolist() == DITHER.dither(NAME, start, 1000).tolist()
    assert across[1000:].tolist() == DITHER.dither(NAME, 2**32, 1000).tolist()
    assert (across[1000:] == DITHER.dither(NAME, 0, 1000)).sum() < 5
    assert begin(2**32 - 1, 1) == begin(0, 0) == lowbias32(0)


@pytest.mark.parametrize("size", [1, 63, 5000, SECTION, 3 * SECTION + 7])
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
