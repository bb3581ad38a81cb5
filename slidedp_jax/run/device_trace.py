"""What GPUs did while jax.profiler looked at them."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from slidedp_jax.jax_internals import TracedEvent, traced_events

_NANOSECONDS = 1e9
_DEVICE = "/device:GPU:"
_STREAM = "Stream #"
_OVERHEAD = "CUPTI overhead"
"""What a stream's line is called once the profiler itself has cost time on it, kernels or not."""

_OF_KERNELS_AND_COPIES = {"kernel_details", "memcpy_details", "memset_details"}


@dataclass(frozen=True, kw_only=True)
class DeviceSpan:
    """What one GPU did.

    Attributes:
      device: as `GPU:0`.
      stream: as `Stream #13(Compute)`, with the kinds of work that it had.
      lane: `compute`, `h2d` or `d2h`; `exchange` with other GPUs; `copies` within one.
      name: of the kernel or copy.
      start_s: since the trace began.
      end_s: likewise.
    """

    device: str
    stream: str
    lane: str
    name: str
    start_s: float
    end_s: float


def read_device_spans(folder: pathlib.Path, origin_ns: int) -> list[DeviceSpan]:
    """What GPUs did, in the order of their lines, of the newest trace of jax.profiler in a folder.

    A GPU has one line for each stream; others repeat the same work by operation, program and step
    and are left out. Names are those of XLA's `cupti_collector.cc` and `xplane_schema.cc`
    (https://github.com/openxla/xla).

    Args:
      folder: that it was started with.
      origin_ns: when our own spans began, as `time.time_ns` gives it.

    Raises:
      FileNotFoundError: it has left no trace.
      ValueError: the trace does not say when it began, or has no stream of a GPU.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: (path.parent.name, path.name))
    files = [path for path in files if path.parent == files[-1].parent]
    if not files:
        raise FileNotFoundError(f"{folder} holds no trace (*.xplane.pb)")
    found, others = list[DeviceSpan](), set[str]()
    for path in files:
        host = f"{path.name.removesuffix('.xplane.pb')} " if len(files) > 1 else ""
        for event in traced_events(path):
            if _is_work(event):
                found.append(_span(event, host, origin_ns))
            else:
                others.add(f"{event.plane}: {event.line}")
    if not found:
        raise ValueError(
            f"no work on a stream of a GPU is in {files[-1].parent}, only {sorted(others)[:9]}"
        )
    return found


def _is_work(event: TracedEvent) -> bool:
    if not event.plane.startswith(_DEVICE):
        return False
    if event.line == _OVERHEAD:
        return not event.stats().isdisjoint(_OF_KERNELS_AND_COPIES)
    return event.line.startswith(_STREAM)


def _span(event: TracedEvent, host: str, origin_ns: int) -> DeviceSpan:
    start_s = (event.start_ns - origin_ns) / _NANOSECONDS
    return DeviceSpan(
        device=host + event.plane.removeprefix("/device:"),
        stream=event.line,
        lane=lane_of(event.name),
        name=event.name,
        start_s=start_s,
        end_s=start_s + event.duration_ns / _NANOSECONDS,
    )


def lane_of(name: str) -> str:
    """Lane of a kernel or copy, by its name: copies are called by their kind, all else computes."""
    if "MemcpyH2D" in name or "HtoD" in name:
        return "h2d"
    if "MemcpyD2H" in name or "DtoH" in name:
        return "d2h"
    if "MemcpyP2P" in name or "PtoP" in name or name.startswith("nccl"):
        return "exchange"
    return "copies" if name.startswith(("Memcpy", "Memset", "[CUDA mem")) else "compute"
