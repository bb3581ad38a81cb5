"""What optimizers cost that read whole matrices on the host, beside reading and writing state.

Muon orthogonalises the momentum of each matrix [m, n], m <= n, by five iterations of Newton and
Schulz (K. Jordan et al., Muon, 2024): A = X X^T, B = b A + c A A, X = a X + B X, which is
2 m m n + 2 m m m + 2 m m n operations each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.optimizers import (
    WHOLE_PARAMETER_OPTIMIZERS,
    OptimizerName,
    Shape,
    muon_updates,
)
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES, MASTER_BYTES

ITERATIONS = 5

FLOPS_PER_CORE_S = 3.6e10
"""Of such products in fp32 on a host, per core. Muon on 16 cores beside an H200 took 19 s a step
for the 1.1e13 operations of Qwen3-0.6B, copies and all; nothing else was measured."""

COPY_S, CORE_S = 1.5e-9, 9.2e-9
"""Seconds per parameter of Adafactor's update beside its traffic in memory: copies by one thread,
and programs of one core each.

On two cores it took 7.1 ns per parameter in all, 1.0 of them for 10 bytes of traffic where AdamW's
26 took 2.6, and a quarter of the rest in copies; no other host was measured."""

GRADIENT_BYTES = 2


def update_flops(optimizer: OptimizerName | None, shapes: Mapping[str, Shape]) -> float:
    """Operations of matrix products in one update of all parameters.

    Args:
      optimizer: by name; None where only the bytes of its state are known.
      shapes: of the trained parameters, by full name.
    """
    if optimizer != "muon":
        return 0.0
    total = 0.0
    for name, shape in shapes.items():
        if muon_updates(name, shape):
            m, n = sorted(shape)
            total += ITERATIONS * (4.0 * m * m * n + 2.0 * m**3)
    return total


def whole_parameters(optimizer: OptimizerName | None, shapes: Mapping[str, Shape]) -> int:
    """Parameters that are updated a matrix at a time, where that is not counted by products.

    Args:
      optimizer: by name; None where only the bytes of its state are known.
      shapes: of the trained parameters, by full name.
    """
    return sum(map(math.prod, shapes.values())) if optimizer == "adafactor" else 0


def whole_update_note(optimizer: OptimizerName | None) -> str | None:
    """What is to be said of a forecast with such an optimizer; None of any other."""
    if optimizer not in WHOLE_PARAMETER_OPTIMIZERS:
        return None
    if optimizer == "muon":
        return (
            "muon updates whole matrices on the host: its products are predicted at the rate of "
            f"one measurement, {FLOPS_PER_CORE_S / 1e9:.0f} GFLOP/s per core"
        )
    return (
        f"{optimizer} updates whole matrices on the host: its time is predicted from one "
        "measurement on two cores"
    )


def with_update_flops(
    hardware: HardwareProfile,
    flops: float,
    *,
    num_parameters: int,
    optimizer_state_bytes: float,
    num_whole: int = 0,
) -> HardwareProfile:
    """The machine with the rate of the host update at which all of it takes as long as it does.

    Per chunk the products are spread evenly over parameters, though only layers have them.

    Args:
      hardware: the machine.
      flops: what `update_flops` gave.
      num_parameters: that are planned as updated.
      optimizer_state_bytes: state per parameter in bytes.
      num_whole: what `whole_parameters` gave.
    """
    if not flops and not num_whole:
        return hardware
    adamw_bytes = 2.0 * (MASTER_BYTES + ADAMW_STATE_BYTES) + GRADIENT_BYTES
    moved = 2.0 * (MASTER_BYTES + optimizer_state_bytes) + GRADIENT_BYTES
    # Seconds of AdamW's traffic at the usual rate that would be as many.
    bytes_s = num_parameters * moved / (adamw_bytes * hardware.host_update_params_per_s)
    seconds = bytes_s + flops / (FLOPS_PER_CORE_S * hardware.num_host_cores)
    seconds += num_whole * (COPY_S + CORE_S / hardware.num_host_cores)
    rate = num_parameters * moved / (adamw_bytes * seconds)
    return replace(hardware, host_update_params_per_s=rate)
