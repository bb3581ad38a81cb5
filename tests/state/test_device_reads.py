"""State on the devices is read in pieces of a few sizes, each element once."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.state import device_state
from slidedp_jax.state.device_state import DevicePartState, _sizes
from slidedp_jax.state.layout import FlatLayout, Slot


@pytest.mark.parametrize("length", [1, 7, 64, 65, 1000, 4096, 5000])
@pytest.mark.parametrize("more", [0, 3, 10_000])
def test_sizes_cover_a_length_within_the_room(length, more, monkeypatch):
    monkeypatch.setattr(device_state, "_ELEMENTS_AT_ONCE", 1024)
    monkeypatch.setattr(device_state, "_SMALLEST_CUT", 64)
    found = list(_sizes(length, length + more))
    end = 0
    for start, size in found:
        assert start == end
        end += size
    assert length <= end <= length + more and end - length < 64
    powers = {size for _, size in found if size & (size - 1) == 0}
    assert len({size for _, size in found} - powers) <= 1  # where the room ends


@pytest.mark.parametrize("num_devices", [1, 3])
def test_any_range_is_read(num_devices, monkeypatch):
    monkeypatch.setattr(device_state, "_ELEMENTS_AT_ONCE", 64)
    monkeypatch.setattr(device_state, "_SMALLEST_CUT", 16)
    monkeypatch.setattr(DevicePartState, "elements_at_once", 64)
    size, block = 8 * 96, 8
    layout = FlatLayout(
        name="a",
        slots=(Slot(name="a", shape=(size,), group=0, offset=0),),
        block_size=block,
        num_pieces=num_devices,
        block_groups=(0,) * (size // block),
    )
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    values = np.arange(size, dtype=np.float32)
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))
    part = DevicePartState(layout, [array])
    for start, length in ((0, size), (0, 1), (size - 1, 1), (250, 300), (5, 0), (701, 67)):
        assert part.read(0, start, length).tolist() == values[start : start + length].tolist()
