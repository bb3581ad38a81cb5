"""Stages grouped into the chunks that travel and are updated together, with their padded sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    """

    name: str
    kind: int
    stages: tuple[StageWork, ...]
    num_parameters: int
    padded_parameters: int


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """All chunks of a model.

    Attributes:
      embed: the embedding chunk.
      layers: layer chunks, bottom first.
      head: the head chunk.
    """

    embed: ChunkWork
    layers: tuple[ChunkWork, ...]
    head: ChunkWork

    @property
    def all(self) -> tuple[ChunkWork, ...]:
        """Chunks in forward order."""
        return (self.embed, *self.layers, self.head)

    @property
    def padded_parameters(self) -> int:
        """Elements of all flat arrays of one kind."""
        return sum(chunk.padded_parameters for chunk in self.all)

    def fit_pieces(self, num_host_devices: int) -> bool:
        """Whether each host device can update its piece of every chunk."""
        largest = max(chunk.padded_parameters for chunk in self.all)
        return largest // num_host_devices <= LARGEST_PIECE


def padded_size(groups: Sequence[int], block_size: int, num_host_devices: int) -> int:
    """Elements of a flat array.

    Each treatment group is padded to whole blocks, so that a block is of one group, and the whole
    to as many blocks on every host device.

    Args:
      groups: parameters per group.
      block_size: elements per block.
      num_host_devices: pieces into which the array is cut, K.
    """
    blocks = sum(-(-size // block_size) for size in groups)
    return -(-blocks // num_host_devices) * num_host_devices * block_size


@lru_cache(maxsize=256)
def chunk_stages(
    workload: Workload, layers_per_chunk: int, block_size: int, num_host_devices: int
) -> Chunks:
    """Cut the model into chunks.

    Args:
      workload: the model.
      layers_per_chunk: layers of each chunk but perhaps the last.
      block_size: elements per block of the host update.
      num_host_devices: host devices over which a chunk is sharded.
    """
    kinds: dict[tuple[StageWork, ...], int] = {}

    def chunk(name: str, stages: tuple[StageWork, ...]) -> ChunkWork:
        num_groups = max(len(stage.group_parameters) for stage in stages)
        groups = [
            sum(stage.group_parameters[i] for stage in stages if i < len(stage.group_parameters))
            for i in range(num_groups)
        ]
        return ChunkWork(
            name=name,
            kind=kinds.setdefault(stages, len(kinds)),
            stages=stages,
            num_parameters=sum(groups),
            padded_parameters=padded_size(groups, block_size, num_host_devices),
        )

    layers = workload.layers
    starts = range(0, len(layers), layers_per_chunk)
    return Chunks(
        embed=chunk("embed", (workload.embed,)),
        layers=tuple(
            chunk(
                f"layers.{start}-{min(start + layers_per_chunk, len(layers)) - 1}",
                layers[start : start + layers_per_chunk],
            )
            for start in starts
        ),
        head=chunk("head", (workload.head,)),
    )
