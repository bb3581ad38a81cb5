"""Checksums: of arrays that are read in pieces, and of the index that Zarr's shards end with.

`crc32` is that of zlib, from ISA-L where it is installed: the same value at five times the rate.
"""

from __future__ import annotations

import functools

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32 as crc32

_CRC32 = 0xEDB88320
_CRC32C = 0x82F63B78


def crc32_of_two(first: int, second: int, second_bytes: int) -> int:
    """`crc32` of two byte strings after each other, given that of each.

    The first one's remainder is multiplied by x^(8 n), n the length of the second, modulo the
    polynomial. Source: M. Adler, `crc32_combine` of zlib.
    """
    power, factor = second_bytes * 8, 0x80000000  # x^0; bits are reflected
    for square in _squares():
        if not power:
            break
        if power & 1:
            factor = _product(square, factor)
        power >>= 1
    return _product(factor, first) ^ second


@functools.cache
def _squares() -> tuple[int, ...]:
    """x^(2^k) modulo the polynomial, k from 0 on."""
    squares = [0x40000000]
    for _ in range(63):
        squares.append(_product(squares[-1], squares[-1]))
    return tuple(squares)


def _product(one: int, other: int) -> int:
    """Of two reflected polynomials, modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_CRC32 if other & 1 else 0)
    return product


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of a few bytes."""
    table, value = _crc32c_table(), 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C if value & 1 else 0)
        table.append(value)
    return tuple(table)
