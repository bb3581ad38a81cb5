"""From this process's devices and memory to a plan: the bridge between planner and trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from slidedp_jax import host_watch
from slidedp_jax.errors import UserError
from slidedp_jax.machine_here import machine_here
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.frozen_names import frozen_names
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import GIB, ComputeDtype, HardwareProfile
from slidedp_jax.planner.host_memory import available_host_memory
from slidedp_jax.planner.machine_profile import (
    AUTO,
    MachineProfile,
    differences,
    profiles_folder,
    read_profile,
)
from slidedp_jax.planner.presets import profile_of_kind
from slidedp_jax.planner.search import Plan, plan
from slidedp_jax.planner.stated_machine import Stated, machine
from slidedp_jax.planner.strategy import Strategy, UpdatePolicy
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES
from slidedp_jax.planner.whole_updates import with_update_flops
from slidedp_jax.planner.workload import BatchShape, Workload
from slidedp_jax.process import current_setup


def this_machine(
    *, stated_host_bytes: float | None = None, measured: MachineProfile | None = None
) -> HardwareProfile:
    """Profile of the configured devices: memory and cores as found.

    Args:
      stated_host_bytes: host memory that can be had even where the kernel reports less (virtual
        machines that grow as they are used); limits of control groups hold in any case.
      measured: whose rates to take; None: those of the nearest preset.

    Raises:
      UserError: what was measured are CPU devices and these are GPUs, or the other way round.
    """
    devices = current_setup().own_devices()
    kind = devices[0].device_kind
    memory = available_host_memory(stated_bytes=stated_host_bytes)
    if measured is None:
        rates = profile_of_kind("cpu" if devices[0].platform == "cpu" else kind)
    else:
        rates = _rates(measured, on_cpu=devices[0].platform == "cpu", kind=kind)
    profile = replace(
        rates.with_devices(len(devices)),
        name=kind,
        num_host_cores=len(os.sched_getaffinity(0)),
        host_memory_bytes=memory.available_bytes,
        provenance=f"{rates.provenance}; memory as found ({memory.describe()})",
    )
    if profile.unified_memory:
        return _of_all_hosts(replace(profile, device_memory_bytes=memory.available_bytes))
    limits = [_bytes_limit(device) for device in devices]
    return _of_all_hosts(_with_device_limits(profile, limits))


def _rates(measured: MachineProfile, *, on_cpu: bool, kind: str) -> HardwareProfile:
    """Those of a profile; its provenance says in what these devices or their host differ."""
    rates, there = measured.hardware, measured.machine
    if rates.unified_memory != on_cpu:
        of, now = ("CPU devices", "a GPU") if rates.unified_memory else ("GPUs", "a CPU device")
        raise UserError(
            f"the hardware profile {measured.source} is of {of} ({there.device_kind}), and "
            f"{kind} is {now}: their memory is not alike; `slidedp measure` makes one of this"
        )
    differing = profile_differences(measured)
    if not differing:
        return rates
    devices, _ = current_setup().devices()
    here = machine_here(devices)
    alike = (there.device_kind, there.processor) == (here.device_kind, here.processor)
    # Only what begins with `measured` counts as such.
    begin = rates.provenance if alike else f"rates of another machine, {rates.provenance}"
    return replace(rates, provenance=f"{begin}; {'; '.join(differing)}")


def _of_all_hosts(profile: HardwareProfile) -> HardwareProfile:
    """What every host has at least, so that all make one plan."""
    watch, hosts = host_watch.watch(), current_setup().hosts
    if watch is None:
        return profile
    names = ("num_host_cores", "host_memory_bytes", "device_memory_bytes")
    own = json.dumps([getattr(profile, name) for name in names])
    found = [json.loads(text) for text in watch.exchange(own)]
    least = dict(zip(names, map(min, zip(*found, strict=True)), strict=True))
    provenance = f"{profile.provenance}; of {hosts.num_hosts} hosts, what each has at least"
    return replace(profile, num_hosts=hosts.num_hosts, provenance=provenance, **least)


def _with_device_limits(profile: HardwareProfile, limits: Sequence[int]) -> HardwareProfile:
    return replace(
        profile,
        device_memory_bytes=min(limits) + profile.device_reserve_bytes,
        stated_pinned_limit_bytes=current_setup().pinned_limit_gib * GIB,
    )


def measured_profile(named: str) -> MachineProfile:
    """The profile of a file, or with `auto` that of this machine in its usual place.

    Raises:
      UserError: there is none.
    """
    path = profile_path() if named == AUTO else named
    try:
        return read_profile(path)
    except ValueError as error:
        where = "" if named != AUTO else " (hardware_profile auto)"
        raise UserError(f"{error}{where}") from None


def profile_path() -> Path:
    """Where `slidedp measure` writes the profile of the configured devices."""
    devices, _ = current_setup().devices()
    return profiles_folder() / machine_here(devices).file_name


def profile_differences(profile: MachineProfile) -> list[str]:
    """In what the configured devices and their host differ from those that were measured."""
    devices, _ = current_setup().devices()
    return differences(profile.machine, machine_here(devices))


def _bytes_limit(device: jax.Device) -> int:
    """Memory that JAX's allocator may hand out on a device."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise RuntimeError(f"{device} does not report its memory limit; state the device budget")
    return int(stats["bytes_limit"])


def plan_for(
    model: ModelConfig | Workload,
    *,
    rows_per_step: int,
    tokens_per_row: int,
    frozen: Sequence[str] = (),
    documents_per_row: int | None = None,
    document_lengths: Sequence[int] | None = None,
    max_grad_norm: float | None = 1.0,
    compute_dtype: ComputeDtype = "bfloat16",
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
    device_memory_budget_gib: float | None = None,
    host_memory_budget_gib: float | None = None,
    update_policy: UpdatePolicy | None = None,
    choices: Choices | None = None,
    keep_activations: bool | None = None,
    resident_state: bool | None = None,
    hardware: HardwareProfile | str | None = None,
    hardware_profile: str | os.PathLike[str] | None = None,
    update_flops: float = 0.0,
    held_back_bytes: float = 0.0,
    whole_parameters: int = 0,
    strategy: Strategy | None = None,
) -> Plan:
    """The fastest strategy for this process's devices that fits the budgets.

    Args:
      model: a described decoder, or what was measured of another
        (`slidedp_jax.adapter.workload.measured_workload`).
      rows_per_step: rows of one optimizer step, over all devices and microbatches.
      tokens_per_row: tokens of a row, padding included.
      frozen: patterns of names that stay as they are, as the trainer will be given; of a measured
        workload give them to `measured_workload`.
      documents_per_row: most documents of a packed row; None where rows are not packed.
      document_lengths: tokens of the documents of a typical packed row, which see only themselves
        (`rows.typical_documents`); None: one that fills the row.
      max_grad_norm: the limit that the trainer will be given; None allows eager updates.
      compute_dtype: "bfloat16" or "float32".
      optimizer_state_bytes: bytes of optimizer state per trained parameter; AdamW's 8 by default.
      device_memory_budget_gib: memory to use of each device; None: what JAX may hand out.
      host_memory_budget_gib: host memory to use, also more than the kernel reports; None: what is
        available.
      update_policy: None: deferred with clipping, eager without.
      choices: what has been decided already; the search leaves it alone.
      keep_activations: instead of recomputing, keep weights and intermediate results of as many
        layer chunks as fit; None: on GPUs.
      resident_state: let the training state of the lowest chunks stay on the GPUs where that makes
        a step faster, or the host has no room for it; None: on GPUs. Only for element-wise
        optimizers (not Muon, not Adafactor).
      hardware: another machine, or the name of one GPU and the host assumed beside it ("rtx4090",
        "h100"; `planner.stated_machine.machine` makes others of it); None means this one.
      hardware_profile: a file of `slidedp measure` with this machine's rates, or "auto" for the one
        in its usual place; None: those of the nearest preset.
      update_flops: operations of the optimizer's products on the host per step
        (`planner.whole_updates.update_flops`).
      held_back_bytes: memory of each device that is left free beside its reserve, for programs that
        take more than is planned for them (`planner.compiled_check`).
      whole_parameters: those that Adafactor updates (`planner.whole_updates.whole_parameters`).
      strategy: what has been decided, such as that of a run that is resumed; None: the fastest.

    Raises:
      UserError: nothing fits, or not the strategy; every limit is listed. Or there is no such
        hardware, or profile, or it is of CPU devices and these are GPUs or the other way round. Or
        a pattern of `frozen` fits nothing, or all.
    """
    choices = choices or Choices()
    if hardware is not None and hardware_profile is not None:
        raise UserError("hardware and hardware_profile both say which machine; give one of them")
    if isinstance(hardware, str):
        try:
            hardware = machine(hardware, 1, Stated())
        except ValueError as error:
            raise UserError(str(error)) from None
    if hardware is None:
        measured = None if hardware_profile is None else measured_profile(str(hardware_profile))
        stated_bytes = _bytes(host_memory_budget_gib)
        hardware = this_machine(stated_host_bytes=stated_bytes, measured=measured)
        host_devices = choices.num_host_devices or current_setup().num_host_devices
        choices = replace(choices, num_host_devices=host_devices)
    workload = _workload(model, frozen)
    hardware = with_update_flops(
        hardware,
        update_flops,
        num_parameters=workload.num_trained,
        optimizer_state_bytes=optimizer_state_bytes,
        num_whole=whole_parameters,
    )
    if held_back_bytes:
        reserve = hardware.device_reserve_bytes + held_back_bytes
        hardware = replace(hardware, device_reserve_bytes=reserve)
    try:
        return plan(
            workload,
            BatchShape(
                num_rows=rows_per_step,
                seq_length=tokens_per_row,
                documents_per_row=documents_per_row,
                document_lengths=None if document_lengths is None else tuple(document_lengths),
            ),
            hardware,
            update_policy=update_policy or ("eager" if max_grad_norm is None else "deferred"),
            compute_dtype=compute_dtype,
            optimizer_state_bytes=optimizer_state_bytes,
            device_budget_bytes=_bytes(device_memory_budget_gib),
            host_budget_bytes=_bytes(host_memory_budget_gib),
            choices=choices,
            keep_activations=keep_activations,
            resident_state=resident_state,
            strategy=strategy,
        )
    except PlanError as error:
        raise UserError(str(error)) from error


def _workload(model: ModelConfig | Workload, frozen: Sequence[str]) -> Workload:
    if isinstance(model, Workload):
        if frozen:
            raise UserError(
                "frozen is for a described model; a measured workload knows what is frozen: give "
                "the patterns to measured_workload"
            )
        return model
    try:
        names = frozen_names(model.parameter_shapes(), frozen)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Workload.from_config(model, frozen=names)


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB
