"""What is to be planned, and whether anything at all fits: much cheaper than what is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slidedp_jax.planner.candidates import PREFETCH_DEPTHS, Choices, candidates
from slidedp_jax.planner.fitting import sort_by_fit
from slidedp_jax.planner.hardware import ComputeDtype, HardwareProfile
from slidedp_jax.planner.job import Job, Seen
from slidedp_jax.planner.strategy import Strategy, UpdatePolicy
from slidedp_jax.planner.workload import BatchShape


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job and what has been decided of its strategy.

    Attributes:
      job: model, batch, machine and budgets.
      choices: what the user has decided already.
      update_policy: as in `Strategy`.
      compute_dtype: as in `Strategy`.
      keep_activations: keep results of as many layer chunks as fit.
      resident_state: let state stay on the devices.
    """

    job: Job
    choices: Choices
    update_policy: UpdatePolicy
    compute_dtype: ComputeDtype
    keep_activations: bool
    resident_state: bool

    def families(self) -> Iterator[Iterator[Strategy]]:
        """All strategies, in families of which the first that fits is the best."""
        return self._families(self.choices)

    def fits(self) -> bool:
        """Whether any strategy fits."""
        return self.leanest_misfits() is None

    def leanest_misfits(self) -> list[Strategy] | None:
        """The leanest strategies if none fits, else None.

        Each more that is prefetched and each row more at a time takes memory; but all rows at once
        need no sum over microbatches. So what fits fits one row or all rows at a time, or nothing
        does.
        """
        rows = -(-self.job.batch.num_rows // self.job.hardware.total_devices)
        depth = self.choices.prefetch_depth or min(PREFETCH_DEPTHS)
        misfits = []
        for at_once in dict.fromkeys([self.choices.rows_per_microbatch or 1, rows]):
            if self.choices.rows_per_microbatch not in (None, at_once):
                continue
            lean = replace(self.choices, prefetch_depth=depth, rows_per_microbatch=at_once)
            for family in self._families(lean):
                fitting, others = sort_by_fit(self.job, [family], False, self.resident_state)
                if fitting:
                    return None
                misfits += others[0]
        return misfits

    def other(
        self,
        *,
        batch: BatchShape | None = None,
        hardware: HardwareProfile | None = None,
        device_bytes: float | None = None,
        host_bytes: float | None = None,
    ) -> Request:
        """The same with another batch, another machine, or other budgets."""
        job = self.job
        if hardware is not None:
            job = replace(
                job,
                hardware=hardware,
                device_budget_bytes=hardware.device_memory_bytes,
                host_budget_bytes=hardware.host_memory_bytes,
            )
        job = replace(
            job,
            batch=batch or job.batch,
            seen=job.seen if batch is None and hardware is None else Seen(),
            device_budget_bytes=device_bytes or job.device_budget_bytes,
            host_budget_bytes=host_bytes or job.host_budget_bytes,
        )
        return replace(self, job=job)

    def _families(self, choices: Choices) -> Iterator[Iterator[Strategy]]:
        return candidates(
            self.job.workload,
            self.job.batch,
            self.job.hardware,
            choices,
            update_policy=self.update_policy,
            compute_dtype=self.compute_dtype,
        )
