"""Bytes of the arrays on one device that the phases of a step are made of (`device_phases.py`)."""

from __future__ import annotations

from functools import cached_property

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.chunking import Chunks, ChunkWork
from slidedp_jax.planner.layer_sums import LayerSums
from slidedp_jax.planner.strategy import GRADIENTS_IN_FLIGHT, SLOTS_BESIDE_PREFETCH, Strategy
from slidedp_jax.planner.workload import BatchShape, StageWork, Workload

LOGITS_COPIES = 1
"""fp32 arrays [loss chunk, V] alive at once: what is made of the logits takes their place, where it
is as wide (their gradient in a narrower compute dtype does not)."""

OWN_LOGITS_COPIES = 3
"""The same of a loss of the user's own: logits, their exponentials, their gradient."""

BATCH_ARRAYS = 4
"""int32 arrays [rows, T]: inputs, targets, positions, segments."""


class DeviceSizes:
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
        self.largest_layer = chunks.largest_layer
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
        """Inputs of so many of the lowest layer chunks that are on a device for backward."""
        return self._strategy.boundaries_on_device(max(0, num_chunks - self.chunks.forward_only))

    def weights(self, chunk: ChunkWork) -> float:
        """Weights of a chunk in the compute dtype."""
        return float(self._strategy.compute_bytes * chunk.padded_parameters)

    def wire(self, chunk: ChunkWork) -> float:
        """One device's part of a gradient on its way to the host."""
        whole = float(self._strategy.gradient_bytes * chunk.trained_padded)
        return whole / self._num_devices if self._scatters else whole

    def share(self, chunk: ChunkWork) -> float:
        """One device's share of a summed gradient."""
        return float(self._strategy.gradient_bytes * chunk.trained_padded) / self._num_devices

    def gradient(self, chunk: ChunkWork) -> float:
        """A gradient as it comes out of the backward pass, and the fp32 sum over microbatches."""
        compute = self._strategy.compute_bytes
        per_parameter = compute if self._strategy.num_microbatches == 1 else compute + 4
        return float(per_parameter * chunk.trained_parameters)

    @property
    def _accumulated_bytes(self) -> int:
        return self._strategy.compute_bytes if self._strategy.num_microbatches == 1 else 4

    def accumulated(self, chunk: ChunkWork) -> float:
        """A gradient of all microbatches as trees."""
        return float(self._accumulated_bytes * chunk.trained_parameters)

    def packing(self, chunk: ChunkWork) -> float:
        """A gradient as trees, packed, and in fp32 where the devices sum it."""
        flat = self._accumulated_bytes
        widened = 4 if self._scatters and self._num_devices > 1 and flat < 4 else 0
        return self.accumulated(chunk) + float((flat + widened) * chunk.trained_padded)

    def summed_beside(self, chunk: ChunkWork) -> float:
        """The same of a chunk whose gradient is summed while the one below runs backward."""
        return self.packing(chunk) if self._scatters and self._num_devices > 1 else 0.0

    def per_microbatch(self, attribute: str) -> float:
        """The largest layer's elements of one kind for the tokens of one microbatch.

        Or, where it runs in blocks of tokens, for those of one block.
        """
        largest = max(getattr(stage, attribute) for stage in self.chunks.kinds_of_layers)
        return float(self._tokens_at_once * self._strategy.compute_bytes * largest)

    @cached_property
    def num_kept(self) -> int:
        """Layer chunks whose results are kept."""
        return min(self._strategy.kept_chunks, len(self.chunks.layers) - self.chunks.forward_only)

    def residuals_of(self, index: int) -> float:
        """What backward of a layer chunk makes anew of a microbatch; if kept, what is not kept."""
        largest = max(chunk.sums.residual_elements for chunk in self.chunks.kinds)
        if index >= len(self.chunks.layers) - self.num_kept:
            largest = max(0, largest - self.chunks.layers[index].sums.kept_elements)
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

        block = max(stage.residual_elements for stage in self.chunks.kinds_of_layers)
        rows = max(
            max(stage.row_elements for stage in chunk.stages)
            + sum(waiting(stage) for stage in chunk.stages[1:])
            for chunk in self.chunks.kinds
        )
        return self._tokens_at_once * block + self._tokens * rows

    @cached_property
    def kept(self) -> dict[str, float]:
        """Weights and results of the kept chunks, all microbatches; those of the last one too."""
        if not self.num_kept:
            return {}
        below = len(self.chunks.layers) - self.num_kept
        return {"kept_chunks": self._kept(self._between(below, len(self.chunks.layers)))}

    @cached_property
    def attention(self) -> dict[str, float]:
        """Attention's results of the chunks below those that keep them, all microbatches."""
        end, least = len(self.chunks.layers) - self.num_kept, self.chunks.forward_only
        return self._attention(max(least, end - self._strategy.attention_chunks), end)

    @cached_property
    def attention_of_first(self) -> dict[str, float]:
        """Those of the first layer chunk."""
        first = self.chunks.forward_only
        others = len(self.chunks.layers) - self.num_kept - first
        reaches = 0 < others <= self._strategy.attention_chunks
        return self._attention(first, first + 1 if reaches else first)

    def _attention(self, start: int, end: int) -> dict[str, float]:
        if start == end:
            return {}
        sums = self._between(start, end)
        if not sums.attention_elements:
            return {}
        elements = sums.attention_elements + self._more_statistics * sums.heads_of_results
        tokens = self._tokens * self._strategy.num_microbatches
        return {"kept_attention": float(tokens * self._strategy.compute_bytes * elements)}

    @cached_property
    def kept_of_first(self) -> dict[str, float]:
        """Those of the first layer chunk."""
        first = self.chunks.forward_only
        if not self.num_kept or first + self.num_kept < len(self.chunks.layers):
            return {}
        return {"kept_chunks": self._kept(self._between(first, first + 1))}

    def _between(self, start: int, end: int) -> LayerSums:
        return self.chunks.sums_below[end] - self.chunks.sums_below[start]

    def _kept(self, sums: LayerSums) -> float:
        tokens = self._tokens * self._strategy.num_microbatches
        elements = sums.kept_elements + self._more_statistics * sums.attention_heads
        return float(self._strategy.compute_bytes * (sums.padded_parameters + tokens * elements))

    def left_by_forward(self, index: int) -> float:
        """Results of one microbatch that forward of a layer chunk leaves for backward, beside x."""
        sums = self._between(index, index + 1)
        end = len(self.chunks.layers) - self.num_kept
        elements = sums.decided_elements
        if index >= end:
            elements += sums.kept_elements + self._more_statistics * sums.attention_heads
        elif index >= end - self._strategy.attention_chunks and sums.attention_elements:
            elements += sums.attention_elements + self._more_statistics * sums.heads_of_results
        return float(self._strategy.compute_bytes * self._tokens * elements)

    def decided(self, num_chunks: int) -> dict[str, float]:
        """What backward of the lowest layer chunks must be given, of all microbatches."""
        first = min(self.chunks.forward_only, num_chunks)
        elements = self._between(first, num_chunks).decided_elements
        if not elements:
            return {}
        tokens = self._tokens * self._strategy.num_microbatches
        return {"decided": float(tokens * self._strategy.compute_bytes * elements)}

    @property
    def slices_head(self) -> bool:
        """Whether the head is taken in slices of the vocabulary."""
        return self._strategy.vocab_slices > 1

    @cached_property
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
        return (4.0 * embed.trained_padded + in_flight * self.wire(embed)) / count

    @property
    def logits(self) -> float:
        """The logits of one loss chunk and their gradient."""
        if self._workload.own_loss_tokens is not None:
            return 4.0 * OWN_LOGITS_COPIES * self._loss_elements
        return 4.0 * LOGITS_COPIES * self._loss_elements + self._narrow_logits

    @property
    def head_gradient(self) -> float:
        """fp32 sum over loss chunks, to which products are added in place, and what becomes of it.

        That is the sum over microbatches; or of one, where the weights are not tied, the result in
        the compute dtype, whose memory the gradient of the logits has until then if it fits
        (measured on an H200, JAX 0.11.2: `docs/benchmarks/plans_h200_*.json`).
        """
        if self._strategy.num_microbatches > 1:
            return 2 * self.head_sum
        if self.tied:
            return self.head_sum
        result = float(self._strategy.compute_bytes * self.chunks.head.trained_parameters)
        shared = self._narrow_logits if self._narrow_logits <= result else 0.0
        return self.head_sum + result - shared

    @property
    def head_sum(self) -> float:
        """fp32 gradient of the matrix that makes the logits, and of what is with it."""
        owner = self.chunks.embed if self.tied else self.chunks.head
        return 4.0 * owner.trained_parameters

    @property
    def _loss_elements(self) -> float:
        """Logits of one loss chunk."""
        tokens = self._workload.loss_tokens(self._strategy.loss_chunk_tokens, self._tokens)
        return float(tokens * self._workload.vocab_size)

    @property
    def _narrow_logits(self) -> float:
        """Their gradient, where it is narrower than they are."""
        compute = self._strategy.compute_bytes
        return compute * self._loss_elements if compute < 4 else 0.0
