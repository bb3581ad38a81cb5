"""Every decision that the planner takes and the runtime obeys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slidedp_jax.planner.hardware import COMPUTE_DTYPES, ComputeDtype

WeightRoute = Literal["replicate", "shard_all_gather"]
GradientRoute = Literal["reduce_scatter", "host_sum"]
UpdatePolicy = Literal["eager", "deferred"]

WEIGHT_ROUTES: tuple[WeightRoute, ...] = ("replicate", "shard_all_gather")
GRADIENT_ROUTES: tuple[GradientRoute, ...] = ("reduce_scatter", "host_sum")
UPDATE_POLICIES: tuple[UpdatePolicy, ...] = ("eager", "deferred")

SLOTS_BESIDE_PREFETCH = 2
"""Layer chunks on a device beside the prefetched ones: one in use, one between copy and use."""

GRADIENTS_IN_FLIGHT = 2
"""Gradients on their way off a device, the newest one among them: before another chunk runs
backward, the schedule waits until there is room for its own."""

BOUNDARIES_IN_FLIGHT = 2
"""Boundary activations on their way off a device, the newest one among them: before another chunk
runs forward, the schedule waits until there is room for its own. As many are on a device in
backward: one in use, one on its way."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a step is run.

    Attributes:
      layers_per_chunk: consecutive layers that travel and are updated together; the last chunk may
        hold fewer.
      rows_per_microbatch: rows that one device computes at once.
      num_microbatches: microbatches per step and device; all pass a chunk while it is there.
      weight_route: `replicate`: each device pulls the whole chunk; `shard_all_gather`: each pulls
        1/G and the devices gather.
      gradient_route: `reduce_scatter`: the devices sum and each sends 1/G; `host_sum`: each sends
        all and the host update sums.
      update_policy: `eager`: a chunk is updated when its gradient has arrived (no clipping);
        `deferred`: when the norm over all gradients is known.
      prefetch_depth: chunks whose upload may run ahead of compute.
      kept_chunks: top layer chunks whose weights and intermediate results stay on the device from
        forward to backward; the others are uploaded again and recomputed.
      attention_chunks: layer chunks, the top ones below those, of which only attention's output and
        statistics stay on the device from forward to backward.
      resident_chunks: lowest chunks, the embedding among them, whose training state stays on the
        devices, each with its share, and is updated there.
      host_boundaries: lowest layer chunks whose inputs wait in host memory from forward to
        backward; those of the others wait on the devices.
      host_boundary_bytes: of one device's input for one microbatch, for which page-locked memory is
        made: steps of longer rows are refused.
      layer_block_tokens: tokens of a row for which a layer computes norms, projections and MLP at a
        time, forward and backward; 0: of whole rows.
      loss_chunk_tokens: tokens whose logits exist at once. A model whose loss decides that by
        itself goes its own way; in plans for it, this is what it does.
      vocab_slices: slices of the vocabulary in which the head's logits and gradients are made, in
        two passes; 1: all of it in one pass. Each is whole pieces of the state: it divides
        `num_host_devices`.
      slice_head_weights: with several slices, also the projection's weights are on the device a
        slice at a time, and uploaded for either pass; otherwise once.
      compute_dtype: dtype of forward and backward.
      num_host_devices: CPU devices over which the state of a host is sharded, K; a multiple of the
        number of its compute devices.
      block_size: elements that the host update handles at once; the unit of padding.
      num_hosts: hosts that train together, H; each keeps 1/H of the state.
    """

    layers_per_chunk: int
    rows_per_microbatch: int
    num_microbatches: int
    weight_route: WeightRoute = "replicate"
    gradient_route: GradientRoute = "reduce_scatter"
    update_policy: UpdatePolicy = "deferred"
    prefetch_depth: int = 1
    kept_chunks: int = 0
    attention_chunks: int = 0
    resident_chunks: int = 0
    host_boundaries: int = 0
    host_boundary_bytes: int = 0
    layer_block_tokens: int = 0
    loss_chunk_tokens: int = 1024
    vocab_slices: int = 1
    slice_head_weights: bool = False
    compute_dtype: ComputeDtype = "bfloat16"
    num_host_devices: int = 1
    block_size: int = 4096
    num_hosts: int = 1

    def __post_init__(self) -> None:
        """Checks each field."""
        values = vars(self)
        for names, least in ((_COUNTS, 1), (_SHARES, 0)):
            for name in names:
                value = values[name]
                if not isinstance(value, int) or value < least:
                    raise ValueError(
                        f"{name} is {value!r}; it must be a whole number, at least {least}."
                    )
        for name, allowed in _CHOICES.items():
            if values[name] not in allowed:
                raise ValueError(f"{name} is {values[name]!r}; allowed: {', '.join(allowed)}.")
        if self.resident_chunks and self.gradient_route != "reduce_scatter":
            raise ValueError(
                f"resident_chunks is {self.resident_chunks} with gradient_route "
                f"{self.gradient_route!r}; state on the devices is updated from gradients that the "
                "devices sum, so use 'reduce_scatter', or resident_chunks 0."
            )
        if bool(self.host_boundaries) != bool(self.host_boundary_bytes):
            raise ValueError(
                f"host_boundaries is {self.host_boundaries} and host_boundary_bytes "
                f"{self.host_boundary_bytes}; state both, or neither: room is made for so many of "
                "that size."
            )
        if self.num_host_devices % self.vocab_slices:
            raise ValueError(
                f"vocab_slices is {self.vocab_slices} with num_host_devices "
                f"{self.num_host_devices}; a slice is whole pieces of the state, so it must divide "
                "that."
            )
        if self.num_hosts > 1:
            self._check_many_hosts()
        if self.slice_head_weights and self.vocab_slices == 1:
            raise ValueError(
                "slice_head_weights is true with vocab_slices 1; weights are sliced where the "
                "vocabulary is: use more slices, or slice_head_weights false."
            )

    def _check_many_hosts(self) -> None:
        """What needs the whole of an array on one host is not for several."""
        only = {"weight_route": "shard_all_gather", "gradient_route": "reduce_scatter"}
        wrong = [name for name, value in only.items() if getattr(self, name) != value]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is {getattr(self, wrong[0])!r} with num_hosts {self.num_hosts}; each "
                f"host has a share of the state alone, so use {only[wrong[0]]!r}."
            )
        if self.vocab_slices > 1:
            raise ValueError(
                f"vocab_slices is {self.vocab_slices} with num_hosts {self.num_hosts}; a slice "
                "would lie on some of the hosts alone, so use 1."
            )

    @staticmethod
    def recorded(values: Mapping[str, Any]) -> Strategy:
        """The strategy that a run has recorded, perhaps by an earlier version.

        What has become a consequence of other fields since is left out.

        Raises:
          ValueError: a field is unknown, missing or out of its range.
        """
        kept = {name: value for name, value in values.items() if name not in _DERIVED}
        unknown = sorted(kept.keys() - Strategy.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(f"the recorded strategy has {unknown}, which this version lacks")
        try:
            return Strategy(**kept)
        except TypeError as error:
            raise ValueError(f"the recorded strategy is not whole: {error}") from None

    @property
    def weight_slots(self) -> int:
        """Layer chunks whose weights lie on a device at once."""
        return self.prefetch_depth + SLOTS_BESIDE_PREFETCH

    def boundaries_on_device(self, num_chunks: int) -> int:
        """Inputs of the lowest chunks on a device when the last of them has run, or is to go back.

        With those on their way: the lowest chunks' go to the host, and while two chunks above them
        run one has left, or is not fetched yet.
        """
        on_host = min(self.host_boundaries, num_chunks)
        stay = num_chunks - on_host
        return stay + max(0, min(on_host, BOUNDARIES_IN_FLIGHT) - stay // 2)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in forward and backward."""
        return 2 if self.compute_dtype == "bfloat16" else 4

    @property
    def upload_bytes(self) -> int:
        """Bytes per parameter uploaded: the bf16 half, or both halves for fp32."""
        return self.compute_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of a gradient on its way to the host."""
        return self.compute_bytes


_DERIVED = ("weight_slots",)
"""Fields of earlier versions that are properties now."""

_COUNTS = (
    "layers_per_chunk",
    "rows_per_microbatch",
    "num_microbatches",
    "prefetch_depth",
    "loss_chunk_tokens",
    "vocab_slices",
    "num_host_devices",
    "block_size",
    "num_hosts",
)
_SHARES = (
    "kept_chunks",
    "attention_chunks",
    "resident_chunks",
    "host_boundaries",
    "host_boundary_bytes",
    "layer_block_tokens",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_route": WEIGHT_ROUTES,
    "gradient_route": GRADIENT_ROUTES,
    "update_policy": UPDATE_POLICIES,
    "compute_dtype": COMPUTE_DTYPES,
}
