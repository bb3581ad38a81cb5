"""One step's schedule: what is issued when, and what is waited for.

The order decides what overlaps. On a GPU a copy waits for all compute dispatched before it and runs
beside compute dispatched after it. So per chunk: start the copy of the next chunk, *then* dispatch
the compute of this one, *then* block until the previous one is done, which bounds how many chunks
are on the device. All microbatches pass through a chunk while it is there.

Chunks in forward order: 0 is the embedding, then the layer chunks, the last is the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from slidedp_jax.models.streamed import Cache, CachedFn, LayerOutput
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.step.chunk_kinds import ChunkKinds
from slidedp_jax.step.in_flight import InFlight, LeftByForward, StepOutputs
from slidedp_jax.step.layer_functions import LayerFns
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.step.sliced_head import SlicedHead
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.boundary_store import BoundaryStore
from slidedp_jax.transfer.routes import SentSlices
from slidedp_jax.transfer.weight_window import WeightSource

DeviceBatch = Mapping[str, jax.Array]

GradientSink = Callable[[int, Sequence[jax.Array | SentSlices]], None]
"""Takes a chunk and its gradient as the devices send it (`routes.GradientPath.to_wire`)."""


class Pipeline:
    """Schedules forward and backward over chunks.

    Args:
      layouts: chunks in forward order.
      layer_fns: per layer chunk, the functions of its layers.
      tied: whether the head reads the embedding's weights.
      indexed: whether layers read their index.
      programs: compiled programs.
      boundaries: what passes between chunks, from forward to backward.
      sliced_head: the head in slices of the vocabulary; None: in one pass.
      prefetch_depth: chunks fetched ahead of the one in use.
      kept_chunks: top layer chunks whose weights and intermediate results stay on the device
        between forward and backward.
      attention_chunks: layer chunks below those of which attention's results stay.
      sums_beside: gradients are summed over the devices while the chunk below computes.
      make_room: waits until one gradient more may be on its way off the devices.
      tracer: takes note of what is issued.
    """

    def __init__(
        self,
        layouts: Sequence[ChunkLayout],
        layer_fns: Sequence[LayerFns],
        *,
        tied: bool,
        indexed: bool = False,
        programs: ComputePrograms,
        boundaries: BoundaryStore,
        sliced_head: SlicedHead | None = None,
        prefetch_depth: int,
        kept_chunks: int = 0,
        attention_chunks: int = 0,
        sums_beside: bool = False,
        make_room: Callable[[], None],
        tracer: Tracer,
    ):
        self._layouts = layouts
        self._layer_fns = layer_fns
        self._tied = tied
        self._indexed = indexed
        self._programs = programs
        self._boundaries = boundaries
        self._sliced_head = sliced_head
        self._holds_embed = tied and sliced_head is None
        self._depth = prefetch_depth
        self._sums_beside = sums_beside
        self._await_room = make_room
        self._tracer = tracer
        self._head = len(layouts) - 1
        self._whole_end = self._head + (1 if sliced_head is None else 0)
        self._kinds = ChunkKinds(
            layouts,
            layer_fns,
            programs,
            kept_chunks=kept_chunks,
            attention_chunks=attention_chunks,
        )
        self._lowest, self._last_layers = self._kinds.lowest, self._kinds.last_layers
        self._kept = self._kinds.kept
        self._embed_reads_values: bool | None = None
        self._layer_indices: dict[int, jax.Array] = {}

    def step(
        self,
        weights: WeightSource,
        microbatches: Sequence[DeviceBatch],
        scale: jax.Array,
        sink: GradientSink,
    ) -> StepOutputs:
        """Forward and backward over all microbatches.

        Args:
          weights: where chunks come from.
          microbatches: arrays on the devices, rows sharded.
          scale: 1 / supervised tokens of the step, float32 scalar on every device.
          sink: takes each chunk's gradient as soon as its computation is issued, and starts its
            copy to the host.
        """
        embed, left = self._forward(weights, microbatches, keep_from=self._lowest)
        aux, figures = self._programs.totals(left.aux), {}
        if left.sums:
            of_step = self._programs.loss_of_sums(list(left.sums.values()), scale)
            left.derivatives.update(zip(left.sums, of_step.derivatives, strict=True))
            left.sums.clear()
            aux, figures = [*aux, of_step.loss], of_step.figures
        squares: list[jax.Array | None] = [None] * len(self._layouts)
        xs = self._boundaries.take(self._head)
        if self._sliced_head is None:
            losses, dxs, sums = self._head_pass(weights, embed, xs, microbatches, scale)
            if self._tied:
                weights.release(0)  # its copy is complete: forward, which is done, has read it
            del embed
            head_sums, embed_sums = sums
            above = self._send_or_keep(self._head, (head_sums,), squares, sink, done=losses)
            del head_sums, sums
        else:
            losses, dxs, above, embed_sums = self._sliced_head_pass(
                weights, xs, microbatches, scale, squares, sink
            )
        del xs
        for chunk in range(self._head - 1, self._last_layers - 1, -1):
            trees = left.trees.pop(chunk, None)
            if trees is None:
                trees = weights.take(chunk)
            self._prefetch_below(weights, chunk)
            self._make_room()
            dxs, chunk_sums, packed = self._chunk_backward(
                chunk, trees, left, dxs, microbatches, scale, above
            )
            del trees
            done = []
            if packed is not None:
                done = [self._sent(above.chunk, packed, squares, sink)]
                above = replace(above, unsent=None)  # packed, so their memory is free
            current = self._send_or_keep(chunk, chunk_sums, squares, sink, done=done)
            del chunk_sums, packed
            # Back-pressure: the chunk above is done, so its weights and gradients are free.
            jax.block_until_ready(above.done)
            self._release_after_backward(weights, above.chunk)
            above = current
            if not above.done:
                # Nothing but dxs marks the end of this chunk, and the next program takes those.
                jax.block_until_ready(dxs)
        in_slices = self._sliced_head is not None and self._tied
        if self._lowest == 0 and not in_slices:
            self._make_room()
            embed_sums = self._embed_pass(weights, dxs, microbatches, embed_sums)
        # Beside the embedding's pass, which is short; an update of this chunk may begin now.
        jax.block_until_ready(above.done)
        self._release_after_backward(weights, above.chunk)
        if self._lowest == 0 and in_slices:
            assert self._sliced_head is not None
            with self._tracer.span("compute", "backward embed"):
                wires, squares[0] = self._sliced_head.send_table(embed_sums, dxs, microbatches)
            with self._tracer.span("d2h", f"download {self._layouts[0].name}"):
                sink(0, wires)
        elif self._lowest == 0:
            self._send_or_keep(0, (embed_sums,), squares, sink, done=[])
        return StepOutputs(
            losses=[*losses, *aux],
            aux=aux,
            figures=figures,
            squares=[part for part in squares if part is not None],
        )

    def losses(
        self, weights: WeightSource, microbatches: Sequence[DeviceBatch]
    ) -> tuple[list[jax.Array], list[list[Any]]]:
        """Forward only, by the programs of a step.

        Returns:
          `StepOutputs.losses` without the loss over the whole step, and per chunk that gives some,
          per microbatch, what that is made of.
        """
        embed, left = self._forward(weights, microbatches, keep_from=self._head)
        if self._sliced_head is not None:
            losses = self._sliced_head.losses(
                weights, self._boundaries.take(self._head), microbatches
            )
            return [*losses, *self._programs.totals(left.aux)], list(left.sums.values())
        head = weights.take(self._head)[0]
        losses = [
            self._programs.loss(head, embed, x, batch)
            for x, batch in zip(self._boundaries.take(self._head), microbatches, strict=True)
        ]
        jax.block_until_ready(losses)  # what is released next has been read
        weights.release(self._head)
        if self._tied:
            weights.release(0)
        return [*losses, *self._programs.totals(left.aux)], list(left.sums.values())

    def next_logits(
        self,
        weights: WeightSource,
        layer_fns: Sequence[CachedFn],
        batch: DeviceBatch,
        last: jax.Array,
        caches: list[Cache],
    ) -> jax.Array:
        """One pass over rows that keep keys and values.

        Args:
          weights: where chunks come from.
          layer_fns: per layer, the prefill or the decode function of `models.streamed.CachedForm`.
          batch: arrays on the devices, rows sharded.
          last: index in `batch` of each row's last token, int32 [B].
          caches: per layer; each is donated and replaced by what the pass leaves.

        Returns:
          Logits of the token after the last one, float32 [B, V].
        """
        embed = weights.take(0)[0]
        self._prefetch(weights, range(1, self._whole_end))
        x = self._programs.embed(embed, batch)
        if not self._tied:
            embed = None
        stop = 0
        for chunk in range(1, self._head):
            trees = weights.take(chunk)
            self._prefetch(weights, range(chunk + 1, self._whole_end))
            start, stop = stop, stop + len(self._layer_fns[chunk - 1])
            program = self._programs.cached_forward(tuple(layer_fns[start:stop]))
            previous = x
            with self._tracer.span("compute", f"generate {self._layouts[chunk].name}"):
                x, caches[start:stop] = program(trees, x, batch, tuple(caches[start:stop]))
            jax.block_until_ready(previous)  # back-pressure, as in `_forward`
            if chunk > 1 or not self._tied:
                weights.release(chunk - 1)
            self._prefetch(weights, range(chunk + 1, self._whole_end))
        head = weights.take(self._head)[0]
        logits: jax.Array = self._programs.logits_at(head, embed, x, last)
        jax.block_until_ready(logits)  # what is released next has been read
        for chunk in (self._head - 1, self._head, *([0] if self._tied else [])):
            weights.release(chunk)
        return logits

    def _forward(
        self, weights: WeightSource, microbatches: Sequence[DeviceBatch], *, keep_from: int
    ) -> tuple[Any, LeftByForward]:
        """The embedding's weights if tied, and what is left of the chunks from `keep_from` on.

        With `keep_from` at the head, nothing will run backward but the head. The programs are the
        same, as others would differ in the last bits; what they keep is let go at once.
        """
        embed = weights.take(0)[0]
        self._prefetch(weights, range(1, self._head + 1))
        with self._tracer.span("compute", "embed"):
            xs = [self._programs.embed(embed, batch) for batch in microbatches]
        if not self._holds_embed:
            embed = None
        self._boundaries.clear()
        left = LeftByForward(kinds={}, trees={}, residuals={}, aux=[], sums={}, derivatives={})
        trees = None
        for chunk in range(1, self._head):
            del trees
            trees = weights.take(chunk)
            self._prefetch(weights, range(chunk + 1, self._head + 1))
            previous = xs
            if keep_from <= chunk:
                self._boundaries.put(chunk, previous)  # a copy runs beside what comes next
            with self._tracer.span("compute", f"forward {self._layouts[chunk].name}"):
                if chunk >= self._last_layers:
                    own = self._of_chunk(chunk, microbatches[0])
                    left.kinds[chunk] = self._kinds.kind(
                        chunk, trees, previous[0], own, widen=len(microbatches) > 1
                    )
                xs = self._chunk_forward(chunk, trees, previous, microbatches, left)
            if keep_from == self._head:
                left.residuals.pop(chunk, None)
            elif chunk in self._kept:
                left.trees[chunk] = trees
            # Back-pressure: what gave this chunk's inputs is done, and with it the chunk below.
            jax.block_until_ready(previous)
            if chunk > 1 or not self._holds_embed:  # the head still reads a tied embedding
                weights.release(chunk - 1)
            # An update may have been committed meanwhile; its copy can still run beside this chunk.
            self._prefetch(weights, range(chunk + 1, self._head + 1))
        self._boundaries.put(self._head, xs)
        if keep_from == self._head:
            # No backward will mark the last chunk's end.
            jax.block_until_ready(xs)
            weights.release(self._head - 1)
        else:
            left.trees[self._head - 1] = trees
        return embed, left

    def _chunk_forward(
        self,
        chunk: int,
        trees: Any,
        xs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        left: LeftByForward,
    ) -> list[jax.Array]:
        """X after the chunk, per microbatch; what else there is goes to `left`."""
        kind = left.kinds.get(chunk)
        keeps = kind is not None and bool(kind.keeps)
        if keeps:
            forward = self._programs.kept(kind).forward
        else:
            forward = self._programs.forward(self._layer_fns[chunk - 1])
        outputs = [
            forward(trees, x, self._of_chunk(chunk, batch))
            for x, batch in zip(xs, microbatches, strict=True)
        ]
        if keeps:
            left.residuals[chunk] = [residuals for _, residuals in outputs]
            outputs = [output for output, _ in outputs]
        if isinstance(outputs[0], LayerOutput):
            if outputs[0].aux is not None:
                left.aux.append([output.aux for output in outputs])
            if outputs[0].sums is not None:
                left.sums[chunk] = [output.sums for output in outputs]
            outputs = [output.x for output in outputs]
        return outputs

    def _fetched_below(self, chunk: int) -> list[int]:
        """Layer chunks below `chunk` that backward fetches, in its order."""
        below = range(chunk - 1, self._last_layers - 1, -1)
        return [other for other in below if other not in self._kept]

    def _release_after_backward(self, weights: WeightSource, chunk: int) -> None:
        """Forward has released the kept chunks below the last layer chunk already."""
        if chunk == self._head and self._sliced_head is not None:
            self._sliced_head.release(weights)
        elif chunk not in self._kept or chunk == self._head - 1:
            weights.release(chunk)

    def _head_pass(
        self,
        weights: WeightSource,
        embed: Any,
        xs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        scale: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
        """Losses, gradients by the head's inputs, and sums of (head, embed) gradients."""
        head = weights.take(self._head)[0]
        self._prefetch_below(weights, self._head)
        program = self._programs.head_backward(len(microbatches) > 1, self._lowest < self._head)
        self._make_room()
        losses, dxs, sums = [], [], None
        with self._tracer.span("compute", "head and loss"):
            for x, batch in zip(xs, microbatches, strict=True):
                loss, dx, sums = program(head, embed, x, batch, scale, sums)
                losses.append(loss)
                dxs.append(dx)
        jax.block_until_ready(xs)  # back-pressure: the last layer chunk has run forward
        return losses, dxs, sums

    def _sliced_head_pass(
        self,
        weights: WeightSource,
        xs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        scale: jax.Array,
        squares: list[jax.Array | None],
        sink: GradientSink,
    ) -> tuple[list[jax.Array], list[jax.Array], InFlight, Any]:
        """The same in slices, the head on its way, and what a tied table has of its gradient."""
        assert self._sliced_head is not None
        with self._tracer.span("compute", "head and loss in slices"):
            outputs = self._sliced_head.backward(
                weights,
                xs,
                microbatches,
                scale,
                needs_dx=self._lowest < self._head,
                prefetch_below=lambda: self._prefetch_below(weights, self._head),
            )
        if outputs.wires is None:
            above = self._send_or_keep(self._head, outputs.sums, squares, sink, done=outputs.done)
        else:
            squares[self._head] = outputs.squares
            with self._tracer.span("d2h", f"download {self._layouts[self._head].name}"):
                sink(self._head, outputs.wires)
            above = InFlight(chunk=self._head, done=outputs.done)
        return outputs.losses, outputs.dxs, above, outputs.table or None

    def _chunk_backward(
        self,
        chunk: int,
        trees: Any,
        left: LeftByForward,
        dxs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        scale: jax.Array,
        above: InFlight,
    ) -> tuple[list[jax.Array], Any, Any]:
        """Gradients by the chunk's inputs, of its weights, and what packing those unsent gave.

        The last microbatch's program does the latter, so that the devices exchange the gradients of
        the chunk above while they compute, and what it gives marks the end of all.
        """
        kind, residuals = left.kinds[chunk], left.residuals.pop(chunk, None)
        xs = self._boundaries.take(chunk)
        out, sums, packed = [], None, None
        with self._tracer.span("compute", f"backward {self._layouts[chunk].name}"):
            for number, (x, dx, batch) in enumerate(zip(xs, dxs, microbatches, strict=True), 1):
                kept = () if residuals is None else (residuals.pop(0),)
                arguments = (trees, x, *kept, dx, self._of_chunk(chunk, batch), sums)
                if kind.gives_aux:
                    arguments += (scale,)
                if kind.gives_sums:
                    arguments += (left.derivatives[chunk],)
                if above.unsent is None or number < len(microbatches):
                    program = self._programs.backward(kind)
                    below, sums = program(*arguments)
                else:
                    layout = self._layouts[above.chunk]
                    program = self._programs.backward(kind, above=layout)
                    packed, (below, sums) = program(above.unsent, *arguments)
                out.append(below)
        return out, sums, packed

    def _of_chunk(self, chunk: int, batch: DeviceBatch) -> DeviceBatch:
        """The batch with the index of the chunk's first layer, where layers read or draw by it."""
        if not self._indexed and "row_seeds" not in batch:
            return batch
        if chunk not in self._layer_indices:
            self._layer_indices[chunk] = self._programs.layer_index(self._kinds.first_layer(chunk))
        return {**batch, "layer_index": self._layer_indices[chunk]}

    def _embed_pass(
        self,
        weights: WeightSource,
        dxs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        sums: Any,
    ) -> Any:
        """Gradients of the embedding, its weights fetched again only if they are needed."""
        if self._embed_reads_values is None:
            self._embed_reads_values = self._programs.embed_backward_reads_values(
                microbatches[0], dxs[0]
            )
        embed = weights.take(0)[0] if self._embed_reads_values else None
        with self._tracer.span("compute", "backward embed"):
            for dx, batch in zip(dxs, microbatches, strict=True):
                sums = self._programs.embed_backward(embed, batch, dx, sums)
        if self._embed_reads_values:
            jax.block_until_ready(sums)  # its programs are done with the weights
            weights.release(0)
        return sums

    def _send_or_keep(
        self,
        chunk: int,
        sums: Any,
        squares: list[jax.Array | None],
        sink: GradientSink,
        *,
        done: list[jax.Array],
    ) -> InFlight:
        """Pack and send a chunk's gradients, or leave that to the next chunk's program.

        `done` marks the end of the chunk's other programs, where anything does; a frozen chunk has
        nothing to pack.
        """
        layout = self._layouts[chunk]
        if not layout.trained_parts:
            return InFlight(chunk=chunk, done=done)
        if self._sums_beside and chunk > self._last_layers:
            return InFlight(chunk=chunk, done=done, unsent=sums)
        self._make_room()
        packed = self._programs.wire.pack(layout, sums)
        return InFlight(chunk=chunk, done=[self._sent(chunk, packed, squares, sink)])

    def _sent(
        self,
        chunk: int,
        packed: tuple[Any, jax.Array],
        squares: list[jax.Array | None],
        sink: GradientSink,
    ) -> jax.Array:
        """Start the copy of packed gradients to the host; returns what marks their end."""
        wires, end = packed
        squares[chunk] = end
        with self._tracer.span("d2h", f"download {self._layouts[chunk].name}"):
            sink(chunk, wires)
        return end

    def _make_room(self) -> None:
        """Before a gradient is computed, or packed: what is on its way must not pile up.

        The devices are still at work on the chunk above, so waiting costs nothing unless copies are
        slower than backward.
        """
        with self._tracer.span("wait", "wait for gradients to leave"):
            self._await_room()

    def _prefetch_below(self, weights: WeightSource, chunk: int) -> None:
        """Before a chunk's backward: start the copies that shall run beside it.

        The inputs of the chunk below, and the weights that are fetched next; the head's chunk finds
        those of the last layers on the devices.
        """
        if chunk > self._last_layers:
            self._boundaries.prefetch(chunk - 1)
        self._prefetch(weights, self._fetched_below(min(chunk, self._head - 1)))

    def _prefetch(self, weights: WeightSource, order: Sequence[int]) -> None:
        """Start the next copies, as deep as allowed; stop at the first that would have to wait."""
        for chunk in order[: self._depth]:
            if chunk == self._head and self._sliced_head is not None:
                started = self._sliced_head.prefetch(weights)
            else:
                started = weights.prefetch(chunk)
            if not started:
                return
