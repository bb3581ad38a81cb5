"""How a master weight becomes the bf16 half that computes: by a fixed dither, or to nearest.

The bits of a master are cut after their upper 16; before, a number of 0 to 65535 is added to them,
its dither. With 0x8000 everywhere that is rounding to nearest, ties away from zero. With `dither`
it is a fixed pseudo-random number for each element, uniform over 16 bits: then

    high = upper 16 bits of the master + (lower 16 bits > threshold),  threshold = 65535 - dither

where the lower bits count as unsigned, so magnitudes are rounded. A weight on the bf16 grid stays
as it is; of weights that lie a share p of a grid step above it, the share p is rounded up. So steps
far below a grid step reach the forward pass at once, each in that share of its weights. The dither
of an element is a function of the parameter's name, its index in the flattened parameter and the
run's seed, and of nothing else: not of time, chunks, devices or layout.

    dither = lower 16 bits of lowbias32(0x9E3779B9 * (key(seed, name, index >> 32) + index))

modulo 2**32. lowbias32, by Chris Wellons, is a permutation of 32-bit numbers
(https://github.com/skeeto/hash-prospector, public domain); the factor, 2**32 over the golden ratio,
makes it as good on numbers in a row: without it the differences of neighbours' dithers are lumpy.
Dithered quantization: L. Roberts, Picture coding using pseudo-random noise (1962).

This file is NumPy's part, for one range of a parameter at a time; it imports no JAX.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Rounding = Literal["dither", "nearest"]

DEFAULT_ROUNDING: Rounding = "dither"
"""Of new runs; decided by measurement, see docs/design.md."""

NEAREST = np.uint32(0x8000)
"""The dither of every element where weights are rounded to nearest."""

SECTION = 1 << 32
"""Indices of a parameter that one key serves."""

SPREAD, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Of the hash, in the order of use."""


@dataclass(frozen=True, kw_only=True)
class WeightRounding:
    """What decides the dither of every element.

    Attributes:
      rounding: `dither` or `nearest`.
      seed: of the dither, any integer; None for `nearest`.
    """

    rounding: Rounding
    seed: int | None = None

    def __post_init__(self) -> None:
        """Checks that what is recorded says all."""
        check_rounding(self.rounding)
        if not isinstance(self.seed, int if self.rounding == "dither" else type(None)):
            raise ValueError(
                f"{self.rounding!r} with the seed {self.seed!r}; 'dither' needs a whole number, "
                "'nearest' takes None"
            )

    @staticmethod
    def of(rounding: Rounding, seed: int) -> WeightRounding:
        """The rounding of that name in a run with that seed."""
        return WeightRounding(rounding=rounding, seed=int(seed) if rounding == "dither" else None)

    def named(self, rounding: Rounding | None, seed: int) -> WeightRounding:
        """This one if that is its name or none is given, else the one of that name and seed."""
        return self if rounding in (None, self.rounding) else WeightRounding.of(rounding, seed)

    @property
    def text(self) -> str:
        """In words, after "rounded"."""
        return "to nearest" if self.seed is None else f"by dither with seed {self.seed}"

    @staticmethod
    def recorded(values: Mapping[str, Any] | None) -> WeightRounding:
        """What `record` has written; before there was a choice, weights were rounded to nearest.

        Raises:
          ValueError: `values` are not what it writes.
        """
        if values is None:
            return WeightRounding(rounding="nearest")
        try:
            return WeightRounding(**values)
        except TypeError as error:
            raise ValueError(f"weight_rounding={values!r}: {error}") from None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {"rounding": self.rounding, "seed": self.seed}

    def keys(self, name: str, size: int) -> np.ndarray | None:
        """Keys of the sections of a parameter of `size` elements, uint32 [sections].

        None where there is no hash to be made, because every dither is `NEAREST`.
        """
        if self.seed is None:
            return None
        sections = max(1, -(-size // SECTION))
        return np.array([key(self.seed, name, section) for section in range(sections)], np.uint32)

    def dither(self, name: str, start: int, size: int) -> np.ndarray:
        """Dithers of elements [start, start + size) of a parameter: uint32 [size], or one for all.

        `start` counts in the flattened parameter.
        """
        if self.seed is None:
            return np.asarray(NEAREST)
        parts = [
            _dither_of_section(key(self.seed, name, begin // SECTION), begin % SECTION, end - begin)
            for begin, end in sections(start, start + size)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_rounding(rounding: object) -> None:
    """Whether there is a rounding of that name.

    Raises:
      ValueError: there is none.
    """
    if rounding not in get_args(Rounding):
        raise ValueError(f"weight_rounding={rounding!r}; allowed: {get_args(Rounding)}")


@functools.lru_cache(maxsize=4096)
def key(seed: int, name: str, section: int) -> int:
    """A 32-bit number for 2**32 consecutive elements of a parameter."""
    text = f"{seed}\n{section}\n{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def sections(start: int, end: int) -> list[tuple[int, int]]:
    """Elements [start, end) cut at whole sections: (first, behind the last) of each part.

    One empty part if there are none.
    """
    cuts = range((start // SECTION + 1) * SECTION, end, SECTION)
    return list(itertools.pairwise([start, *cuts, end]))


def _dither_of_section(own_key: int, index: int, size: int) -> np.ndarray:
    x = np.arange(size, dtype=np.uint32)
    x += np.uint32((own_key + index) % (1 << 32))
    x *= np.uint32(SPREAD)
    x ^= x >> np.uint32(16)
    x *= np.uint32(FIRST_FACTOR)
    x ^= x >> np.uint32(15)
    x *= np.uint32(SECOND_FACTOR)
    x ^= x >> np.uint32(16)
    x &= np.uint32(0xFFFF)
    return x
