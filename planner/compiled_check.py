"""Whether a plan holds for its programs as they were compiled.

The planner counts the arrays that are live while a program runs; what the program itself makes is
an estimate. XLA's account of the compiled program replaces it here, and everything else of the
plan stays as it was planned. On an H200 the two agree within 0.1 GiB for most programs
(`docs/benchmarks/plans_h200_*.json`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from slidedp_jax.planner.device_phases import (
    BACKWARD_PHASES,
    FRAGMENTATION,
    packed_attention_bytes,
    phases_on,
    resident_state_bytes,
)
from slidedp_jax.planner.device_sizes import DeviceSizes
from slidedp_jax.planner.hardware import size_text
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.memory import chunks_of
from slidedp_jax.planner.strategy import Strategy

UNLISTED = FRAGMENTATION / 2
"""Share of the arrays that has to be left beside them: the other half of what a plan leaves is for
programs that differ from it. Peaks were up to 1.5 % above the arrays that are listed."""

Work = Literal["forward", "head", "backward"]


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Memory of a compiled program on one device, bytes by XLA's account.

    Attributes:
      name: for the user, such as `backward layers.3-3`.
      work: what it does.
      chunks: the layer chunks that it runs for, counted from the lowest one; none of the head.
      adds: gradients of earlier microbatches are among its arguments, and it adds to them.
      sums_above: it also sums the gradient of the chunk above over the devices.
      temp: what it makes on its way.
      argument: what it is given.
      output: its results.
      alias: those that take the place of arguments.
    """

    name: str
    work: Work
    chunks: tuple[int, ...] = ()
    adds: bool = False
    sums_above: bool = False
    temp: int
    argument: int
    output: int
    alias: int

    @property
    def own_bytes(self) -> int:
        """What running it takes beside its arguments."""
        return self.temp + self.output - self.alias


@dataclass(frozen=True, kw_only=True)
class CheckedProgram:
    """A program beside its plan.

    Attributes:
      program: as compiled.
      planned_bytes: what was planned for its own.
    """

    program: ProgramMemory
    planned_bytes: float

    @property
    def more_bytes(self) -> float:
        """What it takes more than planned; negative: less."""
        return self.program.own_bytes - self.planned_bytes

    def record(self) -> dict[str, Any]:
        """For `run.json`; bytes."""
        return {
            "name": self.program.name,
            "planned": round(self.planned_bytes),
            "compiled": self.program.own_bytes,
            **{name: getattr(self.program, name) for name in ("temp", "argument", "output")},
            "alias": self.program.alias,
        }


@dataclass(frozen=True, kw_only=True)
class CompiledCheck:
    """A plan's memory of one device with compiled programs in it.

    Attributes:
      programs: each beside its plan.
      planned_bytes: what the plan needs.
      need_bytes: what it needs with the programs as compiled, and the share that is not listed.
      phase: where in a step that is.
      beyond_bytes: what the largest phase takes more than planned; 0 where it does not.
      budget_bytes: what the device is allowed.
    """

    programs: tuple[CheckedProgram, ...]
    planned_bytes: float
    need_bytes: float
    phase: str
    beyond_bytes: float
    budget_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the plan holds."""
        return self.need_bytes <= self.budget_bytes

    def record(self) -> dict[str, Any]:
        """For `run.json`; bytes."""
        return {
            "planned": round(self.planned_bytes),
            "compiled": round(self.need_bytes),
            "budget": round(self.budget_bytes),
            "phase": self.phase,
            "programs": [one.record() for one in self.programs],
        }

    def describe(self) -> str:
        """One line: the device's memory, and the programs that take most."""
        return (
            f"device memory with the compiled programs {size_text(self.need_bytes)} of "
            f"{size_text(self.budget_bytes)} (planned {size_text(self.planned_bytes)}); what they "
            f"take themselves: {self._programs_text(3)}"
        )

    def exceeded(self) -> str:
        """Why the plan does not hold."""
        return (
            "the programs of this plan, compiled, take more than planned: "
            f"{self._programs_text(2)}. With them a device needs {size_text(self.need_bytes)} "
            f"({self.phase}), and has {size_text(self.budget_bytes)}"
        )

    def _programs_text(self, count: int) -> str:
        """Those of each kind of work that take most; where the plan fails, those it fails by."""
        if self.fits:
            largest = sorted(self.programs, key=lambda one: -one.program.own_bytes)
        else:
            largest = sorted(self.programs, key=lambda one: -one.more_bytes)
        found = {one.program.work: one for one in reversed(largest)}
        kinds = dict.fromkeys(one.program.work for one in largest)
        return ", ".join(
            f"{one.program.name} {size_text(one.program.own_bytes)} (planned "
            f"{size_text(one.planned_bytes)})"
            for one in [found[work] for work in kinds][:count]
        )


def compiled_check(
    job: Job, strategy: Strategy, programs: Sequence[ProgramMemory], *, held_back: float = 0.0
) -> CompiledCheck:
    """A plan's memory with its programs as compiled.

    Args:
      job: model, batch, machine and budgets.
      strategy: the plan's.
      programs: those of its step that take most.
      held_back: bytes within the machine's reserve that a plan leaves for what programs take more.
    """
    chunks = chunks_of(job.workload, strategy)
    hardware = job.hardware
    sizes = DeviceSizes(job.workload, chunks, job.batch, strategy, hardware.total_devices)
    packed = packed_attention_bytes(job.workload, job.batch, strategy)
    own = partial(_planned_own, sizes, 0.0 if hardware.unified_memory else packed)
    checked = tuple(
        CheckedProgram(program=program, planned_bytes=own(program)) for program in programs
    )
    phases = {
        name: sum(parts.values())
        for name, parts in phases_on(job.workload, chunks, job.batch, strategy, hardware).items()
    }
    lasting = resident_state_bytes(chunks, strategy, hardware, job.optimizer_state_bytes)
    compiled = dict(phases)
    more: dict[str, float] = {}
    for one in checked:
        for phase in _phases_of(one.program, sizes, phases.keys()):
            more[phase] = max(one.more_bytes, more.get(phase, one.more_bytes))
    for phase, delta in more.items():
        compiled[phase] += delta
    phase = max(compiled, key=lambda name: compiled[name])
    reserve = hardware.device_reserve_bytes - held_back
    return CompiledCheck(
        programs=checked,
        planned_bytes=job.device_bytes(strategy) - held_back,
        need_bytes=(1 + UNLISTED) * (compiled[phase] + lasting) + reserve,
        phase=phase,
        beyond_bytes=max(0.0, compiled[phase] - max(phases.values())),
        budget_bytes=job.device_budget_bytes,
    )


def _planned_own(sizes: DeviceSizes, packed: float, program: ProgramMemory) -> float:
    """What of a phase's arrays is made by the program itself."""
    x = sizes.boundary_microbatch
    if program.work == "forward":
        workspace = sizes.per_microbatch("forward_workspace_elements")
        return workspace + x + sizes.left_by_forward(max(program.chunks))
    if program.work == "head":
        given = sizes.head_sum if program.adds else 0.0
        # Its input after the norm too: the list has weights in its stead that are free by then.
        return sizes.logits + sizes.head_gradient + 2 * x - given
    workspace = max(sizes.per_microbatch("backward_workspace_elements"), packed)
    given = 4.0 * sizes.chunks.most_trained.trained_parameters if program.adds else 0.0
    summed = 0.0
    if program.sums_above:
        above = sizes.chunks.all[max(program.chunks) + 2]
        summed = sizes.summed_beside(above) - sizes.accumulated(above)
    return (
        sizes.residuals_of(max(program.chunks))
        + workspace
        + sizes.gradient(sizes.chunks.most_trained)
        + x
        + summed
        - given
    )


def _phases_of(program: ProgramMemory, sizes: DeviceSizes, there: Collection[str]) -> set[str]:
    """Phases in which the program runs while most is live beside it."""
    if program.work != "backward":
        return {"forward" if program.work == "forward" else "loss"}
    below = len(sizes.chunks.layers) - sizes.num_kept
    backward, recompute, first = BACKWARD_PHASES
    found = set()
    for chunk in program.chunks:
        found.add(backward if chunk >= below or recompute not in there else recompute)
        if chunk == sizes.chunks.forward_only:
            found.add(first)
    return found
