"""Memory of one device under a strategy, by named category, at the phase where it is largest.

The phases are the points of a step where a category begins or ends. All counts are upper bounds on
live arrays plus a share for the allocator's fragmentation: a plan that fits must not run out.
Letters: G devices, D hidden, V vocabulary, T tokens per row.
"""

from __future__ import annotations

from slidedp_jax.planner.chunking import Chunks
from slidedp_jax.planner.device_sizes import DeviceSizes
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, Strategy
from slidedp_jax.planner.training_state import state_bytes
from slidedp_jax.planner.workload import BatchShape, Workload

FRAGMENTATION = 0.02
"""Share of the arrays that the allocator may lose to holes, or that is not in the list. No job was
measured yet that took more than 0.97 of what the allocator has."""

PACKED_ATTENTION_ARRAYS = 2
"""fp32 arrays [rows * documents, T, N, H] of cuDNN's backward over packed rows (measured)."""


def device_use(
    workload: Workload,
    chunks: Chunks,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    optimizer_state_bytes: float,
) -> tuple[dict[str, float], str]:
    """Bytes by category on one device at the phase where their sum is largest, and that phase.

    Args:
      workload: the model.
      chunks: as the strategy cuts it.
      batch: rows of a step.
      strategy: how the step is run.
      hardware: number of devices and what they hold before the first array.
      optimizer_state_bytes: optimizer state per parameter in bytes.
    """
    phases = phases_on(workload, chunks, batch, strategy, hardware)
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    device = dict(phases[phase])
    if state := resident_state_bytes(chunks, strategy, hardware, optimizer_state_bytes):
        device["resident_state"] = state
    device["allocator_fragmentation"] = FRAGMENTATION * sum(device.values())
    device["runtime_reserve"] = hardware.device_reserve_bytes
    return device, phase


def resident_state_bytes(
    chunks: Chunks, strategy: Strategy, hardware: HardwareProfile, optimizer_state_bytes: float
) -> float:
    """Training state on one device, in every phase."""
    resident = state_bytes(chunks.all[: strategy.resident_chunks], optimizer_state_bytes)
    return resident / hardware.total_devices


BACKWARD_PHASES = ("backward", "recompute", "first_backward")
"""Those in which a layer chunk runs backward."""


def phases_on(
    workload: Workload,
    chunks: Chunks,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
) -> dict[str, dict[str, float]]:
    """`device_phases` with what attention takes there."""
    phases = device_phases(workload, chunks, batch, strategy, hardware.total_devices)
    packed = packed_attention_bytes(workload, batch, strategy)
    if packed and not hardware.unified_memory:  # the CPU backend does not use cuDNN
        for name in {*BACKWARD_PHASES} & {*phases}:
            # Attention's turn is not that of the products around it.
            phases[name]["packed_attention"] = max(0.0, packed - phases[name]["layer_workspace"])
    return phases


def device_phases(
    workload: Workload, chunks: Chunks, batch: BatchShape, strategy: Strategy, num_devices: int
) -> dict[str, dict[str, float]]:
    """Bytes by category on one device at each point where the sum can peak.

    - `embedding`: embedding weights as copied and unpacked, first layer chunk arriving.
    - `forward`: the last layer chunk runs forward; every chunk's input is kept.
    - `loss`: logits and the head's gradient, the layer window still there.
    - `backward`: the last layer chunk runs backward; nothing has been freed yet, and several
      devices sum the head's gradient (in general, that of the chunk above) meanwhile.
    - `recompute`: the same of the first chunk below those that are kept.
    - `pack`: that chunk's gradient is packed, summed over devices in fp32 and rounded.
    - `first_backward`: the first layer chunk runs backward, beside gradients of resident chunks.
    - `embedding_backward`: the embedding's gradient (always fp32), the other gradients leaving.

    Below what is trained nothing runs backward.
    """
    sizes = DeviceSizes(workload, chunks, batch, strategy, num_devices)
    phases = {**_forward_phases(sizes), **_backward_phases(sizes)}
    if strategy.resident_chunks:
        # They wait from backward to the next step's start, where all of them are used up.
        above = sum(map(sizes.share, chunks.all[1 : strategy.resident_chunks]))
        for name in {"first_backward", "embedding_backward"} & {*phases}:
            phases[name]["resident_gradients"] = above
        phases["embedding"]["resident_gradients"] = sizes.share(chunks.embed) + above
    return phases


def _forward_phases(sizes: DeviceSizes) -> dict[str, dict[str, float]]:
    """Up to and including the loss."""
    chunks, inputs = sizes.chunks, sizes.inputs
    held = sizes.tied and not sizes.slices_head
    embedding = {"embedding_weights": sizes.weights(chunks.embed)} if held else {}
    return {
        "embedding": {
            "layer_weights": sizes.prefetched,
            "embedding_weights": 2.0 * sizes.weights(chunks.embed),
            "boundary_activations": sizes.boundary,
            "batch_arrays": sizes.batch_arrays,
        },
        "forward": {
            "layer_weights": sizes.window,
            **embedding,
            "boundary_activations": (inputs + 1) * sizes.boundary,
            "layer_workspace": sizes.per_microbatch("forward_workspace_elements"),
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(len(chunks.layers)),
            "batch_arrays": sizes.batch_arrays,
        },
        "loss": {
            "layer_weights": sizes.window,
            **embedding,
            "boundary_activations": (inputs + 2) * sizes.boundary,
            **sizes.loss,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(len(chunks.layers)),
            "batch_arrays": sizes.batch_arrays,
        },
    }


def _backward_phases(sizes: DeviceSizes) -> dict[str, dict[str, float]]:
    """After the loss."""
    chunks, inputs = sizes.chunks, sizes.inputs
    first = chunks.forward_only
    if first == len(chunks.layers):
        return {}
    embedding_sum = {"embedding_gradient_sum": 4.0 * chunks.embed.trained_parameters}
    tied_gradient = embedding_sum if sizes.tied else {}
    layer_wire = sizes.wire(chunks.most_trained)
    others = GRADIENTS_IN_FLIGHT - 1  # while one more is computed
    layers_leaving = others * layer_wire
    leaving = others * max(layer_wire, 0.0 if sizes.tied else sizes.head_wire)
    summed_layer = sizes.summed_beside(chunks.most_trained)
    head_travels_alone = sizes.tied or sizes.slices_head
    summed = max(summed_layer, 0.0 if head_travels_alone else sizes.summed_beside(chunks.head))
    phases = {
        "backward": {
            "layer_weights": sizes.window,
            "boundary_activations": (inputs + 1) * sizes.boundary + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(len(chunks.layers) - 1),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(chunks.most_trained) + leaving + summed,
            **tied_gradient,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(len(chunks.layers)),
            "batch_arrays": sizes.batch_arrays,
        },
        "pack": {
            "layer_weights": sizes.window,
            "boundary_activations": (inputs + 1) * sizes.boundary,
            "layer_gradients": sizes.packing(chunks.most_trained) + layer_wire + leaving,
            **tied_gradient,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(len(chunks.layers)),
            "batch_arrays": sizes.batch_arrays,
        },
        "first_backward": {
            "layer_weights": sizes.window,
            "boundary_activations": 2 * sizes.boundary + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(first),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(chunks.most_trained) + layers_leaving + summed_layer,
            **tied_gradient,
            **sizes.kept_of_first,
            **sizes.attention_of_first,
            **sizes.decided(first + 1),
            "batch_arrays": sizes.batch_arrays,
        },
        "embedding_backward": {
            "layer_weights": sizes.prefetched,
            "boundary_activations": sizes.boundary,
            "layer_gradients": layers_leaving,
            **embedding_sum,
            "embedding_gradient": sizes.embedding_gradient,
            "batch_arrays": sizes.batch_arrays,
        },
    }
    if not chunks.embed.is_trained:
        del phases["embedding_backward"]
    below = len(chunks.layers) - sizes.num_kept
    if sizes.num_kept and below > first:
        phases["recompute"] = {
            "layer_weights": sizes.window,
            "boundary_activations": (sizes.inputs_below(below) + 1) * sizes.boundary
            + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(below - 1),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(chunks.most_trained) + layers_leaving + summed_layer,
            **tied_gradient,
            **sizes.attention,
            **sizes.decided(below),
            "batch_arrays": sizes.batch_arrays,
        }
    return phases


def packed_attention_bytes(workload: Workload, batch: BatchShape, strategy: Strategy) -> float:
    """Workspace of one layer's attention backward over packed rows: it grows with documents.

    Measured on an H200 (JAX 0.11.2): 1,032 MiB per document of a row for 8 rows of 4096 tokens and
    32 heads of 128, which is two fp32 arrays of that shape per document. fp32 compute does not use
    cuDNN.
    """
    if batch.documents_per_row is None or strategy.compute_dtype == "float32":
        return 0.0
    documents = max(2, batch.documents_per_row)
    width = max(stage.attention_heads * stage.attention_head_dim for stage in workload.layers)
    tokens = strategy.rows_per_microbatch * batch.seq_length
    return 4.0 * PACKED_ATTENTION_ARRAYS * documents * tokens * width
