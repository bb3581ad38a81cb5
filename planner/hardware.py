"""Equal hosts with GPUs as the planner sees them: rates and sizes; `presets.py` has known ones.

Rates are what programs reach, not what data sheets promise; only `peak_flops_per_s`, the
denominator of MFU, is the promised one. A profile describes one host, all the GPUs that the job
uses on it, and how many such hosts there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from slidedp_jax.planner.process_limits import pinned_pool_limit_gib

GIB = 2**30
MIB = 2**20


def size_text(num_bytes: float) -> str:
    """Bytes for people, in GiB or, where that says little, in MiB."""
    if num_bytes >= 0.1 * GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"


HOST_UPDATE_GROWTH = 0.5
"""Exponent with which the host update's rate grows with a host's share. Measured within steps on
hosts with H200s: 3.1e9 parameters/s on 16 cores beside one GPU, 4.2-4.7e9 on 32 beside two."""

ASSUMED_GROUPED_MATMUL_SHARE = 0.5
"""Rate of experts' products over that of plain ones, where it was not measured."""

ASSUMED_NETWORK_BYTES_PER_S = 0.8 * 400e9 / 8
"""Of one 400 Gb/s adapter per host, where nothing is stated: four fifths of its line rate."""

ComputeDtype = Literal["bfloat16", "float32"]
COMPUTE_DTYPES: tuple[ComputeDtype, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """Copy rate between host memory and one GPU by size of the copy.

    Small copies are slower: the rate alone would hide it, so seconds are interpolated linearly in
    bytes between the measured sizes (latency plus bandwidth piece by piece), below the smallest
    along the first piece, above the largest at its rate.

    Attributes:
      points: (bytes of one copy, bytes per second), sizes ascending, at least one.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Checks that more bytes never take less time."""
        if not self.points or not all(0 < x < math.inf for point in self.points for x in point):
            raise ValueError(
                f"a link rate needs (bytes, bytes per second) pairs above 0, got {self.points}."
            )
        sizes = [size for size, _ in self.points]
        seconds = [size / rate for size, rate in self.points]
        if sizes != sorted(set(sizes)) or seconds != sorted(seconds):
            raise ValueError(
                f"sizes and copy times of a link rate must grow from point to point, got "
                f"{self.points}; measure again, or drop the outlier."
            )

    def seconds(self, num_bytes: float) -> float:
        """Time of one copy of `num_bytes` while nothing else uses the link."""
        if num_bytes <= 0:
            return 0.0
        last_size, last_rate = self.points[-1]
        if num_bytes >= last_size:
            return num_bytes / last_rate
        if len(self.points) == 1:
            return num_bytes / last_rate
        upper = next(i for i, (size, _) in enumerate(self.points) if size >= num_bytes)
        upper = max(upper, 1)
        (size_a, rate_a), (size_b, rate_b) = self.points[upper - 1 : upper + 1]
        time_a, time_b = size_a / rate_a, size_b / rate_b
        slope = (time_b - time_a) / (size_b - size_a)
        return max(time_a + slope * (num_bytes - size_a), num_bytes / last_rate)


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """`num_hosts` equal hosts, each with `num_devices` equal GPUs.

    Attributes:
      name: for reports.
      provenance: how the figures were obtained, one line, printed with every plan.
      num_devices: GPUs that the job uses on each host.
      device_memory_bytes: memory of one GPU that the job may use: what JAX's allocator takes, and
        the reserve beside it.
      device_reserve_bytes: what one GPU holds before the first array: context, kernels,
        communication buffers, library workspaces.
      peak_flops_per_s: dense bf16 peak of one GPU, the denominator of MFU.
      bf16_matmul_flops_per_s: reached by large bf16 matrix products on one GPU.
      fp32_matmul_flops_per_s: reached by large fp32 matrix products on one GPU.
      grouped_matmul_share: of those rates, what products reach whose rows are grouped by expert,
        uneven groups and padding included.
      attention_flops_per_s: reached by the fused attention kernel, forward and backward together,
        counting only pairs that attend, on rows of 4,096 tokens (`flops.faster_attention`).
      device_memory_bytes_per_s: reached by element-wise programs on one GPU.
      h2d: host to one GPU.
      d2h: one GPU to host.
      duplex_bytes_per_s: both directions of one GPU's link together.
      gather_bytes_per_s: bytes that an all-gather or reduce-scatter brings into each GPU per
        second; unused when `num_devices` is 1.
      num_host_cores: cores of the host that the job may use.
      host_memory_bytes: host memory that the job may use.
      host_reserve_bytes: host memory of the process beside the training state: interpreter,
        libraries, CUDA's host side, compiled programs, batches.
      host_memory_bytes_per_s: reached by in-place updates from all cores (triad), shared by the
        host update and all links.
      host_update_params_per_s: parameters per second of the AdamW host update with nothing beside.
      copy_gap_s: seconds that each further piece adds to an upload; a chunk comes in as many pieces
        as the host state is sharded over.
      visit_dispatch_s: Python's time for a chunk's forward or backward without its upload.
      upload_call_s: Python's time for one piece of an upload.
      upload_call_per_device_s: the same for each device that takes part.
      step_end_s: between a step's last gradient and the next step's first program: the norm's way
        to the host, what is decided there, and Python's way into the next step.
      stated_pinned_limit_bytes: limit of the pool of page-locked memory; None: what `configure()`
        sets on such a host.
      most_host_memory_bytes_per_s: what a host with as many GPUs as it takes reaches in all; None:
        not known.
      peer_access: the GPUs read each other's memory; else what passes between them goes through the
        host, which `gather_bytes_per_s` says as well.
      unified_memory: the compute devices live in host memory (the CPU backend).
      num_hosts: hosts that train together, H.
      network_bytes_per_s: bytes that collectives bring into each host per second from the others,
        while as many leave it; unused for a single host.
    """

    name: str
    provenance: str
    num_devices: int
    device_memory_bytes: float
    device_reserve_bytes: float
    peak_flops_per_s: float
    bf16_matmul_flops_per_s: float
    fp32_matmul_flops_per_s: float
    attention_flops_per_s: float
    device_memory_bytes_per_s: float
    h2d: LinkRate
    d2h: LinkRate
    duplex_bytes_per_s: float
    gather_bytes_per_s: float
    num_host_cores: int
    host_memory_bytes: float
    host_reserve_bytes: float
    host_memory_bytes_per_s: float
    host_update_params_per_s: float
    grouped_matmul_share: float = ASSUMED_GROUPED_MATMUL_SHARE
    copy_gap_s: float = 0.0
    visit_dispatch_s: float = 0.0
    upload_call_s: float = 0.0
    upload_call_per_device_s: float = 0.0
    step_end_s: float = 0.0
    stated_pinned_limit_bytes: float | None = None
    most_host_memory_bytes_per_s: float | None = None
    peer_access: bool = True
    unified_memory: bool = False
    num_hosts: int = 1
    network_bytes_per_s: float = ASSUMED_NETWORK_BYTES_PER_S

    def __post_init__(self) -> None:
        """Rejects what no machine has, such as numbers that would divide by zero later."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if (must := _must_be(name, value)) is not None:
                raise ValueError(
                    f"hardware profile {self.name!r}: {name} is {value!r}; it must be {must}."
                )

    @property
    def total_devices(self) -> int:
        """GPUs of all hosts, G."""
        return self.num_hosts * self.num_devices

    @property
    def devices_text(self) -> str:
        """How many of which there are."""
        devices = f"{self.num_devices} x {self.name}"
        return devices if self.num_hosts == 1 else f"{self.num_hosts} hosts of {devices}"

    @property
    def pinned_pool_limit_bytes(self) -> float:
        """Limit of the pool of page-locked memory."""
        if self.stated_pinned_limit_bytes is not None:
            return self.stated_pinned_limit_bytes
        return float(pinned_pool_limit_gib(self.host_memory_bytes) * GIB)

    def matmul_flops_per_s(self, dtype: ComputeDtype) -> float:
        """Rate of large matrix products in `dtype` on one GPU."""
        return self.bf16_matmul_flops_per_s if dtype == "bfloat16" else self.fp32_matmul_flops_per_s

    def with_devices(self, num_devices: int) -> HardwareProfile:
        """The same kind of host grown or shrunk to `num_devices` GPUs.

        Cores, host memory and its bandwidth (as far as a host goes) grow with the GPUs, as on
        rented machines, whose host share is sold per GPU; the rate of the host update by
        `HOST_UPDATE_GROWTH`. Set them with `dataclasses.replace` where the host is known.

        Raises:
          ValueError: `num_devices` is below 1.
        """
        if num_devices < 1:
            raise ValueError(f"num_devices is {num_devices}; a job needs at least one.")
        share = num_devices / self.num_devices
        most = self.most_host_memory_bytes_per_s or math.inf
        return replace(
            self,
            num_devices=num_devices,
            num_host_cores=max(1, int(self.num_host_cores * share)),
            host_memory_bytes=self.host_memory_bytes * share,
            host_memory_bytes_per_s=min(self.host_memory_bytes_per_s * share, most),
            host_update_params_per_s=self.host_update_params_per_s * share**HOST_UPDATE_GROWTH,
            # Of the memory before.
            stated_pinned_limit_bytes=self.stated_pinned_limit_bytes if share == 1 else None,
        )


_COUNTS = ("num_devices", "num_hosts", "num_host_cores")
_WORDS = ("name", "provenance")
_YES_OR_NO = ("peer_access", "unified_memory")
_LINKS = ("h2d", "d2h")
_OR_NONE = ("stated_pinned_limit_bytes", "most_host_memory_bytes_per_s")
_OR_ZERO = (
    "device_reserve_bytes",
    "host_reserve_bytes",
    "copy_gap_s",
    "visit_dispatch_s",
    "upload_call_s",
    "upload_call_per_device_s",
    "step_end_s",
)


def _must_be(name: str, value: Any) -> str | None:
    """What a field of a profile has to be; None: it is. The rest are positive numbers."""
    for names, kind, what in (
        (_WORDS, str, "text"),
        (_YES_OR_NO, bool, "true or false"),
        (_LINKS, LinkRate, "a link rate"),
    ):
        if name in names:
            return None if isinstance(value, kind) else what
    if value is None and name in _OR_NONE:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = number and math.isfinite(value)
    if name in _COUNTS:
        return None if number and isinstance(value, int) and value >= 1 else "a positive integer"
    if name in _OR_ZERO:
        return None if number and value >= 0 else "a number, 0 or more"
    return None if number and value > 0 else "a positive number"
