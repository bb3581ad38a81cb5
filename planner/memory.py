"""Memory of one device and of the host under a strategy, by named category.

Device memory is taken at the phase of the step in which it is largest; the phases are the points
where a category begins or ends (see `device_phases`). All counts are upper bounds on live arrays
plus a share for the allocator's fragmentation: a plan that fits must not run out. Letters: G
devices, D hidden, V vocabulary, T tokens per row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.chunking import Chunks, ChunkWork, chunk_stages
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.pinned_pool import pool_regions
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, SLOTS_BESIDE_PREFETCH, Strategy
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

ADAMW_STATE_BYTES = 8
"""Optimizer state per parameter of AdamW with fp32 moments."""

MASTER_BYTES = 4
"""The fp32 master as two halves of two bytes."""

FRAGMENTATION = 0.02
"""Share of the arrays that the allocator may lose to holes, or that is not in the list. No job was
measured yet that took more than 0.97 of what the allocator has."""

LOGITS_COPIES = 1
"""fp32 arrays [loss chunk, V] alive at once: what is made of the logits takes their place."""

OWN_LOGITS_COPIES = 3
"""The same of a loss of the user's own: logits, their exponentials, their gradient."""

PACKED_ATTENTION_ARRAYS = 2
"""fp32 arrays [rows * documents, T, N, H] of cuDNN's backward over packed rows (measured)."""

SEVERAL_GPUS_BYTES = 1.0 * 2**15
"""Times the root of the bytes of state on the host: what two GPUs took of host memory beside all
that is listed here, by an upper bound of four jobs with 10 to 85 GiB of state; its cause is not
known."""

BATCH_ARRAYS = 4
"""int32 arrays [rows, T]: inputs, targets, positions, segments."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Predicted memory.

    Attributes:
      device: bytes by category on one device, at the phase where the sum is largest.
      device_phase: that phase.
      host: bytes by category in host memory, all devices together.
      pinned_pool_bytes: size of XLA's pool of page-locked memory within `host`.
    """

    device: Mapping[str, float]
    device_phase: str
    host: Mapping[str, float]
    pinned_pool_bytes: float

    @property
    def device_bytes(self) -> float:
        """Total of one device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Total of the host."""
        return sum(self.host.values())


def memory_use(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> MemoryUse:
    """Predict the memory of a run.

    Args:
      workload: the model.
      batch: rows of a step.
      strategy: how the step is run.
      hardware: number of devices and what they hold before the first array.
      optimizer_state_bytes: optimizer state per parameter in bytes, AdamW's 8 by default.
    """
    chunks = chunk_stages(
        workload,
        strategy.layers_per_chunk,
        strategy.block_size,
        strategy.num_host_devices,
        strategy.vocab_slices,
    )
    phases = device_phases(workload, chunks, batch, strategy, hardware.num_devices)
    packed = packed_attention_bytes(workload, batch, strategy)
    if packed and not hardware.unified_memory:  # the CPU backend does not use cuDNN
        for name in {"backward", "recompute", "first_backward"} & {*phases}:
            # Attention's turn is not that of the products around it.
            phases[name]["packed_attention"] = max(0.0, packed - phases[name]["layer_workspace"])
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    device = dict(phases[phase])
    if resident := resident_parameters(chunks, strategy):
        state = (MASTER_BYTES + optimizer_state_bytes) * resident / hardware.num_devices
        device["resident_state"] = state
    device["allocator_fragmentation"] = FRAGMENTATION * sum(device.values())
    device["runtime_reserve"] = hardware.device_reserve_bytes
    host, pool = _host(workload, chunks, strategy, hardware, optimizer_state_bytes)
    if hardware.unified_memory:
        host["compute_devices"] = hardware.num_devices * sum(device.values())
    return MemoryUse(device=device, device_phase=phase, host=host, pinned_pool_bytes=pool)


def resident_parameters(chunks: Chunks, strategy: Strategy) -> int:
    """Parameters, padded, whose state stays on the devices, each with its share."""
    return sum(chunk.padded_parameters for chunk in chunks.all[: strategy.resident_chunks])


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
    """
    sizes = _Sizes(workload, chunks, batch, strategy, num_devices)
    phases = {**_forward_phases(sizes), **_backward_phases(sizes)}
    if strategy.resident_chunks:
        # They wait from backward to the next step's start, where all of them are used up.
        first, last = phases["first_backward"], phases["embedding_backward"]
        above = chunks.all[1 : strategy.resident_chunks]
        first["resident_gradients"] = last["resident_gradients"] = sum(map(sizes.share, above))
        waiting = sizes.share(chunks.embed) + last["resident_gradients"]
        phases["embedding"]["resident_gradients"] = waiting
    return phases


def _forward_phases(sizes: _Sizes) -> dict[str, dict[str, float]]:
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
            **sizes.decided(chunks.layers),
            "batch_arrays": sizes.batch_arrays,
        },
        "loss": {
            "layer_weights": sizes.window,
            **embedding,
            "boundary_activations": (inputs + 2) * sizes.boundary,
            **sizes.loss,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(chunks.layers),
            "batch_arrays": sizes.batch_arrays,
        },
    }


def _backward_phases(sizes: _Sizes) -> dict[str, dict[str, float]]:
    """After the loss."""
    chunks, inputs = sizes.chunks, sizes.inputs
    embedding_sum = {"embedding_gradient_sum": 4.0 * chunks.embed.num_parameters}
    tied_gradient = embedding_sum if sizes.tied else {}
    layer_wire = sizes.wire(sizes.largest_layer)
    others = GRADIENTS_IN_FLIGHT - 1  # while one more is computed
    layers_leaving = others * layer_wire
    leaving = others * max(layer_wire, 0.0 if sizes.tied else sizes.head_wire)
    summed_layer = sizes.summed_beside(sizes.largest_layer)
    head_travels_alone = sizes.tied or sizes.slices_head
    summed = max(summed_layer, 0.0 if head_travels_alone else sizes.summed_beside(chunks.head))
    phases = {
        "backward": {
            "layer_weights": sizes.window,
            "boundary_activations": (inputs + 1) * sizes.boundary + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(chunks.layers[-1]),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(sizes.largest_layer) + leaving + summed,
            **tied_gradient,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(chunks.layers),
            "batch_arrays": sizes.batch_arrays,
        },
        "pack": {
            "layer_weights": sizes.window,
            "boundary_activations": (inputs + 1) * sizes.boundary,
            "layer_gradients": sizes.packing(sizes.largest_layer) + layer_wire + leaving,
            **tied_gradient,
            **sizes.kept,
            **sizes.attention,
            **sizes.decided(chunks.layers),
            "batch_arrays": sizes.batch_arrays,
        },
        "first_backward": {
            "layer_weights": sizes.window,
            "boundary_activations": 2 * sizes.boundary + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(chunks.layers[0]),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(sizes.largest_layer) + layers_leaving + summed_layer,
            **tied_gradient,
            **sizes.kept_of_first,
            **sizes.attention_of_first,
            **sizes.decided(chunks.layers[:1]),
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
    below = len(chunks.layers) - sizes.num_kept
    if sizes.num_kept and below:
        phases["recompute"] = {
            "layer_weights": sizes.window,
            "boundary_activations": (sizes.inputs_below(below) + 1) * sizes.boundary
            + sizes.boundary_microbatch,
            "recompute_residuals": sizes.residuals_of(chunks.layers[below - 1]),
            "layer_workspace": sizes.per_microbatch("backward_workspace_elements"),
            "layer_gradients": sizes.gradient(sizes.largest_layer) + layers_leaving + summed_layer,
            **tied_gradient,
            **sizes.attention,
            **sizes.decided(chunks.layers[:below]),
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


class _Sizes:
    """Bytes of the arrays that the phases are made of, on one device."""

    def __init__(
        self,
        workload: Workload,
        chunks: Chunks,
        batch: BatchShape,
        strategy: Strategy,
        num_devices: int,
    ):
        self._strategy = strategy
        self._gathers = strategy.weight_route == "shard_all_gather"
        self._scatters = strategy.gradient_route == "reduce_scatter"
        self._num_devices = num_devices
        self.chunks = chunks
        self.tied = workload.tied
        self._workload = workload
        # cuDNN keeps the statistics of packed rows, in fp32, once per document of a row.
        documents = batch.documents_per_row
        packed = documents is not None and strategy.compute_dtype != "float32"
        self._more_statistics = 2 * (max(2, documents or 0) - 1) if packed else 0
        self._tokens = strategy.rows_per_microbatch * batch.seq_length
        block = strategy.layer_block_tokens or batch.seq_length
        self._tokens_at_once = strategy.rows_per_microbatch * min(block, batch.seq_length)
        self.largest_layer = max(chunks.layers, key=lambda chunk: chunk.padded_parameters)
        tokens_on_device = self._tokens * strategy.num_microbatches
        self.batch_arrays = 4.0 * BATCH_ARRAYS * tokens_on_device
        self.boundary_microbatch = float(
            self._tokens * workload.hidden_size * strategy.compute_bytes
        )
        self.boundary = strategy.num_microbatches * self.boundary_microbatch
        arriving = strategy.upload_bytes * float(self.largest_layer.padded_parameters)
        if self._gathers:
            arriving /= num_devices
        self.inputs = self.inputs_below(len(chunks.layers))
        self.prefetched = strategy.prefetch_depth * arriving
        self.window = self.prefetched + SLOTS_BESIDE_PREFETCH * self.weights(self.largest_layer)

    def inputs_below(self, num_chunks: int) -> int:
        """Inputs of so many of the lowest layer chunks that are on a device."""
        return self._strategy.boundaries_on_device(num_chunks)

    def weights(self, chunk: ChunkWork) -> float:
        """Weights of a chunk in the compute dtype."""
        return float(self._strategy.compute_bytes * chunk.padded_parameters)

    def wire(self, chunk: ChunkWork) -> float:
        """One device's part of a gradient on its way to the host."""
        whole = float(self._strategy.gradient_bytes * chunk.padded_parameters)
        return whole / self._num_devices if self._scatters else whole

    def share(self, chunk: ChunkWork) -> float:
        """One device's share of a summed gradient."""
        return float(self._strategy.gradient_bytes * chunk.padded_parameters) / self._num_devices

    def gradient(self, chunk: ChunkWork) -> float:
        """A gradient as it comes out of the backward pass, and the fp32 sum over microbatches."""
        compute = self._strategy.compute_bytes
        per_parameter = compute if self._strategy.num_microbatches == 1 else compute + 4
        return float(per_parameter * chunk.num_parameters)

    def packing(self, chunk: ChunkWork) -> float:
        """A gradient as trees, packed, and in fp32 where the devices sum it."""
        accumulated = self._strategy.compute_bytes if self._strategy.num_microbatches == 1 else 4
        widened = 4 if self._scatters and self._num_devices > 1 and accumulated < 4 else 0
        return float(
            accumulated * chunk.num_parameters + (accumulated + widened) * chunk.padded_parameters
        )

    def summed_beside(self, chunk: ChunkWork) -> float:
        """The same of a chunk whose gradient is summed while the one below runs backward."""
        return self.packing(chunk) if self._scatters and self._num_devices > 1 else 0.0

    def per_microbatch(self, attribute: str) -> float:
        """The largest layer's elements of one kind for the tokens of one microbatch.

        Or, where it runs in blocks of tokens, for those of one block.
        """
        largest = max(
            getattr(stage, attribute) for chunk in self.chunks.layers for stage in chunk.stages
        )
        return float(self._tokens_at_once * self._strategy.compute_bytes * largest)

    @property
    def num_kept(self) -> int:
        """Layer chunks whose results are kept."""
        return min(self._strategy.kept_chunks, len(self.chunks.layers))

    def residuals_of(self, chunk: ChunkWork) -> float:
        """What backward of a chunk makes anew of a microbatch; of a kept one, what is not kept."""
        largest = max(
            sum(stage.residual_elements for stage in chunk.stages) for chunk in self.chunks.layers
        )
        first_kept = len(self.chunks.layers) - self.num_kept
        if any(chunk is kept for kept in self.chunks.layers[first_kept:]):
            largest = max(0, largest - self._kept_elements(chunk))
        elements = float(self._tokens_at_once * largest)
        if self._strategy.layer_block_tokens:  # of the other layers of a chunk, their inputs
            elements = self._in_blocks()
        return self._strategy.compute_bytes * elements

    def _in_blocks(self) -> float:
        """Elements of one block, and of whole rows: attention, and inputs of the layers above."""
        hidden = self._workload.hidden_size

        def waiting(stage: StageWork) -> float:
            projected = stage.before_attention_parameters / hidden  # q, k and v
            return projected + stage.attention_elements + hidden

        block = max(stage.residual_elements for c in self.chunks.layers for stage in c.stages)
        rows = max(
            max(stage.row_elements for stage in chunk.stages)
            + sum(waiting(stage) for stage in chunk.stages[1:])
            for chunk in self.chunks.layers
        )
        return self._tokens_at_once * block + self._tokens * rows

    @staticmethod
    def _kept_elements(chunk: ChunkWork) -> int:
        return sum(stage.kept_elements or stage.residual_elements for stage in chunk.stages)

    @property
    def kept(self) -> dict[str, float]:
        """Weights and results of the kept chunks, all microbatches; those of the last one too."""
        if not self._strategy.kept_chunks:
            return {}
        kept = self.chunks.layers[-self._strategy.kept_chunks :]
        return {"kept_chunks": sum(map(self._kept, kept))}

    @property
    def attention(self) -> dict[str, float]:
        """Attention's results of the chunks below those that keep them, all microbatches."""
        end = len(self.chunks.layers) - self._strategy.kept_chunks
        own = self.chunks.layers[max(0, end - self._strategy.attention_chunks) : max(0, end)]
        return self._attention(own)

    @property
    def attention_of_first(self) -> dict[str, float]:
        """Those of the first layer chunk."""
        end = len(self.chunks.layers) - self._strategy.kept_chunks
        reaches = 0 < end <= self._strategy.attention_chunks
        return self._attention(self.chunks.layers[:1] if reaches else ())

    def _attention(self, chunks: Sequence[ChunkWork]) -> dict[str, float]:
        elements = sum(
            stage.attention_elements + self._more_statistics * stage.attention_heads
            for chunk in chunks
            for stage in chunk.stages
            if stage.attention_elements
        )
        if not elements:
            return {}
        tokens = self._tokens * self._strategy.num_microbatches
        return {"kept_attention": float(tokens * self._strategy.compute_bytes * elements)}

    @property
    def kept_of_first(self) -> dict[str, float]:
        """Those of the first layer chunk."""
        if self._strategy.kept_chunks < len(self.chunks.layers):
            return {}
        return {"kept_chunks": self._kept(self.chunks.layers[0])}

    def _kept(self, chunk: ChunkWork) -> float:
        tokens = self._tokens * self._strategy.num_microbatches
        elements = self._kept_elements(chunk) + self._more_statistics * sum(
            stage.attention_heads for stage in chunk.stages
        )
        return self.weights(chunk) + float(tokens * self._strategy.compute_bytes * elements)

    def decided(self, chunks: Sequence[ChunkWork]) -> dict[str, float]:
        """What backward of these chunks must be given, of all microbatches."""
        elements = sum(stage.decided_elements for chunk in chunks for stage in chunk.stages)
        if not elements:
            return {}
        tokens = self._tokens * self._strategy.num_microbatches
        return {"decided": float(tokens * self._strategy.compute_bytes * elements)}

    @property
    def slices_head(self) -> bool:
        """Whether the head is taken in slices of the vocabulary."""
        return self._strategy.vocab_slices > 1

    @property
    def loss(self) -> dict[str, float]:
        """Of the head while it computes loss and gradients."""
        if not self.slices_head:
            return {
                "head_weights": 2.0 * self.weights(self.chunks.head),
                "logits": self.logits,
                "head_gradient": self.head_gradient,
            }
        return sliced_head.loss_memory(
            self.chunks,
            self._workload,
            self._strategy,
            microbatch_tokens=self._tokens,
            wire=self.wire(self.chunks.embed if self.tied else self.chunks.head),
            logits_copies=LOGITS_COPIES,
        )

    @property
    def head_wire(self) -> float:
        """What of the head's gradient may still be leaving when layers run backward."""
        return self.wire(self.chunks.head) / self._strategy.vocab_slices

    @property
    def embedding_gradient(self) -> float:
        """Of the embedding, packed and rounded; of a tied one in slices, one of them."""
        embed, count = self.chunks.embed, self._strategy.vocab_slices if self.tied else 1
        in_flight = 1 if count == 1 else GRADIENTS_IN_FLIGHT
        return (4.0 * embed.padded_parameters + in_flight * self.wire(embed)) / count

    @property
    def logits(self) -> float:
        """The logits of one loss chunk and what is made of them."""
        tokens = self._workload.loss_tokens(self._strategy.loss_chunk_tokens, self._tokens)
        own = self._workload.own_loss_tokens is not None
        copies = OWN_LOGITS_COPIES if own else LOGITS_COPIES
        return 4.0 * copies * tokens * self._workload.vocab_size

    @property
    def head_gradient(self) -> float:
        """fp32 sum over loss chunks, one summand or the result, and the sum over microbatches."""
        owner = self.chunks.embed if self.tied else self.chunks.head
        if self._strategy.num_microbatches > 1:
            return 12.0 * owner.num_parameters
        result = 4 if self.tied else self._strategy.compute_bytes  # a tied one is added to in fp32
        return (4.0 + result) * owner.num_parameters


def largest_neighbours(sizes: Sequence[float]) -> float:
    """The largest sum of two consecutive sizes."""
    if len(sizes) == 1:
        return sizes[0]
    return max(one + other for one, other in itertools.pairwise(sizes))


def _host(
    workload: Workload,
    chunks: Chunks,
    strategy: Strategy,
    hardware: HardwareProfile,
    optimizer_state_bytes: float,
) -> tuple[dict[str, float], float]:
    """Host categories and the size of the page-locked pool.

    What is loaded, saved or restored passes through host memory. Room for two neighbouring stages
    is kept for that, which a save beside steps has for its buffer whatever else is free; what stays
    on the devices is gathered when it is read.
    """
    copies = hardware.num_devices if strategy.gradient_route == "host_sum" else 1
    shards = hardware.num_devices if strategy.gradient_route == "reduce_scatter" else 1
    projection = sliced_head.projection_chunk(chunks, tied=workload.tied)
    requests = [
        strategy.gradient_bytes * chunk.padded_parameters / shards / slices
        for chunk in reversed(chunks.all[strategy.resident_chunks :])  # as backward sends them
        for slices in [strategy.vocab_slices if chunk is projection else 1]
        for _ in range(copies * shards * slices)
    ]
    gradients = float(sum(requests))
    boundaries = [float(strategy.host_boundary_bytes)] * (
        strategy.host_boundaries * strategy.num_microbatches * hardware.num_devices
    )
    in_pool = gradients + sum(boundaries)
    # The CPU backend has no page-locked pool.
    pool = in_pool if hardware.unified_memory else float(sum(pool_regions(boundaries + requests)))
    padded = chunks.padded_parameters - resident_parameters(chunks, strategy)
    passing = chunks.all[: strategy.resident_chunks]
    stages = [stage.num_parameters for stage in workload.stages]
    saved = largest_neighbours(stages)
    read = 0.0
    if passing:  # a chunk is gathered from its stages and sent, while the next one begins
        gathered = [chunk.padded_parameters for chunk in passing]
        several = strategy.layers_per_chunk > 1
        read = max(stages) + (largest_neighbours(gathered) if several else max(gathered))
    return {
        "master_weights": float(MASTER_BYTES * padded),
        "optimizer_state": float(optimizer_state_bytes * padded),
        "state_in_passing": float((MASTER_BYTES + optimizer_state_bytes) * max(saved, read)),
        "waiting_gradients": gradients,
        **({"host_boundaries": sum(boundaries)} if boundaries else {}),
        "pinned_pool_overhead": pool - in_pool,
        **_several_gpus(hardware, (MASTER_BYTES + optimizer_state_bytes) * padded),
        "runtime_reserve": hardware.host_reserve_bytes
        * (1 if hardware.unified_memory else hardware.num_devices),
    }, pool


def _several_gpus(hardware: HardwareProfile, state_bytes: float) -> dict[str, float]:
    """Host memory that several GPUs take beyond what each does."""
    if hardware.unified_memory or hardware.num_devices == 1:
        return {}
    return {"several_gpus": SEVERAL_GPUS_BYTES * math.sqrt(state_bytes)}
