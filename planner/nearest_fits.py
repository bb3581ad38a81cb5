"""The nearest jobs that fit, each tried: larger memories, more GPUs, shorter and fewer rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slidedp_jax.planner.bisection import smallest
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.process_limits import usable_device_bytes
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.request_check import may_be_asked
from slidedp_jax.planner.workload import BatchShape

MOST_HOST_GIB, MOST_DEVICE_GIB = 16384, 1024
"""Larger memories are not looked for."""

MOST_DEVICES = 8
SHORTEST_ROW = 256
ROW_UNIT = 256
"""Lengths of rows that are tried are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """What a command calls memories, in GiB.

    Attributes:
      host: what the host has; None where that cannot be said.
      device: what each GPU has; None as above.
      host_budget: what of it may be used.
      device_budget: the same of each GPU.
      host_budget_is_stated: a larger host alone would leave it as it is.
      device_budget_is_stated: the same of larger GPUs.
    """

    host: str | None
    device: str | None
    host_budget: str
    device_budget: str
    host_budget_is_stated: bool = False
    device_budget_is_stated: bool = False


def larger_memories(request: Request, limits: Sequence[Limit], flags: MemoryFlags) -> list[str]:
    """The least host memory, or size of each GPU, with which the job fits, the other as it is.

    Args:
      request: of which nothing fits.
      limits: what the leanest strategy exceeds.
      flags: how they are asked for.
    """
    job, hardware = request.job, request.job.hardware
    alone = {limit.name: limit.need_bytes for limit in limits} if len(limits) == 1 else {}

    def fits_host(gib: int) -> bool:
        return request.other(host_bytes=gib * GIB).fits()

    def fits_device(gib: int) -> bool:
        return request.other(device_bytes=usable(gib)).fits()

    def usable(gib: int) -> float:
        """Of GPUs of that size, or of these GPUs where they are larger."""
        if gib * GIB <= hardware.device_memory_bytes:
            return gib * GIB
        found = usable_device_bytes(gib * GIB, hardware.device_reserve_bytes)
        # As a budget is written, which is all of it.
        return math.floor(100 * found / GIB) * GIB / 100 if flags.device_budget_is_stated else found

    lines = []
    enough = _whole_gib(lambda gib: gib * GIB, alone.get("host memory"))
    gib = _least_gib(fits_host, job.host_budget_bytes, MOST_HOST_GIB, enough)
    if gib is not None:
        within = gib * GIB <= hardware.host_memory_bytes
        words = _flags(flags.host_budget if within else flags.host, gib)
        if words and not within and flags.host_budget_is_stated:
            words += f" {flags.host_budget} {gib}"
        lines.append(_fits(f"{gib:,} GiB of host memory", words))
    if hardware.unified_memory:
        return lines
    enough = _whole_gib(usable, alone.get("device memory"))
    gib = _least_gib(fits_device, job.device_budget_bytes, MOST_DEVICE_GIB, enough)
    if gib is not None:
        within = gib * GIB <= hardware.device_memory_bytes
        what = f"{gib:,} GiB of each GPU" if within else f"GPUs of {gib:,} GiB"
        words = _flags(flags.device_budget if within else flags.device, gib)
        if words and not within and flags.device_budget_is_stated:
            words += f" {flags.device_budget} {usable(gib) / GIB:.2f}"
        lines.append(_fits(what, words))
    return lines


def _flags(flag: str | None, value: int) -> str:
    return "" if flag is None else f"{flag} {value}"


def _fits(what: str, flags: str) -> str:
    return f"with {what} it fits" + (f" ({flags})" if flags else "")


def _whole_gib(usable: Callable[[int], float], need_bytes: float | None) -> int | None:
    """The fewest whole GiB of which so many bytes are usable; None of None."""
    if need_bytes is None:
        return None
    gib = math.floor(need_bytes / GIB)
    while usable(gib) < need_bytes:
        gib += 1
    return gib


def _least_gib(
    fits: Callable[[int], bool], have_bytes: float, most: int, enough: int | None
) -> int | None:
    """The fewest whole GiB that fit, from what there is to `most`; None if not even that does.

    Args:
      fits: whether so many do.
      have_bytes: what there is.
      most: where to end.
      enough: what is known to fit, and hardly more than the least.
    """
    least = math.floor(have_bytes / GIB) + 1
    if enough is None:
        enough = least
        while not fits(enough):
            if enough >= most:
                return None
            least, enough = enough + 1, min(2 * enough, most)
    room = enough - least
    return least + smallest(lambda more: fits(least + more), room, room - 1)


def more_devices(
    request: Request, machine: Callable[[int], HardwareProfile], flag: str
) -> list[str]:
    """The fewest GPUs, twice as many or twice that, on which the job fits.

    Args:
      request: of which nothing fits.
      machine: the host with a number of GPUs.
      flag: says how many they are.
    """
    number = 2 * request.job.hardware.num_devices
    while number <= min(MOST_DEVICES, request.job.batch.num_rows):
        hardware = machine(number)
        other = request.other(hardware=hardware)
        if may_be_asked(other) and other.fits():
            host = f"{hardware.host_memory_bytes / GIB:,.0f} GiB of host memory"
            return [_fits(f"{number} x {hardware.name} and {host}", _flags(flag, number))]
        number *= 2
    return []


def longest_row(request: Request) -> int | None:
    """The longest rows, as many of them, with which the job fits; a multiple of `ROW_UNIT`.

    None if not even `SHORTEST_ROW` tokens do, or rows are no longer.
    """
    now = request.job.batch.seq_length
    if now <= SHORTEST_ROW or not shorter(request, SHORTEST_ROW).fits():
        return None
    units = -(-now // ROW_UNIT) - 1
    too_long = smallest(lambda n: not shorter(request, max(1, n) * ROW_UNIT).fits(), units + 1)
    return max(1, too_long - 1) * ROW_UNIT


def shorter(request: Request, seq_length: int) -> Request:
    """The same with as many rows of fewer tokens; documents of packed rows are cut."""
    batch, lengths = request.job.batch, request.job.batch.document_lengths
    if lengths is not None:
        lengths = tuple(_cut(lengths, seq_length))
    documents = batch.documents_per_row
    return request.other(
        batch=BatchShape(
            num_rows=batch.num_rows,
            seq_length=seq_length,
            document_lengths=lengths,
            documents_per_row=None if documents is None else min(documents, seq_length),
        )
    )


def _cut(lengths: Iterable[int], room: int) -> Iterable[int]:
    for length in lengths:
        if room <= 0:
            return
        yield min(length, room)
        room -= length
