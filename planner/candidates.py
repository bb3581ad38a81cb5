"""The strategies that the search considers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from slidedp_jax.planner import sliced_head
from slidedp_jax.planner.chunking import chunk_stages
from slidedp_jax.planner.hardware import ComputeDtype, HardwareProfile
from slidedp_jax.planner.strategy import (
    GRADIENT_ROUTES,
    WEIGHT_ROUTES,
    GradientRoute,
    Strategy,
    UpdatePolicy,
    WeightRoute,
)
from slidedp_jax.planner.workload import BatchShape, Workload

_T = TypeVar("_T")

PREFETCH_DEPTHS = (1, 2)
LOSS_CHUNKS_TOKENS = (4096, 2048, 1024, 512, 256)
"""Tried from the largest: larger ones sum the projection's gradient fewer times. Beyond 4096 tokens
that is below 0.3 % of a step, for gigabytes of logits."""

LEAN_LOSS_TOKENS = 1024
"""Of a loss chunk that takes little memory and hardly any time."""

LAYER_BLOCK_TOKENS, LONG_ROW_TOKENS = 8192, 32768
"""Tokens for which a layer computes at a time, and of rows for which that is tried: products of
8192 tokens are as fast as any, and shorter rows fit without."""

MAX_BLOCK_SIZE = 4096
"""Elements; two arrays of state stay in a core's cache. Measured best on large models."""
MIN_BLOCK_SIZE = 64
MAX_PADDING = 0.02
"""Share of padding above which smaller blocks are taken."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user has decided already; None leaves it to the search.

    Attributes are those of `Strategy`.
    """

    layers_per_chunk: int | None = None
    rows_per_microbatch: int | None = None
    weight_route: WeightRoute | None = None
    gradient_route: GradientRoute | None = None
    prefetch_depth: int | None = None
    loss_chunk_tokens: int | None = None
    num_host_devices: int | None = None
    block_size: int | None = None


def default_num_host_devices(num_cores: int, num_devices: int) -> int:
    """CPU devices for the state: a multiple of the GPUs that leaves each GPU one core.

    That core issues the GPU's work. Measured on 16 cores beside one GPU: steps with 15 devices are
    faster than with 12, with the update beside backward as well as beside forward.
    """
    return max(1, (num_cores - num_devices) // num_devices) * num_devices


def pieces_of_state(hardware: HardwareProfile, choices: Choices) -> int:
    """Host devices of each host over which its state is sharded."""
    return choices.num_host_devices or default_num_host_devices(
        hardware.num_host_cores, hardware.num_devices
    )


def default_block_size(workload: Workload, num_host_devices: int) -> int:
    """The largest block up to `MAX_BLOCK_SIZE` that pads single layers by no more than 2 %."""
    block_size = MAX_BLOCK_SIZE
    while block_size > MIN_BLOCK_SIZE:
        padded = chunk_stages(workload, 1, block_size, num_host_devices).padded_parameters
        if padded <= (1 + MAX_PADDING) * workload.num_parameters:
            break
        block_size //= 2
    return block_size


def candidates(
    workload: Workload,
    batch: BatchShape,
    hardware: HardwareProfile,
    choices: Choices,
    *,
    update_policy: UpdatePolicy,
    compute_dtype: ComputeDtype,
) -> Iterator[Iterator[Strategy]]:
    """Families of strategies; within one, the first that fits is the best of it.

    Args:
      workload: the model.
      batch: rows of a step over all devices.
      hardware: the hosts and their devices.
      choices: what is decided already.
      update_policy: as in `Strategy`.
      compute_dtype: as in `Strategy`.
    """
    num_devices = hardware.total_devices
    several_hosts = hardware.num_hosts > 1
    own_pieces = pieces_of_state(hardware, choices)
    pieces = own_pieces * hardware.num_hosts
    rows_per_device = -(-batch.num_rows // num_devices)
    base = partial(
        Strategy,
        update_policy=update_policy,
        compute_dtype=compute_dtype,
        num_hosts=hardware.num_hosts,
        num_host_devices=own_pieces,
        block_size=choices.block_size or default_block_size(workload, pieces),
    )
    weight_routes = WEIGHT_ROUTES if num_devices > 1 else WEIGHT_ROUTES[:1]
    gradient_routes = GRADIENT_ROUTES if num_devices > 1 else GRADIENT_ROUTES[:1]
    if several_hosts:  # each has a share of the state alone
        weight_routes, gradient_routes = ("shard_all_gather",), ("reduce_scatter",)
    block_size = base.keywords["block_size"]
    for layers in _chunk_sizes(len(workload.layers), choices.layers_per_chunk):
        if not chunk_stages(workload, layers, block_size, pieces).fit_pieces(pieces):
            continue
        for rows in _microbatch_rows(rows_per_device, choices.rows_per_microbatch):
            for weight_route in _chosen(choices.weight_route, weight_routes):
                for gradient_route in _chosen(choices.gradient_route, gradient_routes):
                    for depth in _chosen(choices.prefetch_depth, PREFETCH_DEPTHS):
                        strategy = base(
                            layers_per_chunk=layers,
                            rows_per_microbatch=rows,
                            num_microbatches=-(-rows_per_device // rows),
                            weight_route=weight_route,
                            gradient_route=gradient_route,
                            prefetch_depth=depth,
                        )
                        tokens = rows * batch.seq_length
                        blocks = _layer_blocks(workload, batch)
                        chosen = _chosen(choices.loss_chunk_tokens, LOSS_CHUNKS_TOKENS)
                        sizes = {workload.loss_tokens(size, tokens) for size in chosen}
                        for block in blocks:
                            in_blocks = replace(strategy, layer_block_tokens=block)
                            yield _heads(workload, in_blocks, sizes, num_devices)


def neighbours(
    workload: Workload,
    batch: BatchShape,
    num_devices: int,
    choices: Choices,
    strategy: Strategy,
) -> Iterator[Strategy]:
    """Strategies that differ in one respect, as far as it has not been decided; and leaner ones.

    One row at a time is always among them: it leaves most room for state.

    Args:
      workload: the model.
      batch: rows of a step over all devices.
      num_devices: of all hosts.
      choices: what is decided already.
      strategy: whose neighbours they are.
    """
    per_device = -(-batch.num_rows // num_devices)
    rows = _microbatch_rows(per_device, choices.rows_per_microbatch)
    at = rows.index(strategy.rows_per_microbatch)
    own_loss = workload.own_loss_tokens is not None
    for base in (strategy, leaner(choices, workload, strategy)):
        for other in dict.fromkeys((rows[0], *rows[max(0, at - 1) : at + 2])):
            in_all = -(-per_device // other)
            yield replace(base, rows_per_microbatch=other, num_microbatches=in_all)
    for depth in _chosen(choices.prefetch_depth, PREFETCH_DEPTHS):
        yield replace(strategy, prefetch_depth=depth)
    if num_devices > 1 and strategy.num_hosts == 1:
        for route in _chosen(choices.weight_route, WEIGHT_ROUTES):
            yield replace(strategy, weight_route=route)
    if strategy.vocab_slices > 1:
        strategy = replace(strategy, vocab_slices=1, slice_head_weights=False)
        yield strategy
    if not own_loss:
        for tokens in _chosen(choices.loss_chunk_tokens, LOSS_CHUNKS_TOKENS[::2]):
            if tokens < strategy.rows_per_microbatch * batch.seq_length:
                yield replace(strategy, loss_chunk_tokens=tokens)


def leaner(choices: Choices, workload: Workload, strategy: Strategy) -> Strategy:
    """The strategy with less fetched ahead and a small loss chunk, where that is not decided."""
    tokens = choices.loss_chunk_tokens or min(LEAN_LOSS_TOKENS, strategy.loss_chunk_tokens)
    own_loss = workload.own_loss_tokens is not None
    return replace(
        strategy,
        prefetch_depth=choices.prefetch_depth or min(PREFETCH_DEPTHS),
        loss_chunk_tokens=strategy.loss_chunk_tokens if own_loss else tokens,
    )


def _chosen(choice: _T | None, options: tuple[_T, ...]) -> tuple[_T, ...]:
    return options if choice is None else (choice,)


def _layer_blocks(workload: Workload, batch: BatchShape) -> tuple[int, ...]:
    """Whole rows, and where they are long, blocks of their tokens."""
    possible = all(stage.row_elements for stage in workload.layers)
    if not possible or batch.seq_length < LONG_ROW_TOKENS:
        return (0,)
    return (0, LAYER_BLOCK_TOKENS)


def _heads(
    workload: Workload, strategy: Strategy, sizes: Iterable[int], num_devices: int
) -> Iterator[Strategy]:
    """Loss chunks from large, which is faster, to small, which is smaller, then two passes.

    Those are the leanest, and faster than one pass in very small loss chunks.
    """
    ordered = sorted(sizes, reverse=True)
    least = min(sliced_head.SMALL_LOSS_CHUNK_TOKENS, ordered[0])  # all of a few tokens is one chunk
    for size in ordered:
        if size >= least:
            yield replace(strategy, loss_chunk_tokens=size)
    largest = replace(strategy, loss_chunk_tokens=ordered[0])
    if strategy.num_hosts == 1:
        yield from sliced_head.with_slices(workload, largest, num_devices)
    for size in ordered:
        if size < least:
            yield replace(strategy, loss_chunk_tokens=size)


def _chunk_sizes(num_layers: int, choice: int | None) -> list[int]:
    """The smallest chunk size for each number of chunks: others only shift layers to the end."""
    if choice is not None:
        return [choice]
    return sorted({-(-num_layers // num_chunks) for num_chunks in range(1, num_layers + 1)})


def _microbatch_rows(rows_per_device: int, choice: int | None) -> list[int]:
    """Divisors of a device's rows (no filler rows) and powers of two."""
    if choice is not None:
        return [choice]
    return [
        rows
        for rows in range(1, rows_per_device + 1)
        if rows_per_device % rows == 0 or rows & (rows - 1) == 0
    ]
