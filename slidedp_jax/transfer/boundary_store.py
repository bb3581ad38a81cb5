"""What passes between chunks, from forward to backward: on the devices, or in host memory.

Shaped like the source of weights. `put` starts a copy into page-locked memory that runs beside the
compute dispatched next; `prefetch` starts one back, and is called before the backward program that
it shall hide behind; `take` gives the arrays. No more than `BOUNDARIES_IN_FLIGHT` are on their way
off the devices.

Every boundary has a place in page-locked memory for good: what was copied there in one step stays
until the same boundary of the next is copied, and is let go just before. As all are of one size,
the new copy takes the old one's place, so the pool of page-locked memory looks the same in every
step, whatever gradients come and go beside. Shorter rows are filled up on the devices before they
leave.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import is_ready
from slidedp_jax.planner.strategy import BOUNDARIES_IN_FLIGHT
from slidedp_jax.tracer import Tracer
from slidedp_jax.transfer.copies import download, to_memory
from slidedp_jax.transfer.device_map import ROWS, DeviceMap


@dataclass(frozen=True, kw_only=True)
class _Put:
    """What was put into host memory of a chunk's inputs."""

    tokens: int
    copies: list[jax.Array]


@final
class BoundaryStore:
    """Inputs of chunks, per microbatch, by number of the chunk.

    Args:
      on_devices: compiles for the compute devices.
      host_chunks: chunks whose inputs wait in host memory.
      slot_bytes: room for one device's part of one microbatch's input.
      tracer: takes note of copies.
    """

    def __init__(
        self, on_devices: DeviceMap, host_chunks: range, *, slot_bytes: int, tracer: Tracer
    ):
        self.host_chunks = host_chunks
        self._on_devices, self._slot_bytes = on_devices, slot_bytes
        self._tracer = tracer
        self._there: dict[int, list[jax.Array]] = {}
        self._tokens: dict[int, int] = {}
        self._put: dict[int, _Put] = {}
        self._places: dict[tuple[int, int], jax.Array] = {}
        self._leaving: list[list[jax.Array]] = []
        self._resize = functools.cache(self._make_resize)

    def clear(self) -> None:
        """Forget what a pass that failed has left; places in host memory stay."""
        self._there.clear()
        self._tokens.clear()
        self._put.clear()

    def put(self, chunk: int, xs: Sequence[jax.Array]) -> None:
        """Keep the inputs of a chunk, [B, T, ...] per microbatch; the caller lets go of them."""
        if chunk not in self.host_chunks:
            self._there[chunk] = list(xs)
            return
        self._make_room()
        copies = []
        with self._tracer.span("d2h", f"download input of chunk {chunk}"):
            for number, x in enumerate(xs):
                self._places.pop((chunk, number), None)  # the new copy takes its place
                self._places[chunk, number] = download(self._filled(x))
                copies.append(self._places[chunk, number])
        self._put[chunk] = _Put(tokens=xs[0].shape[1], copies=copies)
        self._leaving.append(copies)

    def prefetch(self, chunk: int) -> None:
        """Start the copies back, if the chunk's inputs are in host memory."""
        put = self._put.pop(chunk, None)
        if put is None:
            return
        with self._tracer.span("h2d", f"upload input of chunk {chunk}"):
            self._there[chunk] = list(map(self._back, put.copies))
        self._tokens[chunk] = put.tokens

    def take(self, chunk: int) -> list[jax.Array]:
        """The inputs of a chunk, which are then the caller's alone."""
        self.prefetch(chunk)
        xs, tokens = self._there.pop(chunk), self._tokens.pop(chunk, None)
        if tokens is None or tokens == xs[0].shape[1]:
            return xs
        # Only now: a program that reads the copies makes all that is issued after it wait for them.
        return [self._resize(tokens)(x) for x in xs]

    def _make_room(self) -> None:
        """Wait until one more may be on its way off the devices."""
        with self._tracer.span("wait", "wait for inputs to leave"):
            self._leaving = [copies for copies in self._leaving if not all(map(is_ready, copies))]
            while len(self._leaving) >= BOUNDARIES_IN_FLIGHT:
                jax.block_until_ready(self._leaving.pop(0))

    def _filled(self, x: jax.Array) -> jax.Array:
        """As long as the place is."""
        per_token = x.nbytes // self._on_devices.mesh.size // x.shape[1]
        tokens = self._slot_bytes // per_token
        if tokens < x.shape[1]:
            raise UserError(
                f"an input of {x.dtype} {x.shape} needs more host memory than the strategy has room"
                f" for ({self._slot_bytes:,} bytes per device): plan with tokens_per_row of the "
                "longest rows, or host_boundaries=0"
            )
        filled: jax.Array = x if tokens == x.shape[1] else self._resize(tokens)(x)
        return filled

    def _back(self, copy: jax.Array) -> jax.Array:
        """On the devices, as long as the place is."""
        # The spec that it has: a copy that also changes that is no plain copy.
        assert isinstance(copy.sharding, NamedSharding)
        sharding = NamedSharding(copy.sharding.mesh, copy.sharding.spec)
        return to_memory(copy, sharding)

    def _make_resize(self, tokens: int) -> jax.stages.Wrapped:
        """To so many tokens: the first ones, or zeros behind all."""

        def body(x: jax.Array) -> jax.Array:
            missing = max(0, tokens - x.shape[1])
            x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
            return x[:, :tokens]

        return self._on_devices(body, (ROWS,), ROWS)
