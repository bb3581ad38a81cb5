"""Stages grouped into the chunks that travel and are updated together, with their padded sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slidedp_jax.planner.layer_sums import LayerSums, sums_of
from slidedp_jax.planner.workload import StageWork, Workload

LARGEST_PIECE = 2**31 - 1
"""Elements of a chunk on each host device; the update's program counts them in int32."""


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """One chunk.

    Attributes:
      name: `embed`, `layers.0-2`, `head`.
      kind: equal for chunks with equal stages, so that their costs are computed once.
      stages: its stages in forward order.
      num_parameters: parameters.
      padded_parameters: elements of its flat arrays.
      trained_parameters: parameters that are not frozen.
      trained_padded: elements of the flat arrays of those.
    """

    name: str
    kind: int
    stages: tuple[StageWork, ...]
    num_parameters: int
    padded_parameters: int
    trained_parameters: int
    trained_padded: int

    @property
    def is_trained(self) -> bool:
        """Whether not all of it is frozen."""
        return self.trained_parameters > 0 or not self.num_parameters

    @cached_property
    def sums(self) -> LayerSums:
        """Of its stages."""
        return sums_of(self.stages, self.padded_parameters)


@dataclass(frozen=True, kw_only=True, eq=False)  # a key of caches: compared by identity
class Chunks:
    """All chunks of a model.

    Attributes:
      embed: the embedding chunk.
      layers: layer chunks, bottom first.
      head: the head chunk.
      forward_only: lowest layer chunks in and below which nothing is trained.
    """

    embed: ChunkWork
    layers: tuple[ChunkWork, ...]
    head: ChunkWork
    forward_only: int = 0

    @cached_property
    def all(self) -> tuple[ChunkWork, ...]:
        """Chunks in forward order."""
        return (self.embed, *self.layers, self.head)

    @cached_property
    def padded_parameters(self) -> int:
        """Elements of all flat arrays of one kind."""
        return sum(chunk.padded_parameters for chunk in self.all)

    @cached_property
    def largest_layer(self) -> ChunkWork:
        """The layer chunk with the largest arrays."""
        return max(self.layers, key=lambda chunk: chunk.padded_parameters)

    @cached_property
    def most_trained(self) -> ChunkWork:
        """The layer chunk with the largest gradient."""
        return max(self.layers, key=lambda chunk: chunk.trained_padded)

    @cached_property
    def kinds(self) -> tuple[ChunkWork, ...]:
        """The first layer chunk of each kind."""
        return tuple({chunk.kind: chunk for chunk in reversed(self.layers)}.values())

    @cached_property
    def kinds_of_layers(self) -> tuple[StageWork, ...]:
        """Layers that differ."""
        return tuple(dict.fromkeys(stage for chunk in self.kinds for stage in chunk.stages))

    @cached_property
    def sums_below(self) -> tuple[LayerSums, ...]:
        """Of the lowest layer chunks: of none, of one and so on to all."""
        return tuple(itertools.accumulate((c.sums for c in self.layers), initial=LayerSums()))

    def fit_pieces(self, num_host_devices: int) -> bool:
        """Whether each host device can update its piece of every chunk."""
        return self.largest // num_host_devices <= LARGEST_PIECE

    @cached_property
    def largest(self) -> int:
        """Elements of the largest chunk's array."""
        return max(chunk.padded_parameters for chunk in self.all)


def blocks_of_rows(row_size: int, block_size: int) -> int:
    """The fewest blocks that are whole rows of a matrix with `row_size` columns."""
    return math.lcm(row_size, block_size) // block_size


def padded_size(
    groups: Sequence[int], block_size: int, num_host_devices: int, row_size: int = 1
) -> int:
    """Elements of a flat array.

    Each treatment group is padded to whole blocks, so that a block is of one group, and the whole
    to as many blocks on every host device.

    Args:
      groups: parameters per group.
      block_size: elements per block.
      num_host_devices: pieces into which the array is cut, K.
      row_size: every piece is a multiple of it.
    """
    blocks = sum(-(-size // block_size) for size in groups)
    unit = num_host_devices * blocks_of_rows(row_size, block_size)
    return -(-blocks // unit) * unit * block_size


@lru_cache(maxsize=256)
def chunk_stages(
    workload: Workload,
    layers_per_chunk: int,
    block_size: int,
    num_host_devices: int,
    vocab_slices: int = 1,
) -> Chunks:
    """Cut the model into chunks.

    Args:
      workload: the model.
      layers_per_chunk: layers of each chunk but perhaps the last.
      block_size: elements per block of the host update.
      num_host_devices: host devices over which a chunk is sharded.
      vocab_slices: with more than one, pieces of the projection are whole rows of it.
    """
    kinds: dict[tuple[StageWork, ...], int] = {}

    def chunk(name: str, stages: tuple[StageWork, ...], row_size: int = 1) -> ChunkWork:
        num_groups = max(len(stage.group_parameters) for stage in stages)
        frozen = sum(stage.frozen_parameters for stage in stages)
        groups = [
            sum(stage.group_parameters[i] for stage in stages if i < len(stage.group_parameters))
            for i in range(num_groups)
        ]
        # Frozen parameters are flat arrays of their own.
        trained, kept = (
            padded_size(sizes, block_size, num_host_devices, row_size)
            for sizes in (groups, [frozen])
        )
        return ChunkWork(
            name=name,
            kind=kinds.setdefault(stages, len(kinds)),
            stages=stages,
            num_parameters=sum(groups) + frozen,
            padded_parameters=trained + kept,
            trained_parameters=sum(groups),
            trained_padded=trained,
        )

    layers = workload.layers
    row_size = workload.hidden_size if vocab_slices > 1 else 1
    starts = range(0, len(layers), layers_per_chunk)
    return Chunks(
        embed=chunk("embed", (workload.embed,), row_size if workload.tied else 1),
        layers=tuple(
            chunk(
                f"layers.{start}-{min(start + layers_per_chunk, len(layers)) - 1}",
                layers[start : start + layers_per_chunk],
            )
            for start in starts
        ),
        head=chunk("head", (workload.head,), 1 if workload.tied else row_size),
        forward_only=num_layer_chunks(workload, layers_per_chunk)
        - backward_chunks(workload, layers_per_chunk),
    )


def num_layer_chunks(workload: Workload, layers_per_chunk: int) -> int:
    """Layer chunks of a model."""
    return -(-len(workload.layers) // layers_per_chunk)


def backward_chunks(workload: Workload, layers_per_chunk: int) -> int:
    """Layer chunks that run backward: those in or below which something is trained."""
    forward_only = workload.forward_only_layers
    if forward_only == len(workload.layers):
        return 0
    return num_layer_chunks(workload, layers_per_chunk) - forward_only // layers_per_chunk
