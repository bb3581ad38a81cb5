"""The projection in slices of the vocabulary: where they lie, how they travel.

The projection comes first in the flat array of its part, and pieces of that are whole rows, so a
slice is consecutive pieces: it is fetched by the run's weight route, its gradient is sent by the
run's gradient route, and the update finds what it would find of a whole array. The last slices
also hold what else is in the part (the final norm) and padding; rows from the vocabulary's end on
are 0 on the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from slidedp_jax.state.layout import ChunkLayout, FlatLayout, Slot, spans
from slidedp_jax.state.split_float import join
from slidedp_jax.state.traced_dither import dither_of_parameter, dither_of_range
from slidedp_jax.state.weight_rounding import SECTION
from slidedp_jax.transfer.device_map import ROWS, SAME, DeviceMap
from slidedp_jax.transfer.routes import FetchedFields, GradientPath, WeightPath

Keys = jax.Array | None
"""Of the parameters of a part, as `wire_programs.DitherKeys`."""


@dataclass(frozen=True, kw_only=True)
class VocabularySlices:
    """Where the slices lie.

    Attributes:
      chunk: number of the chunk that owns the projection.
      layout: of that chunk, of which only the part with the projection is sliced.
      projection: full name.
      num_slices: S.
    """

    chunk: int
    layout: ChunkLayout
    projection: str
    num_slices: int

    @functools.cached_property
    def part_number(self) -> int:
        """Which part of the chunk the projection is in."""
        names = [[slot.name for slot in part.slots] for part in self.layout.parts]
        return next(number for number, own in enumerate(names) if self.projection in own)

    @property
    def part(self) -> FlatLayout:
        """Layout of that part."""
        return self.layout.parts[self.part_number]

    @property
    def slot(self) -> Slot:
        """The projection's place in it, from its beginning."""
        return self.part.slots[self.slot_number]

    @functools.cached_property
    def slot_number(self) -> int:
        """Which of the part's slots is the projection's."""
        return [slot.name for slot in self.part.slots].index(self.projection)

    @property
    def trained(self) -> bool:
        """Whether the projection is."""
        return self.part.trained

    @property
    def others(self) -> list[Slot]:
        """What else is in the part."""
        return [slot for slot in self.part.slots if slot.name != self.projection]

    @property
    def size(self) -> int:
        """Elements of a slice."""
        return self.part.padded_size // self.num_slices

    @property
    def rows(self) -> int:
        """Rows of a slice."""
        return self.size // self.slot.shape[1]

    @property
    def pieces(self) -> int:
        """Pieces of a slice."""
        return self.part.num_pieces // self.num_slices

    @functools.cached_property
    def shared(self) -> tuple[int, ...]:
        """Slices in which other parameters lie too, ascending and without a gap."""
        return tuple(
            sorted(
                {
                    number
                    for slot in self.others
                    for number, _, _ in spans(slot.offset, slot.size, self.size)
                }
            )
        )

    @functools.cached_property
    def pure(self) -> tuple[int, ...]:
        """The other slices."""
        return tuple(n for n in range(self.num_slices) if n not in self.shared)

    @property
    def other_flags(self) -> tuple[tuple[bool, ...], ...]:
        """Per stage, whether its leaves are trained, without the projection's."""
        names = iter([slot.name for slot in self.layout.slots])
        return tuple(
            tuple(flag for flag in flags if next(names) != self.projection)
            for flags in self.layout.trained
        )

    def without_projection(self, leaves: dict[str, Any]) -> tuple[Any, ...]:
        """Trees of the chunk's stages from values by name, None in the projection's place."""
        return self.layout.unflatten([leaves.get(slot.name) for slot in self.layout.slots])


class SlicePrograms:
    """Programs that unpack slices of weights and pack those of gradients.

    Args:
      on_devices: compiles for the compute devices.
      slices: where they lie.
      weights: weight route.
      gradients: gradient route.
    """

    def __init__(
        self,
        on_devices: DeviceMap,
        slices: VocabularySlices,
        weights: WeightPath,
        gradients: GradientPath,
    ):
        self.slices = slices
        self._weights, self._gradients = weights, gradients
        self._compute_dtype = on_devices.compute_dtype
        self._everywhere = NamedSharding(on_devices.mesh, SAME)
        spec = weights.spec
        self._rows = on_devices(self._unpack_rows, (spec, SAME, SAME, SAME, SAME), SAME)
        self._others = on_devices(self._unpack_others, (spec, spec, SAME), SAME)
        self._pack = functools.cache(self._make_pack)
        self._pack_rest = functools.cache(self._make_pack_rest)
        self._on_devices = on_devices
        self._firsts: dict[int, jax.Array] = {}

    def first(self, number: int) -> jax.Array:
        """Number of a slice's first row on every device, int32."""
        if number not in self._firsts:
            first = np.int32(number * self.slices.rows)
            self._firsts[number] = jax.device_put(first, self._everywhere)
        return self._firsts[number]

    def rows(self, number: int, fields: FetchedFields, keys: Keys) -> jax.Array:
        """What was fetched of a slice -> its rows [R, D] in the compute dtype."""
        place: tuple[Any, Any] = None, None
        if keys is not None:
            section, offset = divmod(number * self.slices.size, SECTION)
            place = jax.device_put((np.uint32(section), np.uint32(offset)), self._everywhere)
        rows: jax.Array = self._rows(fields, keys, *place, self.first(number))
        return rows

    def others(
        self,
        shared: Sequence[FetchedFields],
        parts: Sequence[FetchedFields],
        keys: Sequence[Keys] | None,
    ) -> tuple[Any, ...]:
        """What was fetched of the shared slices and of the other parts -> trees per stage.

        `keys` are those of all parts. The projection is None in the trees.
        """
        trees: tuple[Any, ...] = self._others(tuple(shared), tuple(parts), keys)
        return trees

    def pack(self, d_rows: jax.Array, *, widen: bool) -> tuple[jax.Array, jax.Array]:
        """Own gradients of a pure slice, float32 [G, R, D] -> (wire array, squares [G]).

        With `widen` (several microbatches) they are summed over the devices in float32, else in
        what backward gives, as all gradients.
        """
        packed: tuple[jax.Array, jax.Array] = self._pack(widen)(d_rows)
        return packed

    def pack_rest(
        self, d_rows: Sequence[jax.Array], others: tuple[Any, ...], *, widen: bool
    ) -> tuple[tuple[jax.Array, ...], dict[int, jax.Array], jax.Array]:
        """Gradients of the shared slices, and of the other trained parameters, trees [G, ...].

        Returns:
          Wire arrays of the shared slices and, by number, of the other trained parts; squares [G].
        """
        packed: tuple[tuple[jax.Array, ...], dict[int, jax.Array], jax.Array] = self._pack_rest(
            widen
        )(tuple(d_rows), others)
        return packed

    def _unpack_rows(
        self, fields: FetchedFields, keys: Keys, section: Any, offset: Any, first: jax.Array
    ) -> jax.Array:
        slices = self.slices
        high, *low = [self._weights.assemble(field) for field in fields]
        flat = high
        if low:
            key = None if keys is None else keys[slices.slot_number]
            flat = join(high, low[0], dither_of_range(key, section, offset, slices.size))
        rows = flat.reshape(slices.rows, -1).astype(self._compute_dtype)
        number = first + jax.lax.broadcasted_iota(jnp.int32, (slices.rows, 1), 0)
        return jnp.where(number < slices.slot.shape[0], rows, jnp.zeros((), rows.dtype))

    def _unpack_others(
        self,
        shared: tuple[FetchedFields, ...],
        parts: tuple[FetchedFields, ...],
        keys: tuple[Keys, ...] | None,
    ) -> tuple[Any, ...]:
        slices, found = self.slices, {}
        fields_of = iter(parts)
        for number, part in enumerate(slices.layout.parts):
            own_keys = None if keys is None else keys[number]
            if number == slices.part_number:
                if not shared:
                    continue
                # The shared slices follow one another.
                start = slices.shared[0] * slices.size
                pieces = [[self._weights.assemble(field) for field in own] for own in shared]
                flats = [jnp.concatenate(of_field) for of_field in zip(*pieces, strict=True)]
                wanted = slices.others
            else:
                start, wanted = 0, list(part.slots)
                flats = [self._weights.assemble(field) for field in next(fields_of)]
            for slot in wanted:
                key = None if own_keys is None else own_keys[part.slots.index(slot)]
                found[slot.name] = self._parameter(slot, flats, slot.offset - start, key)
        return slices.without_projection(found)

    def _parameter(
        self, slot: Slot, flats: list[jax.Array], start: int, key: jax.Array | None
    ) -> jax.Array:
        high, *low = [flat[start : start + slot.size] for flat in flats]
        own = join(high, low[0], dither_of_parameter(key, slot.size)) if low else high
        return own.reshape(slot.shape).astype(self._compute_dtype)

    def _to_wire(self, flat: jax.Array, widen: bool) -> tuple[jax.Array, jax.Array]:
        return self._gradients.to_wire(flat if widen else flat.astype(self._compute_dtype))

    def _make_pack(self, widen: bool) -> Callable[..., Any]:
        def body(d_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self._to_wire(d_rows.reshape(-1), widen)

        return self._on_devices(body, (ROWS,), (ROWS, ROWS))

    def _make_pack_rest(self, widen: bool) -> Callable[..., Any]:
        slices = self.slices

        def body(d_rows: tuple[jax.Array, ...], others: tuple[Any, ...]) -> Any:
            leaves = iter([leaf[0] for leaf in jax.tree.leaves(others)])
            own = {
                slot.name: next(leaves)
                for slot, number in zip(slices.layout.slots, slices.layout.leaf_parts, strict=True)
                if slices.layout.parts[number].trained and slot.name != slices.projection
            }
            sent, squares = [], []
            for number, rows in zip(slices.shared, d_rows, strict=True):
                flat = rows.reshape(-1)
                for slot in slices.others:
                    values = own[slot.name].reshape(-1).astype(flat.dtype)
                    for at, inner, outer in spans(slot.offset, slot.size, slices.size):
                        if at == number:
                            flat = flat.at[inner].set(values[outer])
                wire, square = self._to_wire(flat, widen)
                sent.append(wire)
                squares.append(square)
            parts = {}
            for number, part in enumerate(slices.layout.parts):
                if part.trained and number != slices.part_number:
                    flat = part.pack([own[slot.name] for slot in part.slots], jnp.float32)
                    parts[number], square = self._to_wire(flat, widen)
                    squares.append(square)
            total = sum(squares[1:], start=squares[0]) if squares else jnp.zeros(1, jnp.float32)
            return tuple(sent), parts, total

        return self._on_devices(body, (ROWS, ROWS), (ROWS, ROWS, ROWS))
