"""What gathers and sums over the devices of all hosts carry, within hosts and between them.

As `transfer/device_groups.py` carries them out: between hosts each byte of an array enters a host
once, within a host each device gets from the others what it lacks, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.strategy import Strategy


def network_bytes(num_bytes: float, num_hosts: int) -> float:
    """What a gather or a sum of an array brings into each host from the others."""
    return num_bytes * (num_hosts - 1) / num_hosts


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A gather, or a sum of which every device keeps its share.

    Attributes:
      seconds: of both parts of it.
      network_bytes: into each host from the others.
    """

    seconds: float
    network_bytes: float


def gather(num_parameters: float, strategy: Strategy, hardware: HardwareProfile) -> Collective:
    """Of weights, which travel as they were uploaded."""
    size = strategy.upload_bytes * num_parameters
    return _collective(size, size, hardware)


def gradient_sum(
    num_parameters: float, strategy: Strategy, hardware: HardwareProfile, *, in_fp32: bool
) -> Collective:
    """Of gradients: sums over microbatches are in fp32, and so are those of a host's devices.

    Args:
      num_parameters: of a chunk, with padding.
      strategy: how the step is run.
      hardware: devices and links.
      in_fp32: whether they are so in any case, as those of an embedding.
    """
    in_fp32 |= strategy.num_microbatches > 1
    accumulated = 4 if in_fp32 else strategy.gradient_bytes
    of_host = 4 if hardware.num_devices > 1 else accumulated
    return _collective(accumulated * num_parameters, of_host * num_parameters, hardware)


def _collective(within: float, between: float, hardware: HardwareProfile) -> Collective:
    """Args: bytes of the array as it travels within a host, and as between hosts."""
    devices, network = hardware.num_devices, network_bytes(between, hardware.num_hosts)
    within_s = within * ((devices - 1) / devices) / hardware.gather_bytes_per_s
    return Collective(
        seconds=within_s + network / hardware.network_bytes_per_s, network_bytes=network
    )
