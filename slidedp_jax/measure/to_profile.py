"""From what was measured to the planner's `HardwareProfile`; what was not is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from slidedp_jax.measure import dispatch
from slidedp_jax.measure.compute import SHAPES, Shapes
from slidedp_jax.measure.host import UPDATE_BYTES
from slidedp_jax.measure.links import link_points
from slidedp_jax.measure.stopwatch import Measurement, Stopwatch
from slidedp_jax.models.config import named_config
from slidedp_jax.planner.calibration import layer_matmul_rate
from slidedp_jax.planner.hardware import HardwareProfile, LinkRate
from slidedp_jax.planner.workload import BatchShape, Workload

_BYTES = {"bfloat16": 2, "float32": 4}


class _Missing(Exception):
    """A figure cannot be had from what was measured."""


def to_profile(
    watch: Stopwatch, base: HardwareProfile, *, num_host_devices: int, provenance: str
) -> tuple[HardwareProfile, dict[str, str]]:
    """The profile, and which fields of it were not measured.

    Args:
      watch: holds the measurements.
      base: this machine by its preset, where the rest is taken from.
      num_host_devices: over which the state of the small trainings was sharded.
      provenance: of the profile.
    """
    figures = _Figures(watch, base, num_host_devices)
    values: dict[str, Any] = {}
    others = ["peak_flops_per_s", "host_reserve_bytes", "grouped_matmul_share"]
    if not base.unified_memory:
        others.append("device_reserve_bytes")
    assumed = dict.fromkeys(others, f"{base.provenance}: not measured")
    for names, found in figures.all():
        try:
            values |= dict(zip(names, found(values), strict=True))
        except _Missing as error:
            assumed |= dict.fromkeys(names, f"{base.provenance}: {error}")
    # The limit of the pool is this process's, and no rate.
    values["stated_pinned_limit_bytes"] = None
    return dataclasses.replace(base, provenance=provenance, **values), assumed


class _Figures:
    """How each field follows from the measurements."""

    def __init__(self, watch: Stopwatch, base: HardwareProfile, num_host_devices: int):
        self._watch, self._base, self._num_host_devices = watch, base, num_host_devices
        self._shapes: Shapes = SHAPES["cpu" if base.unified_memory else "gpu"]

    def all(self) -> list[tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]]:
        """(fields, function of what is known so far -> their values), in order."""
        return [
            (("device_memory_bytes_per_s",), self._memory),
            (("attention_flops_per_s",), self._attention),
            (("bf16_matmul_flops_per_s",), self._bf16),
            (("fp32_matmul_flops_per_s",), self._fp32),
            (("h2d",), lambda _: (self._link("h2d"),)),
            (("d2h",), lambda _: (self._link("d2h"),)),
            (("duplex_bytes_per_s",), self._duplex),
            (("gather_bytes_per_s",), self._gather),
            (("copy_gap_s",), self._copy_gap),
            (("host_update_params_per_s",), self._update),
            (("host_memory_bytes_per_s",), self._host_memory),
            (("upload_call_s", "upload_call_per_device_s"), self._upload_calls),
            (("visit_dispatch_s", "step_end_s"), self._dispatch),
        ]

    def _one(self, name: str, **about: Any) -> Measurement:
        found = self._watch.one(name, **about)
        if found is None:
            raise _Missing(f"{name} was not measured")
        return found

    def _memory(self, _: dict[str, Any]) -> tuple[float]:
        return (self._one("elementwise").rate,)

    def _attention(self, _: dict[str, Any]) -> tuple[float]:
        return (self._one("attention forward and backward", dtype="bfloat16").rate,)

    def _bf16(self, known: dict[str, Any]) -> tuple[float]:
        return (self._of_layer("bfloat16", known),)

    def _fp32(self, known: dict[str, Any]) -> tuple[float]:
        if self._watch.one("layer backward", dtype="float32") is not None:
            return (self._of_layer("float32", known),)
        # As much slower in layers than alone as in bf16.
        alone = self._one("product", dtype="bfloat16", kind="forward").rate
        within = known.get("bf16_matmul_flops_per_s", alone) / alone
        return (self._one("product", dtype="float32").rate * min(1.0, within),)

    def _of_layer(self, dtype: str, known: dict[str, Any]) -> float:
        rows = self._shapes.rows[-1]
        seconds = sum(
            self._one(f"layer {way}", dtype=dtype, rows=rows).median_s
            for way in ("forward", "backward")
        )
        for name in ("attention_flops_per_s", "device_memory_bytes_per_s"):
            if name not in known:
                raise _Missing(f"{name} was not measured")
        workload = Workload.from_config(named_config(self._shapes.model))
        try:
            return layer_matmul_rate(
                workload.layers[0],
                BatchShape(num_rows=rows, seq_length=self._shapes.seq_length),
                seconds,
                attention_flops_per_s=known["attention_flops_per_s"],
                memory_bytes_per_s=known["device_memory_bytes_per_s"],
                element_bytes=_BYTES[dtype],
            )
        except ValueError as error:
            raise _Missing(str(error)) from None

    def _link(self, name: str) -> LinkRate:
        points: list[tuple[float, float]] = []
        for one in link_points(self._watch, name):
            size = float(one.about["size"])
            rate = one.rate / len(one.about["devices"])
            # More bytes never take less time: noise of small copies.
            while points and points[-1][0] / points[-1][1] >= size / rate:
                points.pop()
            points.append((size, rate))
        if not points:
            raise _Missing(f"{name} was not measured")
        return LinkRate(points=tuple(points))

    def _duplex(self, _: dict[str, Any]) -> tuple[float]:
        found = link_points(self._watch, "both ways")
        if not found:
            raise _Missing("copies both ways were not measured")
        return (found[-1].rate / len(found[-1].about["devices"]),)

    def _gather(self, _: dict[str, Any]) -> tuple[float]:
        if self._base.num_devices < 2:
            raise _Missing("one device gathers nothing")
        return (min(self._one(name).rate for name in ("gather", "scatter")),)

    def _copy_gap(self, known: dict[str, Any]) -> tuple[float]:
        pieces, link = self._one("h2d in pieces"), known.get("h2d")
        if link is None:
            raise _Missing("h2d was not measured")
        whole_s = pieces.work / self._base.num_devices / link.points[-1][1]
        return (max(0.0, pieces.median_s - whole_s) / (pieces.about["pieces"] - 1),)

    def _update(self, _: dict[str, Any]) -> tuple[float]:
        return (self._one("update", beside="nothing").rate,)

    def _host_memory(self, _: dict[str, Any]) -> tuple[float]:
        """By the triad, or by what update and copies move together where that is more."""
        most = self._one("triad", beside="nothing").rate
        for update in self._watch.all("update"):
            copies = self._watch.one("copies beside update", which=update.about["beside"])
            if copies is not None:
                most = max(most, update.rate * UPDATE_BYTES + copies.rate)
        return (most,)

    def _upload_calls(self, _: dict[str, Any]) -> tuple[float, float]:
        count = self._base.num_devices
        one_s = self._one("upload call", devices=1).median_s
        if count > 1:
            all_s = self._one("upload call", devices=count).median_s
            per_device_s = max(0.0, (all_s - one_s) / (count - 1))
            return max(0.0, one_s - per_device_s), per_device_s
        per_device_s = one_s * self._base.upload_call_per_device_s
        per_device_s /= self._base.upload_call_s + self._base.upload_call_per_device_s
        return one_s - per_device_s, per_device_s

    def _dispatch(self, known: dict[str, Any]) -> tuple[float, float]:
        """Two depths: a layer is two visits, either with an upload in pieces."""
        few, many = dispatch.DEPTHS
        few_s, many_s = (self._one("tiny step", layers=depth).median_s for depth in (few, many))
        issuing = [self._one("tiny step, issuing", layers=depth) for depth in (few, many)]
        if "upload_call_s" not in known:
            raise _Missing("uploads were not measured")
        count = self._base.num_devices
        call_s = known["upload_call_s"] + count * known["upload_call_per_device_s"]
        visit_s = max(0.0, issuing[1].median_s - issuing[0].median_s) / (2 * (many - few))
        own_s = max(1e-5, visit_s - self._num_host_devices / count * call_s)
        # Embedding and head are visits as well; here updates and copies count too.
        end_s = max(0.0, few_s - (2 * few + 2) * (many_s - few_s) / (2 * (many - few)))
        if not self._base.unified_memory:
            end_s = max(end_s, self._base.step_end_s)
        return own_s, end_s
