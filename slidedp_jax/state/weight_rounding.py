"""How a master weight becomes the bf16 half that computes: by a fixed dither, or to nearest.

The bits of a master are cut after their upper 16; before, a number of 0 to 65535 is added to them,
its dither. With 0x8000 everywhere that is rounding to nearest, ties away from zero. With `dither`
it is a fixed pseudo-random number for each element, uniform over 16 bits: then

    high = upper 16 bits of the master + (lower 16 bits > threshold),  threshold = 65535 - dither

where the lower bits count as unsigned, so magnitudes are rounded. A weight on the bf16 grid stays
as it is; of weights that lie a share p of a grid step above it, the share p is rounded up. So steps
far below a grid step reach the forward pass at once, each in that share of its weights. The dither
of an element is a function of the parameter's name, its index in the flattened parameter and the
run's seed, and of nothing else: not of time, chunks, devices or layout. Modulo 2**16 it is

    dither = TABLE[begin(section) + index],   section = index >> 16
    begin  = lowbias32(0x9E3779B9 * (key(seed, name) + section))

`TABLE` is one fixed permutation of the numbers of 16 bits, as good as a random one: at no distance
are its numbers correlated (tests/state/test_weight_rounding.py). So thresholds are exactly uniform
over each 65,536 elements, and each such section begins elsewhere in the table. Programs that pass
over the elements one after another read the table, which costs next to nothing; others compute it.

Sources: L. Roberts, Picture coding using pseudo-random noise (1962), for dithered quantization;
C. Wellons, https://github.com/skeeto/hash-prospector, for lowbias32 and for the form of the
permutation, whose constants were searched for small correlations.

This file is NumPy's part, for one range of a parameter at a time; it imports no JAX.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Rounding = Literal["dither", "nearest"]

DEFAULT_ROUNDING: Rounding = "dither"
"""Of new runs; decided by measurement, see docs/design.md."""

NEAREST = np.uint32(0x8000)
"""The dither of every element where weights are rounded to nearest."""

SECTION = 1 << 16
"""Consecutive elements of a parameter that follow each other in the table."""

SPREAD, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Of the hash of sections, in the order of use."""

ROUNDS = ((5, 0x1749), (5, 0xDF21), (7, 0x9C2F), (5, 1))
"""Of the permutation: a shift, by which a number is combined with itself, then a factor."""


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

    def key(self, name: str) -> int | None:
        """A 32-bit number for a parameter; None where every dither is `NEAREST`."""
        return None if self.seed is None else _key(self.seed, name)

    def dither(self, name: str, start: int, size: int) -> np.ndarray:
        """Dithers of elements [start, start + size) of a parameter: uint16 [size], or one for all.

        `start` counts in the flattened parameter and may be any number. Those of one section are a
        view of the table, which nobody may write to.
        """
        key = self.key(name)
        if key is None:
            return np.asarray(NEAREST)
        own: list[np.ndarray] = []
        done = 0
        while done < size or not own:
            section, index = divmod(start + done, SECTION)
            count = min(SECTION - index, size - done)
            first = (begin(key, section) + index) % SECTION
            own.append(TABLE_TWICE[first : first + count])
            done += count
        return own[0] if len(own) == 1 else np.concatenate(own)


def begin(key: int, section: int) -> int:
    """Where in the table a section of a parameter begins."""
    x = (key + section) * SPREAD % 2**32
    x = (x ^ x >> 16) * FIRST_FACTOR % 2**32
    x = (x ^ x >> 15) * SECOND_FACTOR % 2**32
    return (x ^ x >> 16) % SECTION


def check_rounding(rounding: object) -> None:
    """Whether there is a rounding of that name.

    Raises:
      ValueError: there is none.
    """
    if rounding not in get_args(Rounding):
        raise ValueError(f"weight_rounding={rounding!r}; allowed: {get_args(Rounding)}")


@functools.lru_cache(maxsize=4096)
def _key(seed: int, name: str) -> int:
    text = f"{seed}\n{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def _permutation() -> np.ndarray:
    x = np.arange(SECTION, dtype=np.uint32)
    for shift, factor in ROUNDS:
        x ^= x >> np.uint32(shift)
        x = x * np.uint32(factor) & np.uint32(SECTION - 1)
    return x.astype(np.uint16)


TABLE = _permutation()
"""uint16 [65536]."""

TABLE_TWICE = np.concatenate([TABLE, TABLE])
TABLE_TWICE.setflags(write=False)
"""The same, so that any section of it lies in one piece."""
