"""How long each chunk takes on each lane when nothing else runs.

Compute is a roofline: matrix products at their rate or at the rate of reading their weights,
attention at its own rate, element-wise programs at the rate of device memory. The backward pass
recomputes the forward one (but for the chunk's last product, which no gradient needs), then does
two products per product and five attention products for two (FlashAttention-2, Dao 2023). Of frozen
weights there is no gradient, so one product per product; and below the lowest trained parameter
nothing runs backward at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.chunking import Chunks, ChunkWork, chunk_stages
from slidedp_jax.planner.collectives import gather, gradient_sum
from slidedp_jax.planner.flops import matmul_forward_flops
from slidedp_jax.planner.hardware import HardwareProfile
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.planner.training_state import ADAMW_STATE_BYTES, MASTER_BYTES
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

ATTENTION_BACKWARD = 2.5
"""Backward over forward operations of fused attention, recomputed scores included."""

ELEMENTWISE_BACKWARD = 2.0
"""Backward over forward traffic of element-wise programs."""

LOGITS_PASSES = 6
"""fp32 arrays [tokens, V] read or written by the loss: logits, log-sum-exp, gradient."""

SUM_BYTES = 12
"""Traffic per weight of adding to an fp32 gradient sum: read sum and summand, write sum."""


@dataclass(frozen=True, kw_only=True)
class ChunkDurations:
    """Seconds of one chunk per step, all microbatches, at full speed.

    Attributes:
      forward_s: forward compute; for the head nothing, for the others with the gather.
      backward_s: recomputation, backward, packing and reduction; for the head also the forward.
      executed_flops: operations of both on one device, recomputation included.
      upload_s: one copy of the weights to each device.
      upload_bytes: of that copy, one device.
      download_s: one copy of the gradient to the host from each device.
      download_bytes: of that copy, one device.
      update_s: host update.
      update_bytes: traffic of the host update in host memory.
      stays: whether the weights lie on the device from forward to backward, or it has none.
      boundary_s: one copy of the chunk's input off each device, or back; 0 if it stays.
      boundary_bytes: of that copy, one device.
      network_bytes: what gathers and sums bring into each host from the others.
      goes_back: whether it runs backward.
      trained: whether any of its parameters has a gradient, so that it is updated.
    """

    forward_s: float
    backward_s: float
    executed_flops: float
    upload_s: float = 0.0
    upload_bytes: float = 0.0
    download_s: float = 0.0
    download_bytes: float = 0.0
    update_s: float = 0.0
    update_bytes: float = 0.0
    stays: bool = False
    boundary_s: float = 0.0
    boundary_bytes: float = 0.0
    network_bytes: float = 0.0
    goes_back: bool = True
    trained: bool = True

    @property
    def is_updated_by_host(self) -> bool:
        """Whether its gradient leaves the devices, which keep the order of all else themselves."""
        return self.trained and bool(self.download_s or self.update_s)


def chunk_durations(
    workload: Workload,
    batch: BatchShape,
    strategy: Strategy,
    hardware: HardwareProfile,
    *,
    optimizer_state_bytes: float = ADAMW_STATE_BYTES,
) -> tuple[ChunkDurations, ...]:
    """Durations of every chunk in forward order, the embedding first and the head last.

    Args:
      workload: the model.
      batch: rows of a step.
      strategy: how the step is run.
      hardware: rates.
      optimizer_state_bytes: optimizer state per parameter in bytes.
    """
    chunks = chunk_stages(
        workload,
        strategy.layers_per_chunk,
        strategy.block_size,
        strategy.num_host_devices * strategy.num_hosts,
        strategy.vocab_slices,
    )
    costs = _Costs(workload, chunks, batch, strategy, hardware, optimizer_state_bytes)
    lowest = chunks.forward_only
    first_kept = max(lowest, len(chunks.layers) - strategy.kept_chunks)
    first_attention = max(lowest, first_kept - strategy.attention_chunks)
    resident = strategy.resident_chunks
    layers = [
        costs.layers(
            chunk,
            kept=index >= first_kept,
            attention=first_attention <= index < first_kept,
            last=chunk is chunks.layers[-1],
            resident=index + 1 < resident,
            place=_place(chunks, index),
        )
        for index, chunk in enumerate(chunks.layers)
    ]
    waiting: dict[int, ChunkDurations] = {}  # by kind
    for index in range(lowest, min(lowest + strategy.host_boundaries, len(layers))):
        kind = id(layers[index])
        if kind not in waiting:
            waiting[kind] = costs.with_boundary(layers[index])
        layers[index] = waiting[kind]
    embedding = replace(costs.embedding(resident=resident > 0), stays=True)
    return (embedding, *layers, costs.head(resident=resident > len(layers) + 1))


Place = Literal["below", "lowest", "above"]
"""Of a layer chunk: below all that is trained, the lowest that runs backward, or above that."""


def _place(chunks: Chunks, index: int) -> Place:
    if index < chunks.forward_only:
        return "below"
    lowest = index == chunks.forward_only and not chunks.embed.is_trained
    return "lowest" if lowest else "above"


class _Costs:
    """Rates and sizes that the durations of all chunks share."""

    def __init__(
        self,
        workload: Workload,
        chunks: Chunks,
        batch: BatchShape,
        strategy: Strategy,
        hardware: HardwareProfile,
        optimizer_state_bytes: float,
    ):
        self._workload = workload
        self._chunks = chunks
        self._batch = batch
        self._strategy = strategy
        self._hardware = hardware
        self._optimizer_state_bytes = optimizer_state_bytes
        self._tokens = strategy.rows_per_microbatch * batch.seq_length
        self._matmul_rate = hardware.matmul_flops_per_s(strategy.compute_dtype)
        slower = self._matmul_rate / hardware.bf16_matmul_flops_per_s
        self._attention_rate = hardware.attention_flops_per_s * min(1.0, slower)
        self._by_stage: dict[int, tuple[float, float, float, float]] = {}
        self._by_kind: dict[tuple[int, bool, bool, bool, bool, Place], ChunkDurations] = {}

    def embedding(self, *, resident: bool) -> ChunkDurations:
        """Lookup forward, scatter-add backward unless it is frozen."""
        chunk = self._chunks.embed
        stage = self._workload.embed
        lookup_s = self._elementwise_s(stage.elementwise_elements * self._tokens)
        scatter_s = ELEMENTWISE_BACKWARD * lookup_s + self._memory_s(4.0 * chunk.num_parameters)
        num = self._strategy.num_microbatches
        return self._durations(
            chunk,
            num * lookup_s,
            num * scatter_s,
            0.0,
            resident=resident,
            goes_back=chunk.is_trained,
        )

    def layers(
        self,
        chunk: ChunkWork,
        *,
        kept: bool,
        attention: bool,
        last: bool,
        resident: bool,
        place: Place,
    ) -> ChunkDurations:
        """All layers of a chunk; one that is kept recomputes only its element-wise programs.

        One that keeps attention's results recomputes all else. The weights of the last chunk stay
        for its backward, which comes next, in any case.
        """
        key = chunk.kind, kept, attention, last, resident, place
        if key not in self._by_kind:
            self._by_kind[key] = self._layers(
                chunk,
                kept=kept,
                attention=attention,
                stays=kept or last,
                resident=resident,
                place=place,
            )
        return self._by_kind[key]

    def _layers(
        self,
        chunk: ChunkWork,
        *,
        kept: bool,
        attention: bool,
        stays: bool,
        resident: bool,
        place: Place,
    ) -> ChunkDurations:
        forward_s = backward_s = forward_flops = backward_flops = 0.0
        trained_yet = place == "above"
        for stage in chunk.stages:
            first = not trained_yet and stage.is_trained
            trained_yet = trained_yet or first
            found = self._by_stage.get(id(stage))
            if found is None:
                found = self._by_stage[id(stage)] = self._layer(stage)
            stage_forward_s, stage_backward_s, flops, stage_backward_flops = found
            if not trained_yet:  # recomputed with the others, if at all
                stage_backward_s = stage_backward_flops = 0.0
            elif first:  # no gradient by the input
                spared = matmul_forward_flops(self._tokens, stage.before_attention_parameters)
                stage_backward_s -= spared / self._matmul_rate
                stage_backward_flops -= spared
            again_s = self._elementwise_s(stage.elementwise_elements * self._tokens)
            forward_s += stage_forward_s
            again_flops = flops
            if kept:
                again_flops = 0.0
            elif attention and stage.attention_elements:
                again_s = stage_forward_s - self._attention_s(stage)
                again_flops -= self._attention_flops(stage)
            else:
                again_s = stage_forward_s
            if self._strategy.layer_block_tokens:
                twice = matmul_forward_flops(self._tokens, stage.before_attention_parameters)
                again_s += twice / self._matmul_rate
                again_flops += twice
            backward_s += again_s + stage_backward_s
            forward_flops += flops
            backward_flops += again_flops + stage_backward_flops
        spared = spared_s = 0.0
        if not kept:
            last = chunk.stages[-1]
            spared = matmul_forward_flops(self._tokens, last.last_matmul_parameters)
            slower = self._hardware.grouped_matmul_share if last.grouped_parameters else 1.0
            spared_s = spared / (self._matmul_rate * slower)
        backward_s += self._accumulate_s(chunk) - spared_s
        num = self._strategy.num_microbatches
        flops = num * (forward_flops + backward_flops - spared)
        times = num * forward_s, num * backward_s
        if place == "below":
            flops = num * forward_flops
        return self._durations(
            chunk, *times, flops, stays=stays, resident=resident, goes_back=place != "below"
        )

    def head(self, *, resident: bool) -> ChunkDurations:
        """Final norm, logits and loss, forward and backward in one: three products (no recompute).

        Two where the projection is frozen, or where nothing below is trained.

        The gradient of the projection is summed over loss chunks in fp32, so small loss chunks cost
        memory traffic.
        """
        stage, workload, tokens = self._workload.head, self._workload, self._tokens
        if self._strategy.vocab_slices > 1:
            return self._sliced_head(resident=resident)
        trained = workload.projection_is_trained
        products = 1 + workload.head_gradients
        flops = products * matmul_forward_flops(tokens, stage.matmul_parameters)
        at_once = workload.loss_tokens(self._strategy.loss_chunk_tokens, tokens)
        loss_chunks = -(-tokens // at_once)
        seconds = (
            flops / self._matmul_rate
            + self._memory_s(4.0 * LOGITS_PASSES * tokens * workload.vocab_size)
            + self._memory_s(float(SUM_BYTES * loss_chunks * stage.matmul_parameters * trained))
            + (1 + ELEMENTWISE_BACKWARD) * self._elementwise_s(stage.elementwise_elements * tokens)
            + self._accumulate_s(self._chunks.embed if workload.tied else self._chunks.head)
        )
        num = self._strategy.num_microbatches
        times = 0.0, num * seconds
        return self._durations(self._chunks.head, *times, num * flops, resident=resident)

    def with_boundary(self, layers: ChunkDurations) -> ChunkDurations:
        """A chunk whose input waits in host memory, in one piece per microbatch."""
        num, hardware = self._strategy.num_microbatches, self._hardware
        size = float(self._strategy.host_boundary_bytes)
        return replace(
            layers,
            boundary_s=num * hardware.d2h.seconds(size),
            boundary_bytes=num * size,
        )

    def _sliced_head(self, *, resident: bool) -> ChunkDurations:
        """In two passes over slices of the vocabulary, whose weights may be uploaded twice."""
        stage, workload = self._workload.head, self._workload
        seconds, flops = sliced_head.head_seconds(
            workload,
            self._strategy,
            self._hardware,
            tokens=self._tokens,
            matmul_rate=self._matmul_rate,
            passes_over_logits=LOGITS_PASSES,
        )
        seconds += (1 + ELEMENTWISE_BACKWARD) * self._elementwise_s(
            stage.elementwise_elements * self._tokens
        )
        num = self._strategy.num_microbatches
        found = self._durations(
            self._chunks.head, 0.0, num * seconds, num * flops, resident=resident
        )
        times = sliced_head.uploads_of_projection(workload, self._strategy)
        owner = sliced_head.projection_chunk(self._chunks, tied=workload.tied)
        unpack_s, upload_bytes, pieces = self._upload(float(owner.padded_parameters))
        once_s = self._hardware.h2d.seconds(upload_bytes) + pieces * self._hardware.copy_gap_s
        passes = 2  # weights that stay are unpacked for either all the same
        return replace(
            found,
            backward_s=found.backward_s + (passes if workload.tied else passes - 1) * unpack_s,
            upload_s=found.upload_s + times * once_s,
            upload_bytes=found.upload_bytes + times * upload_bytes,
        )

    def _layer(self, stage: StageWork) -> tuple[float, float, float, float]:
        """Seconds and operations of forward and of backward without recompute, one microbatch."""
        matmul_s, matmul = self._products(
            stage.matmul_parameters, stage.grouped_parameters, stage.unvisited_parameters
        )
        gradient_s, gradient = matmul_s, matmul  # of the weights
        if stage.frozen_matmul_parameters:
            grouped = stage.grouped_parameters - stage.frozen_grouped_parameters
            gradient_s, gradient = self._products(
                stage.matmul_parameters - stage.frozen_matmul_parameters,
                grouped,
                stage.unvisited_parameters if grouped else 0,
            )
        attention, attention_s = self._attention_flops(stage), self._attention_s(stage)
        elementwise_s = self._elementwise_s(stage.elementwise_elements * self._tokens)
        return (
            matmul_s + attention_s + elementwise_s,
            matmul_s
            + gradient_s
            + ATTENTION_BACKWARD * attention_s
            + ELEMENTWISE_BACKWARD * elementwise_s,
            matmul + attention,
            matmul + gradient + ATTENTION_BACKWARD * attention,
        )

    def _attention_flops(self, stage: StageWork) -> float:
        return self._strategy.rows_per_microbatch * stage.attention_flops(self._batch)

    def _attention_s(self, stage: StageWork) -> float:
        rows = self._strategy.rows_per_microbatch
        return rows * stage.attention_s(self._batch, self._attention_rate)

    def _products(self, parameters: int, grouped: int, unvisited: int) -> tuple[float, float]:
        """Seconds and operations of products with so many weights, or of their gradients."""
        flops = matmul_forward_flops(self._tokens, parameters)
        by_expert = matmul_forward_flops(self._tokens, grouped)
        slower_s = by_expert / (self._matmul_rate * self._hardware.grouped_matmul_share)
        read_s = self._memory_s(float(self._strategy.compute_bytes * (parameters + unvisited)))
        return max((flops - by_expert) / self._matmul_rate + slower_s, read_s), flops

    def _memory_s(self, num_bytes: float) -> float:
        return num_bytes / self._hardware.device_memory_bytes_per_s

    def _elementwise_s(self, num_elements: float) -> float:
        return self._memory_s(self._strategy.compute_bytes * num_elements)

    def _accumulate_s(self, chunk: ChunkWork) -> float:
        """Adding one microbatch's gradient to the fp32 sum; nothing when there is only one."""
        if self._strategy.num_microbatches == 1:
            return 0.0
        return self._memory_s(float(SUM_BYTES * chunk.trained_parameters))

    def _durations(
        self,
        chunk: ChunkWork,
        forward_s: float,
        backward_s: float,
        flops: float,
        *,
        resident: bool,
        stays: bool = False,
        goes_back: bool = True,
    ) -> ChunkDurations:
        """Adds what depends on the chunk's size only: unpacking, collectives, copies, update.

        Of a resident chunk nothing is copied; the devices update their shares before its forward,
        the head's before its only visit.
        """
        strategy, hardware = self._strategy, self._hardware
        size, trained = float(chunk.padded_parameters), float(chunk.trained_padded)
        unpack_s, upload_bytes, pieces = self._upload(size)
        of_embedding = chunk is self._chunks.embed
        summed = gradient_sum(trained, strategy, hardware, in_fp32=of_embedding)
        pack_s, download_bytes, summands = self._download(trained, summed.seconds)
        is_head = chunk is self._chunks.head
        stays = stays or not goes_back
        reuses_weights = stays or of_embedding
        gathers = 1 if is_head or reuses_weights else 2
        network = gathers * gather(size, strategy, hardware).network_bytes + summed.network_bytes
        # The devices wait for Python where it needs longer to issue the work than they to do it.
        dispatch_s = hardware.visit_dispatch_s
        if not resident:
            dispatch_s += pieces * self._upload_call_s()
        state_bytes = MASTER_BYTES + self._optimizer_state_bytes
        adamw_bytes = 2.0 * (MASTER_BYTES + ADAMW_STATE_BYTES) + 2.0
        update_bytes = trained * (2.0 * state_bytes + summands * strategy.gradient_bytes)
        own_bytes = update_bytes / hardware.num_hosts
        backward_s += pack_s + (0.0 if reuses_weights else unpack_s)
        forward_s = 0.0 if is_head else max(forward_s + unpack_s, dispatch_s)
        backward_s = max(backward_s, hardware.visit_dispatch_s if reuses_weights else dispatch_s)
        if not goes_back:
            backward_s = 0.0
        of_chunk = {"stays": stays, "goes_back": goes_back, "trained": chunk.is_trained}
        if resident:
            update_s = update_bytes / hardware.total_devices / hardware.device_memory_bytes_per_s
            return ChunkDurations(
                forward_s=forward_s + (0.0 if is_head else update_s),
                backward_s=backward_s + (update_s if is_head else 0.0),
                executed_flops=flops,
                network_bytes=network,
                **of_chunk,
            )
        return ChunkDurations(
            forward_s=forward_s,
            backward_s=backward_s,
            executed_flops=flops,
            upload_s=hardware.h2d.seconds(upload_bytes) + (pieces - 1) * hardware.copy_gap_s,
            upload_bytes=upload_bytes,
            download_s=hardware.d2h.seconds(download_bytes),
            download_bytes=download_bytes,
            # Bound by memory traffic: other optimizers and more summands scale with their bytes.
            update_s=own_bytes / (adamw_bytes * hardware.host_update_params_per_s),
            update_bytes=own_bytes,
            network_bytes=network,
            **of_chunk,
        )

    def _upload(self, size: float) -> tuple[float, float, int]:
        """Seconds of unpacking, bytes that each device pulls, and in how many pieces."""
        strategy, hardware = self._strategy, self._hardware
        num_bytes, pieces = strategy.upload_bytes * size, strategy.num_host_devices
        unpack_s = self._memory_s(num_bytes + strategy.compute_bytes * size)
        if strategy.weight_route == "replicate":
            return unpack_s, num_bytes, pieces
        unpack_s += gather(size, strategy, hardware).seconds
        return unpack_s, num_bytes / hardware.total_devices, pieces // hardware.num_devices

    def _download(self, size: float, sum_s: float) -> tuple[float, float, int]:
        """Seconds of packing and summing, bytes that each device sends, summands on the host."""
        strategy, hardware = self._strategy, self._hardware
        num_bytes = strategy.gradient_bytes * size
        pack_s = self._memory_s(2.0 * num_bytes)
        if strategy.gradient_route == "host_sum":
            return pack_s, num_bytes, hardware.num_devices
        return pack_s + sum_s, num_bytes / hardware.total_devices, 1

    def _upload_call_s(self) -> float:
        """Python's time for one piece of an upload, which starts the copies to all devices."""
        hardware = self._hardware
        return hardware.upload_call_s + hardware.num_devices * hardware.upload_call_per_device_s
