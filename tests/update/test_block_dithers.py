"""The dithers that programs get by tables are those of names and indices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slidedp_jax.state.layout import FlatLayout, Slot
from slidedp_jax.state.weight_rounding import SECTION, WeightRounding
from slidedp_jax.update.block_dithers import (
    block_dithers,
    dither_of_block,
    dither_of_piece,
    run_length,
)

DITHER = WeightRounding.of("dither", seed=2)
SIZES = {
    "one parameter": (3 * SECTION,),
    "whole blocks": (2 * SECTION + 512, 1024, SECTION - 512),
    "runs of 64": (SECTION + 64, 64, 128, 192, SECTION + 1024),
    "runs of 8": (SECTION + 8, 64, SECTION + 1024),
    "odd": (3, SECTION + 5, 1, 1, 2 * SECTION - 7),
    "small": (5, 4, 3, 2, 1),
}
RUNS = {
    "one parameter": 64,
    "whole blocks": 64,
    "runs of 64": 64,
    "runs of 8": 8,
    "odd": 1,
    "small": 1,
}


def layout(sizes, block_size, num_pieces) -> FlatLayout:
    slots, end = [], 0
    for number, size in enumerate(sizes):
        slots.append(Slot(name=f"{number}.weight", shape=(size,), group=0, offset=end))
        end += size
    blocks = -(-end // block_size)
    blocks += -blocks % num_pieces
    return FlatLayout(
        name="part",
        slots=tuple(slots),
        block_size=block_size,
        num_pieces=num_pieces,
        block_groups=(0,) * blocks,
    )


def expected(part: FlatLayout) -> tuple[np.ndarray, np.ndarray]:
    """Dithers by name and index, and which elements are parameters at all."""
    dithers, known = np.zeros(part.padded_size, np.uint32), np.zeros(part.padded_size, bool)
    for slot in part.slots:
        own = slice(slot.offset, slot.offset + slot.size)
        dithers[own], known[own] = DITHER.dither(slot.name, 0, slot.size), True
    return dithers, known


whole_piece = functools.partial(jax.jit, static_argnames=("block_size", "second"))(dither_of_piece)
one_block = functools.partial(jax.jit, static_argnames="block_size")(dither_of_block)


@pytest.mark.parametrize("num_devices", [3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("form", ["whole", "fused"])
@pytest.mark.parametrize("sizes", SIZES)
def test_tables_give_the_dithers_of_names_and_indices(sizes, form, num_devices):
    """The devices need not be those over which the host lays it out."""
    part = layout(SIZES[sizes], 256, num_pieces=3)
    assert run_length(part) == RUNS[sizes]
    tables = block_dithers(part, DITHER, num_devices, form)
    wanted, known = expected(part)
    blocks = len(part.block_groups) // num_devices
    for device in range(num_devices):
        own = [jnp.asarray(np.split(table, num_devices)[device]) for table in tables]
        here = slice(device * blocks * 256, (device + 1) * blocks * 256)
        found = [np.asarray(whole_piece(own, 256, second=second)) for second in (False, True)]
        assert found[0].dtype == np.uint32
        for piece in found:
            np.testing.assert_array_equal(piece[known[here]], wanted[here][known[here]])
        if form != "whole":
            _, runs, table = own
            walked = []
            for first, end, to_place, _ in np.asarray(runs).tolist():
                for number in range(first, end):
                    walked.append(number)
                    block = one_block(table, np.int32(number * 256 + to_place), 256)
                    np.testing.assert_array_equal(block, found[0][number * 256 :][:256])
            assert walked == list(range(blocks))


def test_tables_stay_small():
    """Of a layer of a real model: a table per device, and the few blocks of vectors."""
    sizes = (2560 * 9728, 9728 * 2560, 2560, 128, 128, 2560)
    part = layout(sizes, 4096, num_pieces=15)
    for form in ("whole", "fused"):
        num_bytes = sum(table.nbytes for table in block_dithers(part, DITHER, 15, form))
        assert num_bytes < 0.01 * 12 * part.padded_size
    assert block_dithers(part, WeightRounding.of("nearest", 0), 15, "fused") == ()
