"""Passes over the model: what steps, evaluation and generation are made of."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Cache, CachedFn, StreamedModel
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.step.batch import PreparedBatch, prepare
from slidedp_jax.step.in_flight import StepOutputs
from slidedp_jax.step.pipeline import GradientSink, Pipeline
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.transfer.copies import first_of_this_host, place
from slidedp_jax.transfer.device_groups import DATA_AXIS
from slidedp_jax.transfer.routes import Gradient, GradientPath, SentSlices
from slidedp_jax.transfer.weight_window import StreamedWeights, WeightSource
from slidedp_jax.update.state_gate import StateGate


@final
class Passes:
    """Rows through the model, without an update.

    For the trainer, generation and benchmarks; one at a time: the trainer's turn (`gate.turn`,
    `gate.passing`) is held meanwhile.

    Args:
      model: the model.
      strategy: how it is run.
      seed: of the random numbers that rows draw in training.
      documents_per_row: most documents of a packed row.
      mesh: compute devices, one axis `data`.
      gate: the way to the state.
      weights: weights on the devices.
      pipeline: the order of a step.
      programs: what it is made of.
      gradients: how they come back.
      layouts: chunks of the state.
    """

    def __init__(
        self,
        model: StreamedModel,
        strategy: Strategy,
        *,
        seed: int,
        documents_per_row: int,
        mesh: Mesh,
        gate: StateGate,
        weights: StreamedWeights,
        pipeline: Pipeline,
        programs: ComputePrograms,
        gradients: GradientPath,
        layouts: Sequence[ChunkLayout],
    ):
        self._model, self._strategy = model, strategy
        self._seed, self._documents_per_row = seed, documents_per_row
        self._num_devices = mesh.devices.size
        self._own_devices = first_of_this_host(mesh)[1]
        self._rows = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        self._same = NamedSharding(mesh, PartitionSpec())
        self._gate, self._weights = gate, weights
        self._pipeline, self._programs = pipeline, programs
        self._gradients, self._layouts = gradients, layouts
        self._boundary_bytes: dict[tuple[int, ...], int] = {}

    def prepare(self, batch: Mapping[str, np.ndarray], *, training: bool = False) -> PreparedBatch:
        """Validate a batch and split it into this trainer's microbatches.

        For training there may be no more than the strategy was planned for, and the rows of a model
        that draws random numbers carry the next step's seeds.
        """
        self._gate.check()
        draws = training and self._model.random
        prepared = prepare(
            batch,
            vocab_size=self._model.vocab_size,
            num_devices=self._num_devices,
            rows_per_microbatch=self._strategy.rows_per_microbatch,
            most_microbatches=self._strategy.num_microbatches if training else None,
            documents_per_row=self._documents_per_row,
            seed_and_step=(self._seed, self._gate.version + 1) if draws else None,
            token_arrays=self._model.token_arrays,
            shifted=self._model.shift_labels,
        )
        if training and self._strategy.host_boundaries:
            self._check_boundaries(prepared.microbatches[0])
        return prepared

    def forward_backward(
        self,
        weights: WeightSource,
        prepared: PreparedBatch,
        sink: GradientSink,
        *,
        stop: bool = False,
    ) -> StepOutputs:
        """One pass with gradients: weights from `weights`, gradients to `sink`.

        `stop` is told to all hosts, if there are several.
        """
        self._gate.check_open()
        assert len(prepared.microbatches) <= self._strategy.num_microbatches
        microbatches = self._place(prepared.microbatches)
        outputs = self._pipeline.step(weights, microbatches, self._scale(prepared), sink)
        return self._of_all_hosts(outputs, prepared, stop) if self._many_hosts else outputs

    @property
    def _many_hosts(self) -> bool:
        return self._own_devices < self._num_devices

    def _of_all_hosts(
        self, outputs: StepOutputs, prepared: PreparedBatch, stop: bool
    ) -> StepOutputs:
        """With figures that every host can read: one small collective, the last of a step."""
        rows = zlib.crc32(b"".join(_bytes_of(arrays) for arrays in prepared.microbatches))
        said = np.array([[stop, np.uint32(rows).astype(np.int32)]], np.int32)
        own = jax.make_array_from_callback((self._num_devices, 2), self._rows, lambda _: said)
        parts = [*outputs.losses, *outputs.squares]
        found, flags = self._programs.on_all_hosts(parts, own)
        count = len(outputs.losses)
        return replace(
            outputs,
            losses=found[:count],
            aux=found[count - len(outputs.aux) : count],
            squares=found[count:],
            flags=flags,
        )

    def _scale(self, prepared: PreparedBatch) -> jax.Array:
        """1 / supervised tokens, on every device."""
        scale: jax.Array = place(np.float32(1 / prepared.num_supervised), self._same)
        return scale

    def send(self, chunk: int, wires: Sequence[jax.Array | SentSlices]) -> Gradient:
        """Start the copy of a chunk's gradient to the host."""
        self._gate.check_open()
        return self._gradients.send(wires, self._layouts[chunk])

    def losses(self, prepared: PreparedBatch) -> list[jax.Array]:
        """What adds up to the batch's loss times its supervised tokens, as `StepOutputs.losses`.

        Some microbatches pass at a time; a loss over the whole step is one over the whole batch.
        """
        self._gate.check_open()
        losses, sums, at_once = (
            list[jax.Array](),
            list[list[Any]](),
            self._strategy.num_microbatches,
        )
        for first in range(0, len(prepared.microbatches), at_once):
            some = self._place(prepared.microbatches[first : first + at_once])
            more, parts = self._pipeline.losses(self._weights, some)
            losses += more
            sums = [
                [*before, *own]
                for before, own in zip(sums or [[]] * len(parts), parts, strict=True)
            ]
        if sums:
            losses.append(self._programs.loss_of_sums(sums, self._scale(prepared)).loss)
        if self._many_hosts:
            none = np.zeros((self._num_devices, 0), np.int32)
            losses, _ = self._programs.on_all_hosts(losses, place(none, self._rows))
        return losses

    def next_logits(
        self,
        layer_fns: Sequence[CachedFn],
        batch: Mapping[str, np.ndarray],
        last: np.ndarray,
        caches: list[Cache],
    ) -> np.ndarray:
        """One pass of generation under the current weights; see `slidedp_jax.generate`.

        Args:
          layer_fns: `prefill_fns` or `decode_fns` of the model's cached form.
          batch: what those read and `input_ids`, arrays [R, ...], R a multiple of the devices.
          last: index in `batch` of each row's last token, int32 [R].
          caches: from `init_caches`; replaced by what the pass leaves.

        Returns:
          Logits of the token after the last one, float32 [R, V].
        """
        self._check_may_generate()
        with self._gate.passing(self._weights):
            placed, at = jax.device_put((dict(batch), last), self._rows)
            logits = self._pipeline.next_logits(self._weights, layer_fns, placed, at, caches)
            return np.asarray(logits)

    def init_caches(self, num_rows: int, capacity: int) -> list[Cache]:
        """Empty caches of all layers, rows spread over the compute devices."""
        self._gate.check()
        self._check_may_generate()
        assert self._model.cached is not None
        # The same function object every time, so it is compiled once per size.
        init = self._model.cached.init_cache
        make = jax.jit(init, static_argnums=(0, 1, 2), out_shardings=self._rows)
        dtype = jax.numpy.dtype(self._strategy.compute_dtype)
        return [make(num_rows, capacity, dtype) for _ in self._model.layers]

    def _check_may_generate(self) -> None:
        if self._many_hosts:
            raise UserError(
                "generation runs on one host; save a checkpoint, export it, and generate from that"
            )

    def _check_boundaries(self, microbatch: Mapping[str, np.ndarray]) -> None:
        """Whether what passes between chunks has room in host memory."""
        dtype = jax.numpy.dtype(self._strategy.compute_dtype)
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), self._model.embed.shapes
        )
        shape = microbatch["input_ids"].shape
        if shape not in self._boundary_bytes:
            x = jax.eval_shape(self._model.embed_fn, params, microbatch)
            self._boundary_bytes[shape] = x.size * x.dtype.itemsize // self._num_devices
        need, have = self._boundary_bytes[shape], self._strategy.host_boundary_bytes
        if need > have:
            raise UserError(
                f"rows of {shape[1]:,} tokens make boundary activations of {need:,} bytes per "
                f"device and microbatch, and the strategy has room in host memory for {have:,} "
                "(host_boundary_bytes): plan with tokens_per_row of the longest rows"
            )

    def _place(self, microbatches: Sequence[Mapping[str, Any]]) -> list[dict[str, jax.Array]]:
        return [place(arrays, self._rows) for arrays in microbatches]


def _bytes_of(arrays: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(arrays[name].tobytes() for name in sorted(arrays))
