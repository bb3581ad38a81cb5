"""The parts of a trainer put together: state, wire, programs, pipeline, updates and gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.planner.compiled_check import ProgramMemory
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_share import HostShare
from slidedp_jax.state.host_store import HostStore, host_sharding
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.model_chunks import chunks_of
from slidedp_jax.state.starting_state import (
    Parameters,
    ToBeRestored,
    check_host_devices,
    make_state,
)
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.step.batch import prepare
from slidedp_jax.step.chunk_kinds import lowest_trained
from slidedp_jax.step.compiled_memory import StepCompiler
from slidedp_jax.step.layer_functions import LayerFns
from slidedp_jax.step.pipeline import Pipeline
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.step.sliced_head import SlicedHead
from slidedp_jax.step.sliced_head_programs import SlicedHeadPrograms
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.boundary_store import BoundaryStore
from slidedp_jax.transfer.copies import first_of_this_host
from slidedp_jax.transfer.device_groups import DATA_AXIS
from slidedp_jax.transfer.device_map import DeviceMap
from slidedp_jax.transfer.host_gather import HostGather
from slidedp_jax.transfer.routes import GradientPath, WeightPath, weight_path
from slidedp_jax.transfer.vocabulary_slices import SlicePrograms, VocabularySlices
from slidedp_jax.transfer.weight_window import StreamedWeights
from slidedp_jax.transfer.wire_programs import WirePrograms
from slidedp_jax.update.kernel_form import KernelForm
from slidedp_jax.update.part_updates import PartUpdates
from slidedp_jax.update.state_gate import TO_RESTORE, StateGate
from slidedp_jax.update.step_guard import StepGuard
from slidedp_jax.update.treatments import Treatments
from slidedp_jax.update.update_thread import HostOptimizer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a trainer is told beside model, optimizer and strategy; see `slidedp_jax.Trainer`."""

    parameters: Parameters | None
    rounding: WeightRounding
    rounding_is_stated: bool
    seed: int
    max_grad_norm: float | None
    guard: StepGuard
    kernel_form: KernelForm | None
    ema_decay: float | None
    inference_only: bool
    tracer: Tracer


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """The parts of a trainer.

    Attributes:
      mesh: compute devices, one axis `data`.
      store: the training state.
      fences: versions of its chunks.
      gradients: how they come back.
      programs: what the compute devices run.
      weights: weights on the devices.
      pipeline: the order of a step.
      updates: the update thread.
      gate: the way to the state outside a step.
    """

    mesh: Mesh
    store: HostStore
    fences: Fences
    gradients: GradientPath
    programs: ComputePrograms
    weights: StreamedWeights
    pipeline: Pipeline
    updates: HostOptimizer
    gate: StateGate


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrograms:
    """What a step runs on the devices, for one trainer: made without its state.

    Attributes:
      model: the decoder.
      treatments: the optimizer, taken apart.
      strategy: what decides them.
      sharding: over the compute devices of all hosts, one axis `data`.
      own_sharding: over those of this host.
      share: what of the state lies on this host.
      layouts: chunks in forward order.
      layer_fns: per layer chunk, the functions of its layers.
      route: how weights reach the devices.
      gradients: how gradients come back.
      on_devices: compiles for the devices.
      programs: forward, backward and head.
      given: optimizer, frozen patterns and decay of the average that `treatments` was made of.
      taken: not empty once a trainer runs them, whose gradients on their way are in `gradients`.
    """

    model: StreamedModel
    treatments: Treatments
    strategy: Strategy
    sharding: NamedSharding
    own_sharding: NamedSharding
    share: HostShare
    layouts: tuple[ChunkLayout, ...]
    layer_fns: tuple[LayerFns, ...]
    route: WeightPath
    gradients: GradientPath
    on_devices: DeviceMap
    programs: ComputePrograms
    given: tuple[Any, ...] = ()
    taken: list[bool] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """Compute devices."""
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh


def step_programs(
    model: StreamedModel,
    treatments: Treatments,
    strategy: Strategy,
    devices: Sequence[jax.Device],
    host_devices: Sequence[jax.Device],
    given: tuple[Any, ...] = (),
) -> StepPrograms:
    """Cut the model into chunks and make its programs; nothing is compiled yet.

    Raises:
      UserError: the strategy does not fit model or devices.
    """
    mesh = _mesh(devices)
    first, count = first_of_this_host(mesh)
    check_host_devices(strategy, len(host_devices), count)
    if strategy.num_hosts > 1 and treatments.whole_parameters:
        raise UserError(
            f"{len(treatments.whole_parameters)} parameters (such as "
            f"{treatments.whole_parameters[0]}) are updated as a whole, because the optimizer is "
            f"not element-wise, and each of {strategy.num_hosts} hosts has a share of each alone; "
            "use one host, or an element-wise optimizer such as AdamW"
        )
    layouts, layer_fns = chunks_of(
        model,
        strategy,
        groups=treatments.groups,
        kinds=treatments.kinds,
        whole=treatments.whole_parameters,
    )
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    own_sharding = sharding
    if strategy.num_hosts > 1:
        own_mesh = _mesh(devices[first : first + count])
        own_sharding = NamedSharding(own_mesh, PartitionSpec(DATA_AXIS))
    dtype = jnp.dtype(strategy.compute_dtype)
    route = weight_path(strategy.weight_route, mesh)
    gradients = GradientPath(
        strategy.gradient_route,
        mesh,
        host_sharding(host_devices[: strategy.num_host_devices]),
        dtype,
        own_sharding,
    )
    on_devices = DeviceMap(mesh, dtype)
    programs = ComputePrograms(
        model,
        on_devices,
        WirePrograms(on_devices, route, gradients),
        loss_chunk_tokens=strategy.loss_chunk_tokens,
        embed_trained=layouts[0].trained,
        head_trained=layouts[-1].trained,
    )
    return StepPrograms(
        model=model,
        treatments=treatments,
        strategy=strategy,
        sharding=sharding,
        own_sharding=own_sharding,
        share=HostShare(num_hosts=strategy.num_hosts, index=first // count),
        layouts=tuple(layouts),
        layer_fns=tuple(layer_fns),
        route=route,
        gradients=gradients,
        on_devices=on_devices,
        programs=programs,
        given=given,
    )


def assemble(
    parts: StepPrograms, host_devices: Sequence[jax.Device], settings: Settings
) -> Assembly:
    """Make the state, fill it with weights, and make what works on it.

    Raises:
      UserError: the weights are not the model's, or gradients exceed the limit of page-locked
        memory. Nothing stays page-locked.
    """
    strategy = parts.strategy
    store = make_state(
        parts.model,
        parts.layouts,
        [optimizer.state_dtypes for optimizer in parts.treatments.optimizers],
        strategy,
        host_devices[: strategy.num_host_devices],
        parts.own_sharding,
        parameters=settings.parameters,
        rounding=settings.rounding,
        seed=settings.seed,
        for_training=not settings.inference_only,
        share=parts.share,
    )
    try:
        return _around(store, parts, settings)
    except BaseException:
        store.close()
        raise


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def _around(store: HostStore, parts: StepPrograms, settings: Settings) -> Assembly:
    """What works on a state that is there; over the devices of all hosts, and of this one."""
    model, strategy, treatments = parts.model, parts.strategy, parts.treatments
    mesh, programs, gradients, tracer = (
        parts.mesh,
        parts.programs,
        parts.gradients,
        settings.tracer,
    )
    layouts: Sequence[ChunkLayout] = store.layouts
    frozen = [number for number, layout in enumerate(layouts) if not layout.trained_parts]
    fences = Fences(len(layouts), frozen=frozen)
    part_updates = PartUpdates(
        treatments,
        store,
        device_sharding=parts.own_sharding,
        block_size=strategy.block_size,
        form=settings.kernel_form,
    )
    for part in store.parts:
        part_updates.init(part)
    sliced_head = _sliced_head(parts)
    weights = StreamedWeights(
        store,
        fences,
        parts.route,
        programs.wire.unpack,
        everywhere=NamedSharding(mesh, PartitionSpec()),
        with_low=strategy.compute_dtype == "float32",
        tracer=tracer,
        slices=None if sliced_head is None else sliced_head.wire,
    )
    pipeline = Pipeline(
        layouts,
        parts.layer_fns,
        tied=model.tied,
        indexed=model.indexed,
        programs=programs,
        boundaries=_boundaries(strategy, layouts, parts.on_devices, tracer),
        sliced_head=sliced_head,
        prefetch_depth=strategy.prefetch_depth,
        kept_chunks=strategy.kept_chunks,
        attention_chunks=strategy.attention_chunks,
        sums_beside=gradients.sums_on_devices,
        make_room=gradients.make_room,
        tracer=tracer,
    )
    updates = HostOptimizer(
        store,
        fences,
        part_updates,
        treatments.initial_shared(),
        policy=strategy.update_policy,
        max_grad_norm=settings.max_grad_norm,
        guard=settings.guard,
        sums_on_host=gradients.sums_on_host,
        tracer=tracer,
    )
    gate = StateGate(
        store,
        fences,
        updates,
        part_updates,
        treatments.state,
        ema_decay=settings.ema_decay,
        form_is_stated=settings.kernel_form is not None,
        rounding_is_stated=settings.rounding_is_stated,
        lacking=TO_RESTORE if isinstance(settings.parameters, ToBeRestored) else "",
        gather=HostGather(mesh) if strategy.num_hosts > 1 else None,
    )
    return Assembly(
        mesh=mesh,
        store=store,
        fences=fences,
        gradients=gradients,
        programs=programs,
        weights=weights,
        pipeline=pipeline,
        updates=updates,
        gate=gate,
    )


def _boundaries(
    strategy: Strategy, layouts: Sequence[ChunkLayout], on_devices: DeviceMap, tracer: Tracer
) -> BoundaryStore:
    """Where inputs of chunks wait for backward."""
    first = max(1, lowest_trained(layouts))
    last = min(first + strategy.host_boundaries, len(layouts) - 1)
    return BoundaryStore(
        on_devices,
        range(first, last),
        slot_bytes=strategy.host_boundary_bytes,
        tracer=tracer,
    )


def _sliced_head(parts: StepPrograms) -> SlicedHead | None:
    """The head in slices of the vocabulary, where the strategy wants it."""
    model, strategy, layouts = parts.model, parts.strategy, parts.layouts
    if strategy.vocab_slices == 1:
        return None
    assert model.vocabulary is not None
    head = len(layouts) - 1
    owner = 0 if model.tied else head
    slices = VocabularySlices(
        chunk=owner,
        layout=layouts[owner],
        projection=model.vocabulary.projection,
        num_slices=strategy.vocab_slices,
    )
    return SlicedHead(
        SlicedHeadPrograms(
            model.vocabulary,
            model.vocab_size,
            SlicePrograms(parts.on_devices, slices, parts.route, parts.gradients),
            parts.on_devices,
            head_trained=layouts[head].trained if model.tied else slices.other_flags,
            block_tokens=strategy.loss_chunk_tokens,
        ),
        head=head,
        slice_weights=strategy.slice_head_weights,
        start=parts.gradients.start,
        make_room=parts.gradients.make_room,
        total=parts.programs.total,
    )


def compile_step(
    parts: StepPrograms, *, tokens_per_row: int, packed: bool = False, documents_per_row: int = 1
) -> list[ProgramMemory]:
    """Compile forward, backward and head before there are weights, and weigh them.

    A trainer that is made with `parts` runs these very programs on rows of that length.

    Args:
      parts: of one trainer.
      tokens_per_row: tokens of a row, padding included.
      packed: whether rows have `segment_ids`.
      documents_per_row: most documents of a packed row.
    """
    model, strategy, mesh = parts.model, parts.strategy, parts.mesh
    shape = (mesh.size * strategy.rows_per_microbatch, tokens_per_row)
    batch = {name: np.zeros(shape, np.int32) for name in ("input_ids", "labels")}
    if packed:
        batch["segment_ids"] = np.ones(shape, np.int32)
    for name, spec in model.token_arrays.items():
        batch[name] = np.zeros((*shape, *spec.shape), spec.dtype)
    prepared = prepare(
        batch,
        vocab_size=model.vocab_size,
        num_devices=mesh.size,
        rows_per_microbatch=strategy.rows_per_microbatch,
        documents_per_row=documents_per_row,
        seed_and_step=(0, 1) if model.random else None,
        token_arrays=model.token_arrays,
        shifted=model.shift_labels,
    )
    compiler = StepCompiler(
        model,
        strategy,
        parts.layouts,
        parts.layer_fns,
        parts.programs,
        sums_beside=parts.gradients.sums_on_devices,
        mesh=mesh,
    )
    return compiler.compile(prepared.microbatches[0])
