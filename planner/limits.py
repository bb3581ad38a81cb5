"""Where a strategy does not fit: the limit, the need, what dominates it and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.memory import MemoryUse

LimitName = Literal["device memory", "host memory"]

_NOT_TO_CHANGE = ("runtime_reserve", "allocator_fragmentation")

_ADVICE: Mapping[str, str] = {
    "layer_weights": "use devices with more memory: a window of single layers does not fit",
    "embedding_weights": "use devices with more memory",
    "head_weights": "use devices with more memory",
    "boundary_activations": "use fewer tokens per step and device (fewer rows, or more devices)",
    "recompute_residuals": "use shorter sequences",
    "kept_chunks": "keep fewer chunks",
    "kept_attention": "keep the attention of fewer chunks",
    "decided": "use fewer tokens per step and device (fewer rows, or more devices)",
    "resident_state": "leave the state of more chunks on the host",
    "resident_gradients": "leave the state of more chunks on the host",
    "layer_workspace": "use shorter sequences",
    "packed_attention": "use shorter rows, rows without packing, or drop very short documents: the "
    "workspace grows with the documents of a row",
    "layer_gradients": "use devices with more memory",
    "embedding_gradient_sum": "use devices with more memory",
    "embedding_gradient": "use devices with more memory",
    "head_gradient": "use devices with more memory",
    "logits": "use a smaller --loss_chunk_tokens; where the loss is the model's own, fewer tokens "
    "per microbatch, or in that loss models.loss.cross_entropy_sum with a smaller chunk_tokens",
    "hidden_gradient": "use fewer tokens per step and device (fewer rows, or more devices)",
    "batch_arrays": "use fewer tokens per step",
    "master_weights": "use a host with more memory or a smaller model: 4 bytes per parameter are "
    "the least",
    "optimizer_state": "use an optimizer with less state (--optim lion keeps 4 bytes per "
    "parameter where adamw keeps 8, adafactor next to none), freeze parameters (--freeze), or use "
    "a host with more memory",
    "state_in_passing": "leave the embedding's state on the host, or use fewer layers per chunk",
    "waiting_gradients": "use bfloat16 compute (--dtype of training, --compute_dtype of plans) or "
    "--gradient_route reduce_scatter",
    "host_boundaries": "use fewer tokens per step, or more --layers_per_chunk",
    "resident_copies": "leave all state on the host (--resident_state false), or use fewer "
    "--layers_per_chunk",
    "pinned_pool_overhead": "use fewer --layers_per_chunk",
    "several_gpus": "use fewer GPUs or a host with more memory",
    "compute_devices": "use fewer compute devices or fewer tokens per step",
}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit that is exceeded.

    Attributes:
      name: which memory.
      need_bytes: predicted use.
      have_bytes: the budget.
      dominant: the largest category that a change of the job can reduce.
      dominant_bytes: its size.
    """

    name: LimitName
    need_bytes: float
    have_bytes: float
    dominant: str
    dominant_bytes: float

    @property
    def advice(self) -> str:
        """What to change."""
        return _ADVICE[self.dominant]

    def describe(self) -> str:
        """One line for the user."""
        return (
            f"{self.name}: needs {size_text(self.need_bytes)}, has {size_text(self.have_bytes)}; "
            f"largest part {self.dominant} {size_text(self.dominant_bytes)}; {self.advice}"
        )


def exceeded_limits(
    memory: MemoryUse, device_budget_bytes: float, host_budget_bytes: float
) -> tuple[Limit, ...]:
    """All limits that `memory` exceeds, none when it fits.

    Args:
      memory: predicted use.
      device_budget_bytes: what each device may use.
      host_budget_bytes: what the host may use.
    """
    checks: tuple[tuple[LimitName, Mapping[str, float], float], ...] = (
        ("device memory", memory.device, device_budget_bytes),
        ("host memory", memory.host, host_budget_bytes),
    )
    return tuple(
        _limit(name, parts, budget)
        for name, parts, budget in checks
        if sum(parts.values()) > budget
    )


def _limit(name: LimitName, parts: Mapping[str, float], budget: float) -> Limit:
    changeable = {part: size for part, size in parts.items() if part not in _NOT_TO_CHANGE}
    dominant = max(changeable, key=lambda part: changeable[part])
    return Limit(
        name=name,
        need_bytes=sum(parts.values()),
        have_bytes=budget,
        dominant=dominant,
        dominant_bytes=changeable[dominant],
    )
