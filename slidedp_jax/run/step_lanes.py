"""What a step's record says of its lanes."""

from __future__ import annotations

from collections.abc import Mapping

from slidedp_jax.tracer import SpanLane

LANE_FIELDS: Mapping[tuple[SpanLane, str], str] = {
    ("wait", "update"): "wait_update_s",
    ("wait", "leave"): "wait_leave_s",
    ("wait", "norm"): "wait_norm_s",
    ("host_update", ""): "host_update_s",
    ("save", ""): "save_s",
}
"""Lane, and reason of a wait -> field of the record.

The step's thread waited for layers that were still being updated (`wait_update_s`) and for
gradients or activations to leave the devices (`wait_leave_s`); the update thread waited for the
last gradients (`wait_norm_s`), whatever the step did meanwhile, and was busy (`host_update_s`), as
were the writers of checkpoints (`save_s`, of all threads together). Updates of a step run during
the next one, in whose record they are.
"""


def lane_seconds(sums: Mapping[tuple[SpanLane, str], float]) -> dict[str, float]:
    """Fields of a record: seconds since the record before, microseconds rounded off.

    Args:
      sums: what `StepTracer.take` gave.
    """
    return {field: round(sums.get(key, 0.0), 6) for key, field in LANE_FIELDS.items()}
