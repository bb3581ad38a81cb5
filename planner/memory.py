"""Memory of one device and of the host under a strategy, by named category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slidedp_jax.planner.chunking import Chunks, chunk_stages
from slidedp_jax.planner.device_phases import device_use
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.host_use import host_use
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.planner.workload import BatchShape, Workload


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Predicted memory.

    Attributes:
      device: bytes by category on one device, at the phase where the sum is largest.
      device_phase: that phase.
      host: bytes by category in host memory, all devices together.
      pinned_pool_bytes: size of XLA's pool of page-locked memory within `host`.
    """

    device: Mapping[str, float]
    device_phase: str
    host: Mapping[str, float]
    pinned_pool_bytes: float

    @property
    def device_bytes(self) -> float:
        """Total of one device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Total of the host."""
        return sum(self.host.values())


def memory_use(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> MemoryUse:
    """Predict the memory of a run.

    Args:
      workload: the model.
      batch: rows of a step.
      strategy: how the step is run.
      hardware: number of devices and what they hold before the first array.
      optimizer_state_bytes: optimizer state per parameter in bytes, AdamW's 8 by default.
    """
    chunks = chunks_of(workload, strategy)
    device, phase = device_use(workload, chunks, batch, strategy, hardware, optimizer_state_bytes)
    host, pool = host_use(workload, chunks, strategy, hardware, optimizer_state_bytes)
    if hardware.unified_memory:
        host["compute_devices"] = hardware.num_devices * sum(device.values())
    return MemoryUse(device=device, device_phase=phase, host=host, pinned_pool_bytes=pool)


def chunks_of(workload: Workload, strategy: Strategy) -> Chunks:
    """The model as a strategy cuts it."""
    return chunk_stages(
        workload,
        strategy.layers_per_chunk,
        strategy.block_size,
        strategy.num_host_devices * strategy.num_hosts,
        strategy.vocab_slices,
    )


def device_bytes(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> float:
    """`memory_use(...).device_bytes` without the host's part."""
    chunks = chunks_of(workload, strategy)
    device, _ = device_use(workload, chunks, batch, strategy, hardware, optimizer_state_bytes)
    return sum(device.values())


def host_bytes(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> float:
    """`memory_use(...).host_bytes`, without the devices' part where that is another memory."""
    if hardware.unified_memory:
        use = memory_use(
            workload, batch, strategy, hardware, optimizer_state_bytes=optimizer_state_bytes
        )
        return use.host_bytes
    chunks = chunks_of(workload, strategy)
    host, _ = host_use(workload, chunks, strategy, hardware, optimizer_state_bytes)
    return sum(host.values())
