"""What a snapshot copies of state on the devices: each element once, little at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slidedp_jax.state.device_state import DevicePartState
from slidedp_jax.state.layout import FlatLayout, Slot
from slidedp_jax.update import resident_copies
from slidedp_jax.update.resident_copies import ResidentCopies

BLOCK, DTYPES = 8, (np.float16, np.int16, np.float32)


def part_of(num_devices, num_parameters, padded=960):
    layout = FlatLayout(
        name="a",
        slots=(Slot(name="a", shape=(num_parameters,), group=0, offset=0),),
        block_size=BLOCK,
        num_pieces=num_devices,
        block_groups=(0,) * (padded // BLOCK),
    )
    sharding = NamedSharding(
        Mesh(np.array(jax.devices()[:num_devices]), ("data",)), PartitionSpec("data")
    )
    values = [np.arange(padded).astype(dtype) for dtype in DTYPES]
    return DevicePartState(layout, [jax.device_put(value, sharding) for value in values]), values


@pytest.mark.parametrize("num_devices", [1, 5])
def test_all_that_is_asked_for_is_copied_and_then_let_go_of(num_devices):
    part, values = part_of(num_devices, 953)
    copies = ResidentCopies(limit_bytes=1 << 30)
    groups = {
        (0, 1): [np.zeros(953, np.float16), np.zeros(953, np.int16)],
        (2,): [np.zeros(953, np.float32)],
    }
    pieces = [(start, min(953, start + 101)) for start in range(0, 953, 101)]
    jobs = [(group, piece) for piece in pieces for group in groups]

    def copy(job):
        group, (start, end) = job
        outs = {index: out[start:end] for index, out in zip(group, groups[group], strict=True)}
        copies.read_into(part, start, outs)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, jobs))
    for group, outs in groups.items():
        for index, out in zip(group, outs, strict=True):
            np.testing.assert_array_equal(out, values[index][:953])
    assert copies.num_bytes == 0


def test_the_memory_of_a_share_is_taken_by_one_thread(monkeypatch):
    """Two that take that of the same array at once can end the process."""
    part, values = part_of(2, 960)
    taken, asarray = [], np.asarray

    def slow(array, *words, **more):
        if isinstance(array, jax.Array):
            taken.append(threading.get_ident())
            threading.Event().wait(0.05)
        return asarray(array, *words, **more)

    monkeypatch.setattr(resident_copies.np, "asarray", slow)
    copies = ResidentCopies(limit_bytes=1 << 30)
    out = np.zeros(960, np.float32)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda n: copies.read_into(part, n, {2: out[n : n + 120]}), range(0, 960, 120))
        )
    np.testing.assert_array_equal(out, values[2])
    assert len(taken) == 2  # shares


def test_a_group_waits_until_another_has_been_copied():
    one, values = part_of(1, 960)
    other, _ = part_of(1, 960)
    size = 960 * 4
    copies = ResidentCopies(limit_bytes=size)
    begun, go_on, most = threading.Event(), threading.Event(), []

    class Slow(np.ndarray):
        def __setitem__(self, place, value):
            begun.set()
            assert go_on.wait(20)
            super().__setitem__(place, value)

    slow = np.zeros(960, np.float32).view(Slow)
    out = np.zeros(960, np.float32)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(copies.read_into, one, 0, {2: slow})
        assert begun.wait(20)
        second = pool.submit(copies.read_into, other, 0, {2: out})
        for _ in range(20):
            most.append(copies.num_bytes)
            threading.Event().wait(0.005)
        assert not second.done() and set(most) == {size}
        go_on.set()
        first.result(20)
        second.result(20)
    np.testing.assert_array_equal(out, values[2])
    assert copies.num_bytes == 0


def test_what_is_larger_than_the_limit_is_copied_alone_and_what_nobody_reads_is_not_waited_for():
    one, values = part_of(1, 960)
    copies = ResidentCopies(limit_bytes=1)
    out = np.zeros(10, np.float32)
    copies.read_into(one, 5, {2: out})  # the rest is never asked for
    np.testing.assert_array_equal(out, values[2][5:15])
    other, _ = part_of(1, 960)
    copies.read_into(other, 0, {2: np.zeros(960, np.float32)})
    assert copies.num_bytes == 960 * 4
    copies.forget([one])
    assert copies.num_bytes == 0


def test_a_failure_is_the_readers_own():
    part, values = part_of(1, 960)
    copies = ResidentCopies(limit_bytes=1)
    with pytest.raises(ValueError, match="broadcast"):
        copies.read_into(part, 0, {2: np.zeros((10, 3), np.float32)})
    out = np.zeros(960, np.float32)
    copies.read_into(part, 0, {2: out})
    np.testing.assert_array_equal(out, values[2])
