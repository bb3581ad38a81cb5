"""Which programs each layer chunk of a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from slidedp_jax.state.layout import ChunkLayout
from slidedp_jax.step.kept_programs import DECISIONS, EVERYTHING, ONLY_ATTENTION
from slidedp_jax.step.layer_functions import ChunkKind, LayerFns
from slidedp_jax.step.programs import ComputePrograms


def lowest_trained(layouts: Sequence[ChunkLayout]) -> int:
    """The lowest chunk of which anything is trained; nothing below runs backward."""
    return next(number for number, layout in enumerate(layouts) if layout.trained_parts)


class ChunkKinds:
    """Kinds of the layer chunks that run backward.

    Args:
      layouts: chunks in forward order: the embedding, layer chunks, the head.
      layer_fns: per layer chunk, the functions of its layers.
      programs: what tells what layers give.
      kept_chunks: top layer chunks whose results stay on the device from forward to backward.
      attention_chunks: layer chunks below those of which attention's results stay.

    Attributes:
      head: number of the head.
      lowest: the lowest chunk of which anything is trained.
      last_layers: the lowest layer chunk that runs backward.
      kept: the layer chunks whose results stay.
      attention_kept: those of which attention's stay.
    """

    def __init__(
        self,
        layouts: Sequence[ChunkLayout],
        layer_fns: Sequence[LayerFns],
        programs: ComputePrograms,
        *,
        kept_chunks: int,
        attention_chunks: int,
    ):
        self._layouts, self._layer_fns, self._programs = layouts, layer_fns, programs
        self.head = len(layouts) - 1
        self.lowest = lowest_trained(layouts)
        self.last_layers = max(1, self.lowest)
        self.kept = range(max(self.last_layers, self.head - kept_chunks), self.head)
        lowest_kept = max(self.last_layers, self.kept.start - attention_chunks)
        self.attention_kept = range(lowest_kept, self.kept.start)

    def kind(self, chunk: int, trees: Any, x: jax.Array, batch: Any, *, widen: bool) -> ChunkKind:
        """Of a layer chunk that runs backward.

        Args:
          chunk: its number.
          trees: its parameters, or their shapes.
          x: what it runs forward on, or its shape.
          batch: the same of the batch, with the index of its first layer where that is read.
          widen: whether gradients of several microbatches are summed.
        """
        layer_fns = self._layer_fns[chunk - 1]
        gives = self._programs.gives(layer_fns, trees, x, batch)
        keeps = DECISIONS if gives.decided else frozenset()
        if chunk in self.attention_kept:
            keeps = ONLY_ATTENTION
        return ChunkKind(
            layer_fns=layer_fns,
            widen=widen,
            trained=self._layouts[chunk].trained,
            needs_dx=chunk > self.lowest,
            gives_aux=gives.aux,
            gives_sums=gives.sums,
            keeps=EVERYTHING if chunk in self.kept else keeps,
        )

    def first_layer(self, chunk: int) -> int:
        """Number of the first layer of a layer chunk."""
        return sum(len(fns) for fns in self._layer_fns[: chunk - 1])
