"""The README's table of what models need on which machine, made by the planner.

    python scripts/make/make_needs_table.py            print it
    python scripts/make/make_needs_table.py --write    put it into the README

Rows of 4,096 tokens, AdamW in fp32, clipped, bf16 compute. Machines are those that the planner
assumes; where only their host memory is too small, what is needed is taken, and that is marked.
So `plan` with the same words gives the same figures, or says that the host has no room.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.disk import disk_use
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, HardwareProfile
from slidedp_jax.planner.optimizers import OptimizerName, state_bytes
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.process_limits import DEVICE_MEMORY_FRACTION
from slidedp_jax.planner.search import Plan, plan
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.planner.workload import BatchShape, Workload

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN = "<!-- made by scripts/make/make_needs_table.py -->"
END = "<!-- end of what was made -->"

MODELS = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-4B": "qwen3-4b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-14B": "qwen3-14b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen2.5-72B": "qwen2.5-72b",
}
MACHINES = {
    "RTX 4090": ("rtx4090", 1),
    "A100 80 GB": ("a100-80g", 1),
    "H100": ("h100", 1),
    "8 H100": ("h100", 8),
}
SEQ_LENGTH = 4096
TOKENS_PER_DEVICE = (32_768, 16_384, 8_192, 4_096)
"""Tokens of a step and GPU, the first that fits."""

ENOUGH_GIB = 8192
"""Host memory in which every model of the table fits."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a model takes on a machine.

    Attributes:
      hours: of ten million tokens.
      host_gib: host memory, saving included.
      tokens_per_device: of a step.
      beyond_host: that is more than the host has that is assumed beside the card.
    """

    hours: float
    host_gib: float
    tokens_per_device: int
    beyond_host: bool = False

    def __str__(self) -> str:
        smaller = "" if self.tokens_per_device == TOKENS_PER_DEVICE[0] else "*"
        minutes = math.ceil(60 * self.hours)
        time = f"{minutes} min" if minutes < 100 else f"{self.hours:.1f} h"
        return f"{time}{smaller}, {self.host_gib:,.0f} GiB{' †' if self.beyond_host else ''}"


def planned(
    preset: str,
    hardware: HardwareProfile,
    tokens_per_device: int,
    *,
    host_gib: float | None = ENOUGH_GIB,
    **others: Any,
) -> Plan:
    """The fastest plan on a machine with memory enough in its host.

    `host_gib`: of the host; None: as the hardware has it.

    Raises:
      PlanError: there is no room.
    """
    if host_gib is not None:
        hardware = replace(hardware, host_memory_bytes=host_gib * GIB)
    rows = hardware.num_devices * tokens_per_device // SEQ_LENGTH
    return plan(
        Workload.from_config(named_config(preset), name=preset),
        BatchShape(num_rows=rows, seq_length=SEQ_LENGTH),
        hardware,
        **others,
    )


def cell(preset: str, hardware: HardwareProfile) -> Cell | None:
    """Hours and host memory of the largest steps that fit the devices; None: none does."""
    for tokens in TOKENS_PER_DEVICE:
        for host_gib in (None, ENOUGH_GIB):
            try:
                chosen = planned(preset, hardware, tokens, host_gib=host_gib).chosen
            except PlanError:
                continue
            return Cell(
                hours=1e7 / chosen.time.tokens_per_s / 3600,
                host_gib=chosen.memory.host_bytes / GIB,
                tokens_per_device=tokens,
                beyond_host=host_gib is not None,
            )
    return None


def smallest_gpu_gib(preset: str) -> int:
    """Memory of the smallest GPU that a step of one row of 4,096 tokens fits, all state outside."""
    hardware = PRESETS["rtx4090"]
    try:
        planned(preset, hardware, SEQ_LENGTH, device_budget_bytes=1.0)
    except PlanError as error:
        (need,) = (limit.need_bytes for limit in error.limits if limit.name == "device memory")
    in_allocator = (need - hardware.device_reserve_bytes) / DEVICE_MEMORY_FRACTION
    return math.ceil(max(need, in_allocator) / GIB)


def host_gib(preset: str, optimizer: OptimizerName) -> float:
    """Host memory with all state there."""
    shapes = named_config(preset).parameter_shapes()
    per_parameter = state_bytes(optimizer, shapes) / named_config(preset).num_parameters
    chosen = planned(
        preset,
        PRESETS["h200"],
        SEQ_LENGTH,
        optimizer_state_bytes=per_parameter,
        resident_state=False,
        choices=Choices(layers_per_chunk=1),
    ).chosen
    return chosen.memory.host_bytes / GIB


def disk_gib(preset: str) -> float:
    """Checkpoints and export, by default settings."""
    use = disk_use(named_config(preset).num_parameters, ADAMW_STATE_BYTES)
    return use.total_bytes / GIB


def row(name: str) -> str:
    """A model's line."""
    preset = MODELS[name]
    columns = [
        name,
        f"{host_gib(preset, 'adamw'):,.0f} / {host_gib(preset, 'lion'):,.0f} GiB",
        f"{smallest_gpu_gib(preset)} GiB",
        f"{disk_gib(preset):,.0f} GiB",
    ]
    for hardware, num_devices in MACHINES.values():
        found = cell(preset, PRESETS[hardware].with_devices(num_devices))
        columns.append("-" if found is None else str(found))
    return f"| {' | '.join(columns)} |"


def table(names: Iterable[str] = MODELS) -> list[str]:
    """The table's lines, with those models."""
    heads = ["model", "host memory, AdamW / Lion", "smallest GPU", "disk", *MACHINES]
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *map(row, names)]


def with_table(text: str, lines: Sequence[str]) -> str:
    """A page with the lines between its marks."""
    before, after = text.split(f"{BEGIN}\n")[0], text.split(END)[1]
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into the README")
    args = parser.parse_args()
    lines = table()
    print(*lines, sep="\n")
    if args.write:
        README.write_text(with_table(README.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
