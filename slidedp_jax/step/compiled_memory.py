"""What a step's programs take on the devices, compiled before there are any arrays.

Forward and backward of layer chunks and the head in one pass are lowered from shapes and compiled.
They are the programs that the step calls, so it finds them compiled. Of chunks of equal structure
one stands for all. Not among them: what packs and unpacks, the embedding, and the head in slices
of the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.jax_internals import program_bytes
from slidedp_jax.models.streamed import LayerOutput, StreamedModel
from slidedp_jax.planner.compiled_check import ProgramMemory, Work
from slidedp_jax.planner.strategy import Strategy
from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.step.chunk_kinds import ChunkKinds
from slidedp_jax.step.layer_functions import ChunkKind, LayerFns, choose
from slidedp_jax.step.programs import ComputePrograms
from slidedp_jax.transfer.device_map import ROWS, SAME

COMPILED_AT_ONCE = 8
"""XLA compiles in threads of its own beside; more programs at once gain little."""

_Unsent = tuple[int, Any] | None
"""A chunk, and shapes of its gradients that the next program sums over the devices."""


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A program of a step, traced.

    Attributes:
      traced: on the shapes that it will be called with.
      said: of `ProgramMemory`, all but the sizes and the chunks.
      chunks: layer chunks that it runs for.
    """

    traced: jax.stages.Traced
    said: dict[str, Any]
    chunks: list[int] = field(default_factory=list)


class StepCompiler:
    """Lowers the programs of one step from shapes.

    Args:
      model: the decoder.
      strategy: how its steps are run.
      layouts: chunks in forward order.
      layer_fns: per layer chunk, the functions of its layers.
      programs: those of the step.
      sums_beside: gradients are summed over the devices while the chunk below computes.
      mesh: compute devices.
    """

    def __init__(
        self,
        model: StreamedModel,
        strategy: Strategy,
        layouts: Sequence[ChunkLayout],
        layer_fns: Sequence[LayerFns],
        programs: ComputePrograms,
        *,
        sums_beside: bool,
        mesh: jax.sharding.Mesh,
    ):
        self._model, self._strategy = model, strategy
        self._layouts, self._layer_fns = layouts, layer_fns
        self._programs, self._sums_beside = programs, sums_beside
        self._kinds = ChunkKinds(
            layouts,
            layer_fns,
            programs,
            kept_chunks=strategy.kept_chunks,
            attention_chunks=strategy.attention_chunks,
        )
        self._dtype = jnp.dtype(strategy.compute_dtype)
        self._widen = strategy.num_microbatches > 1
        self._same, self._rows = NamedSharding(mesh, SAME), NamedSharding(mesh, ROWS)
        self._num_devices = mesh.size

    def compile(self, microbatch: Mapping[str, np.ndarray]) -> list[ProgramMemory]:
        """Compile the programs, several at a time, and say what each takes of a device.

        Args:
          microbatch: arrays of the largest one (`step.batch.prepare`); their values do not matter.
        """
        self._found = dict[Any, _Program]()
        self._trace(microbatch)
        found = list(self._found.values())
        lowered = [program.traced.lower() for program in found]
        with ThreadPoolExecutor(min(COMPILED_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
            compiled = list(pool.map(lambda one: one.compile(), lowered))
        return [
            ProgramMemory(
                **program.said,
                chunks=tuple(program.chunks),
                **program_bytes(its)._asdict(),
            )
            for program, its in zip(found, compiled, strict=True)
        ]

    def _trace(self, microbatch: Mapping[str, np.ndarray]) -> None:
        """All programs, in the order of a step."""
        batch = {
            name: _shape(array.shape, array.dtype, self._rows) for name, array in microbatch.items()
        }
        embed = self._trees(0)[0]
        x = self._results(self._programs.embed.trace(embed, batch))
        head = self._kinds.head
        inputs, kinds, kept, sums = {}, dict[int, ChunkKind](), dict[int, Any](), dict[int, Any]()
        for chunk in range(1, head):
            inputs[chunk] = x
            trees, own = self._trees(chunk), self._of_chunk(chunk, batch)
            program: Any = self._programs.forward(self._layer_fns[chunk - 1])
            if chunk >= self._kinds.last_layers:
                kinds[chunk] = self._kinds.kind(chunk, trees, x, own, widen=self._widen)
                if kinds[chunk].keeps:
                    program = self._programs.kept(kinds[chunk]).forward
            output = self._add("forward", chunk, program, trees, x, own)
            if chunk in kinds and kinds[chunk].keeps:
                output, kept[chunk] = output
            if isinstance(output, LayerOutput):
                if output.sums is not None:
                    sums[chunk] = output.sums
                output = output.x
            x = output
        derivatives = self._derivatives(sums)
        dx, unsent = self._trace_head(embed, x, batch)
        for chunk in range(head - 1, self._kinds.last_layers - 1, -1):
            more = () if chunk not in kept else (kept[chunk],)
            arguments = (self._trees(chunk), inputs[chunk], *more, dx, self._of_chunk(chunk, batch))
            last = (self._scale,) if kinds[chunk].gives_aux else ()
            last += (derivatives[chunk],) if kinds[chunk].gives_sums else ()
            dx, own_sums = self._trace_backward(chunk, kinds[chunk], arguments, last, unsent)
            unsent = self._unsent(chunk, own_sums)

    def _trace_head(self, embed: Any, x: Any, batch: Any) -> tuple[Any, _Unsent]:
        """Shapes of the gradient by its inputs, and what the program below sums."""
        head = self._kinds.head
        if self._strategy.vocab_slices > 1:
            sent = not self._model.tied
            return x, None if sent else self._unsent(head, self._gradients_of(head))
        program: Any = self._programs.head_backward(self._widen, self._kinds.lowest < head)
        given = (self._trees(head)[0], embed if self._model.tied else None, x, batch, self._scale)
        _, dx, sums = self._add("head", head, program, *given, None)
        if self._widen:
            self._add("head", head, program, *given, sums, adds=True)
        return dx, self._unsent(head, (sums[0],))

    def _trace_backward(
        self,
        chunk: int,
        kind: ChunkKind,
        arguments: tuple[Any, ...],
        last: tuple[Any, ...],
        unsent: _Unsent,
    ) -> tuple[Any, Any]:
        """As `Pipeline._chunk_backward` calls them: the last microbatch's sums the chunk above."""
        count = self._strategy.num_microbatches
        plain: Any = self._programs.backward(kind)
        result: Any = None
        sums: Any = None
        for number in range(min(count, 3)):  # without sums, with them, and the last
            of_last = number == min(count, 3) - 1
            adds = number > 0
            if unsent is None or not of_last:
                result = self._add("backward", chunk, plain, *arguments, sums, *last, adds=adds)
            else:
                layout = self._layouts[unsent[0]]
                program: Any = self._programs.backward(kind, above=layout)
                _, result = self._add(
                    *("backward", chunk, program, unsent[1], *arguments, sums, *last),
                    adds=adds,
                    sums_above=True,
                )
            sums = result[1]
        dx, sums = result
        return dx, sums

    def _unsent(self, chunk: int, sums: Any) -> _Unsent:
        """What `Pipeline._send_or_keep` leaves to the next chunk's program."""
        if not self._layouts[chunk].trained_parts:
            return None
        beside = self._sums_beside and chunk > self._kinds.last_layers
        return (chunk, sums) if beside else None

    def _add(
        self,
        work: Work,
        chunk: int,
        program: Any,
        *arguments: Any,
        adds: bool = False,
        sums_above: bool = False,
    ) -> Any:
        """Take note of a program, and return the shapes of its results."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
        key = id(program), jax.tree.structure(arguments), shapes
        if key not in self._found:
            name = "head" if work == "head" else f"{work} {self._layouts[chunk].name}"
            said = {"name": name, "work": work, "adds": adds, "sums_above": sums_above}
            self._found[key] = _Program(traced=program.trace(*arguments), said=said)
        if work != "head":
            self._found[key].chunks.append(chunk - 1)
        return self._results(self._found[key].traced)

    def _results(self, traced: jax.stages.Traced) -> Any:
        """Shapes of results, all of which have a row of their own for each device."""
        return jax.tree.map(
            lambda leaf: _shape(leaf.shape, leaf.dtype, self._rows), traced.out_info
        )

    def _derivatives(self, sums: dict[int, Any]) -> dict[int, Any]:
        """Of the loss over the whole step, by what each chunk gives for it."""
        if not sums:
            return {}
        parts = [[own] * self._strategy.num_microbatches for own in sums.values()]
        found = jax.eval_shape(
            lambda parts, scale: self._programs.loss_of_sums(parts, scale).derivatives,
            parts,
            self._scale,
        )
        found = jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype, self._same), found)
        return dict(zip(sums, found, strict=True))

    def _trees(self, chunk: int) -> Any:
        """Shapes of a chunk's parameters, as unpacked."""
        layout = self._layouts[chunk]
        return layout.unflatten(
            [_shape(slot.shape, self._dtype, self._same) for slot in layout.slots]
        )

    def _gradients_of(self, chunk: int) -> Any:
        """Shapes of a chunk's gradients, each device's own."""
        dtype = jnp.float32 if self._widen else self._dtype
        chosen, _ = choose(self._trees(chunk), self._layouts[chunk].trained)
        return jax.tree.map(
            lambda leaf: _shape((self._num_devices, *leaf.shape), dtype, self._rows), chosen
        )

    def _of_chunk(self, chunk: int, batch: dict[str, Any]) -> dict[str, Any]:
        """As `Pipeline._of_chunk`."""
        if not self._model.indexed and "row_seeds" not in batch:
            return batch
        return {**batch, "layer_index": _shape((self._num_devices,), np.int32, self._rows)}

    @property
    def _scale(self) -> jax.ShapeDtypeStruct:
        return _shape((), np.float32, self._same)


def _shape(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
