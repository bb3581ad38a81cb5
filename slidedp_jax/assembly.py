"""The parts of a trainer put together: state, wire, programs, pipeline, updates and gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.fences import Fences
from slidedp_jax.state.host_share import HostShare
from slidedp_jax.state.host_store import HostStore
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.state.model_chunks import chunks_of
from slidedp_jax.state.starting_state import (
    Parameters,
    ToBeRestored,
    check_host_devices,
    make_state,
)
from slidedp_jax.state.weight_rounding import WeightRounding
from slidedp_jax.step.layer_functions import LayerFns
from slidedp_jax.step.pipeline import Pipeline, lowest_trained
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.step.sliced_head import SlicedHead
from slidedp_jax.step.sliced_head_programs import SlicedHeadPrograms
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.boundary_store import BoundaryStore
from slidedp_jax.transfer.copies import first_of_this_host
from slidedp_jax.transfer.device_map import DeviceMap
from slidedp_jax.transfer.host_gather import HostGather
from slidedp_jax.transfer.routes import DATA_AXIS, GradientPath, WeightPath, weight_path
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


def assemble(
    model: StreamedModel,
    treatments: Treatments,
    strategy: Strategy,
    devices: Sequence[jax.Device],
    host_devices: Sequence[jax.Device],
    settings: Settings,
) -> Assembly:
    """Make the state, fill it with weights, and make what works on it.

    Raises:
      UserError: the strategy does not fit model or devices, or the weights are not the model's.
        Nothing stays page-locked.
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
    device_sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    own_sharding = device_sharding
    if strategy.num_hosts > 1:
        own_mesh = _mesh(devices[first : first + count])
        own_sharding = NamedSharding(own_mesh, PartitionSpec(DATA_AXIS))
    store = make_state(
        model,
        layouts,
        [optimizer.state_dtypes for optimizer in treatments.optimizers],
        strategy,
        host_devices[: strategy.num_host_devices],
        own_sharding,
        parameters=settings.parameters,
        rounding=settings.rounding,
        seed=settings.seed,
        for_training=not settings.inference_only,
        share=HostShare(num_hosts=strategy.num_hosts, index=first // count),
    )
    shardings = device_sharding, own_sharding
    try:
        return _around(store, model, treatments, strategy, layer_fns, shardings, settings)
    except BaseException:
        store.close()
        raise


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def _around(
    store: HostStore,
    model: StreamedModel,
    treatments: Treatments,
    strategy: Strategy,
    layer_fns: Sequence[LayerFns],
    shardings: tuple[NamedSharding, NamedSharding],
    settings: Settings,
) -> Assembly:
    """What works on a state that is there; over the devices of all hosts, and of this one."""
    device_sharding, own_sharding = shardings
    mesh, dtype, tracer = device_sharding.mesh, jnp.dtype(strategy.compute_dtype), settings.tracer
    assert isinstance(mesh, Mesh)
    layouts: Sequence[ChunkLayout] = store.layouts
    frozen = [number for number, layout in enumerate(layouts) if not layout.trained_parts]
    fences = Fences(len(layouts), frozen=frozen)
    part_updates = PartUpdates(
        treatments,
        store,
        device_sharding=own_sharding,
        block_size=strategy.block_size,
        form=settings.kernel_form,
    )
    for part in store.parts:
        part_updates.init(part)
    route = weight_path(strategy.weight_route, mesh)
    gradients = GradientPath(strategy.gradient_route, mesh, store.sharding, dtype, own_sharding)
    on_devices = DeviceMap(mesh, dtype)
    wire = WirePrograms(on_devices, route, gradients)
    programs = ComputePrograms(
        model,
        on_devices,
        wire,
        loss_chunk_tokens=strategy.loss_chunk_tokens,
        embed_trained=layouts[0].trained,
        head_trained=layouts[-1].trained,
    )
    sliced_head = _sliced_head(model, strategy, layouts, on_devices, route, gradients, programs)
    weights = StreamedWeights(
        store,
        fences,
        route,
        wire.unpack,
        everywhere=NamedSharding(mesh, PartitionSpec()),
        with_low=strategy.compute_dtype == "float32",
        tracer=tracer,
        slices=None if sliced_head is None else sliced_head.wire,
    )
    pipeline = Pipeline(
        layouts,
        layer_fns,
        tied=model.tied,
        indexed=model.indexed,
        programs=programs,
        boundaries=_boundaries(strategy, layouts, on_devices, tracer),
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


def _sliced_head(
    model: StreamedModel,
    strategy: Strategy,
    layouts: Sequence[ChunkLayout],
    on_devices: DeviceMap,
    route: WeightPath,
    gradients: GradientPath,
    programs: ComputePrograms,
) -> SlicedHead | None:
    """The head in slices of the vocabulary, where the strategy wants it."""
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
            SlicePrograms(on_devices, slices, route, gradients),
            on_devices,
            head_trained=layouts[head].trained if model.tied else slices.other_flags,
            block_tokens=strategy.loss_chunk_tokens,
        ),
        head=head,
        slice_weights=strategy.slice_head_weights,
        start=gradients.start,
        make_room=gradients.make_room,
        total=programs.total,
    )
