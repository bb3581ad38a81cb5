"""Where a program will run, as far as the choice of kernels depends on it. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ComputeTarget:
    """Where a program will run.

    Attributes:
      platform: `cpu`, `cuda`, `rocm`, ...
      compute_capability: of an NVIDIA GPU (9.0 for Hopper), else None.
      device_kind: as JAX spells it; what was measured is looked up by it.
    """

    platform: str
    compute_capability: float | None = None
    device_kind: str = ""
