"""The head in two passes over slices of the vocabulary (`models.sliced_loss`).

Slices outside, microbatches inside, blocks of tokens within a program. Pass 1 gives every token's
log-probability, and alone serves evaluation. In pass 2 a slice's gradient is sent as soon as it is
whole, so one is computed while the one before leaves. Of a tied model it waits on the devices, in
float32, for the lookup's part, which is made in the same slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from slidedp_jax.step.sliced_head_programs import SlicedHeadPrograms
from slidedp_jax.transfer.routes import Leaving, SentSlices
from slidedp_jax.transfer.vocabulary_slices import VocabularySlices
from slidedp_jax.transfer.weight_window import WeightSource

DeviceBatch = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """What a step's head leaves.

    Attributes:
      losses: per microbatch [G].
      dxs: per microbatch the gradient of x, None where nothing below is trained.
      done: arrays that are there when the head's programs are done.
      wires: of the head's trained parts, an untied projection's already on its way; None: nothing
        to send yet, or ever (`sums`).
      squares: [G], with `wires`.
      sums: of the gradients of a tied model's head, to be packed as any chunk's.
      table: a tied table's gradient so far, by slice; empty where it is frozen or the head's own.
    """

    losses: list[jax.Array]
    dxs: list[jax.Array]
    done: list[jax.Array]
    wires: tuple[jax.Array | SentSlices, ...] | None
    squares: jax.Array | None
    sums: Any
    table: list[jax.Array]


class SlicedHead:
    """The order of the two passes.

    Args:
      programs: compiled programs.
      head: number of the head's chunk.
      slice_weights: the weights of one slice at a time are on the devices, uploaded for each pass.
      start: starts a copy to the host (`routes.GradientPath.start`).
      make_room: waits until one more may be on its way.
      total: adds up [G] arrays.
    """

    def __init__(
        self,
        programs: SlicedHeadPrograms,
        *,
        head: int,
        slice_weights: bool,
        start: Callable[[jax.Array], Leaving],
        make_room: Callable[[], None],
        total: Callable[[tuple[jax.Array, ...]], jax.Array],
    ):
        self._programs, self._slice_weights = programs, slice_weights
        self.wire = programs.slices
        self._slices: VocabularySlices = programs.slices.slices
        self._head, self._tied = head, self._slices.chunk != head
        self._start, self._make_room, self._total = start, make_room, total

    def prefetch(self, weights: WeightSource) -> bool:
        """Start what the head needs first, if that needs no waiting."""
        if self._tied and not weights.prefetch(self._head):
            return False
        if self._slice_weights:
            return weights.prefetch_slice(0)
        return all(weights.prefetch_slice(n) for n in range(self._slices.num_slices))

    def losses(
        self, weights: WeightSource, xs: list[jax.Array], microbatches: Sequence[DeviceBatch]
    ) -> list[jax.Array]:
        """Pass 1 alone; the weights are released."""
        others = self._take_others(weights)
        losses, _ = self._first_pass(weights, others, xs, microbatches, again=False)
        jax.block_until_ready(losses)
        self.release(weights)
        return losses

    def release(self, weights: WeightSource) -> None:
        """The programs are done with the weights."""
        weights.release_slices()
        if self._tied:
            weights.release(self._head)

    def backward(
        self,
        weights: WeightSource,
        xs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        scale: jax.Array,
        *,
        needs_dx: bool,
        prefetch_below: Callable[[], None],
    ) -> HeadOutputs:
        """Both passes.

        Args:
          weights: where they come from.
          xs: hidden states, per microbatch.
          microbatches: arrays on the devices.
          scale: 1 / supervised tokens of the step.
          needs_dx: whether something below is trained.
          prefetch_below: starts the copies of what comes next, beside the last slice.
        """
        others = self._take_others(weights)
        losses, log_sums = self._first_pass(
            weights, others, xs, microbatches, again=not self._slice_weights
        )
        widen = len(microbatches) > 1
        inputs = [
            (others, x, batch, log_sum, scale)
            for x, batch, log_sum in zip(xs, microbatches, log_sums, strict=True)
        ]
        d_hidden = [self._programs.no_hidden(x) for x in xs]
        waiting, sent, squares = self._second_pass(
            weights, inputs, d_hidden, prefetch_below, widen=widen
        )
        finish = self._programs.finish(widen, needs_dx)
        dxs, sums = list[Any](), None
        end: Any = None
        for x in xs:
            dx, sums, end = finish(others, x, d_hidden.pop(0), sums)
            dxs.append(dx)
        if self._slices.trained and not self._tied:
            return self._sent(losses, dxs, sums, waiting, sent, squares, widen)
        return HeadOutputs(
            losses=losses,
            dxs=dxs,
            done=[end],
            wires=None,
            squares=None,
            sums=sums,
            table=[waiting[number] for number in sorted(waiting)],
        )

    def _second_pass(
        self,
        weights: WeightSource,
        inputs: Sequence[tuple[Any, ...]],
        d_hidden: list[Any],
        prefetch_below: Callable[[], None],
        *,
        widen: bool,
    ) -> tuple[dict[int, jax.Array], dict[int, Leaving], list[jax.Array]]:
        """Changes `d_hidden`, per microbatch as the inputs.

        Returns:
          Gradients of slices that wait for others', those that have been sent, and the squares of
          these.
        """
        waiting: dict[int, jax.Array] = {}
        sent: dict[int, Leaving] = {}
        squares: list[jax.Array] = []
        order = [*self._slices.pure, *self._slices.shared]
        previous: Any = None
        for place, number in enumerate(order):
            if self._slices.trained:
                self._make_room()
            rows, first = weights.take_slice(number), self.wire.first(number)
            self._prefetch_next(weights, order, place, prefetch_below)
            d_rows = self._programs.no_rows() if self._slices.trained else None
            for index, own in enumerate(inputs):
                d_hidden[index], d_rows = self._programs.gradients(
                    d_hidden[index], d_rows, rows, first, *own
                )
            del rows
            jax.block_until_ready(previous)  # back-pressure: the slice before is done
            if d_rows is None:
                if self._slice_weights:
                    jax.block_until_ready(d_hidden)
            elif self._tied or number in self._slices.shared:
                waiting[number] = previous = d_rows
            else:
                wire, previous = self.wire.pack(d_rows, widen=widen)
                sent[number] = self._start(wire)
                squares.append(previous)
            del d_rows
        return waiting, sent, squares

    def send_table(
        self, table: list[jax.Array], dxs: list[jax.Array], microbatches: Sequence[DeviceBatch]
    ) -> tuple[tuple[SentSlices, ...], jax.Array]:
        """A tied table's gradient with the lookup's part added, slice by slice, and its squares."""
        widen = True  # as of any embedding: sums over tokens, in float32
        sent, squares = [], []
        for number in range(self._slices.num_slices):
            d_rows = table.pop(0)
            self._make_room()
            for dx, batch in zip(dxs, microbatches, strict=True):
                d_rows = self._programs.look_up(d_rows, self.wire.first(number), dx, batch)
            wire, end = self.wire.pack(d_rows, widen=widen)
            del d_rows
            sent.append(self._start(wire))
            squares.append(end)
            if number:
                jax.block_until_ready(squares[number - 1])
        return (SentSlices(slices=tuple(sent)),), self._total(tuple(squares))

    def _sent(
        self,
        losses: list[jax.Array],
        dxs: list[jax.Array],
        sums: Any,
        shared: dict[int, jax.Array],
        sent: dict[int, Leaving],
        squares: list[jax.Array],
        widen: bool,
    ) -> HeadOutputs:
        """Send what had to wait for the other parameters' gradients."""
        self._make_room()
        rest, parts, end = self.wire.pack_rest(
            [shared.pop(number) for number in self._slices.shared], sums, widen=widen
        )
        for number, wire in zip(self._slices.shared, rest, strict=True):
            sent[number] = self._start(wire)
        in_turn = SentSlices(slices=tuple(sent[n] for n in range(self._slices.num_slices)))
        wires = tuple(
            in_turn if number == self._slices.part_number else parts[number]
            for number, part in enumerate(self._slices.layout.parts)
            if part.trained
        )
        total = self._total((*squares, end))
        return HeadOutputs(
            losses=losses,
            dxs=dxs,
            done=[total],
            wires=wires,
            squares=total,
            sums=None,
            table=[],
        )

    def _take_others(self, weights: WeightSource) -> Any:
        if self._tied:
            return weights.take(self._head)[0]
        return weights.take_others()[0]

    def _first_pass(
        self,
        weights: WeightSource,
        others: Any,
        xs: list[jax.Array],
        microbatches: Sequence[DeviceBatch],
        *,
        again: bool,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Per microbatch the losses [G] and the tokens' log-sums."""
        statistics = [self._programs.begin(batch) for batch in microbatches]
        order = range(self._slices.num_slices)
        for number in order:
            rows = weights.take_slice(number, again=again)
            if self._slice_weights and number + 1 < len(order):
                weights.prefetch_slice(number + 1)
            previous = statistics
            first = self.wire.first(number)
            statistics = []
            for own, x, batch in zip(previous, xs, microbatches, strict=True):
                statistics.append(self._programs.add(own, rows, first, others, x, batch))
            del rows, previous
            # Back-pressure: with sliced weights, no more than two slices are in use.
            if self._slice_weights:
                jax.block_until_ready(statistics)
        ends = [
            self._programs.losses(own, batch)
            for own, batch in zip(statistics, microbatches, strict=True)
        ]
        losses, log_sums = zip(*ends, strict=True)
        return list(losses), list(log_sums)

    def _prefetch_next(
        self,
        weights: WeightSource,
        order: Sequence[int],
        place: int,
        prefetch_below: Callable[[], None],
    ) -> None:
        """Copies run beside what is dispatched next."""
        if place + 1 == len(order):
            prefetch_below()
        elif self._slice_weights:
            weights.prefetch_slice(order[place + 1])
