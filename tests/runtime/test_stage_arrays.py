"""Stages are read ahead of their use, completely, and errors come through."""

import copy
import struct
import threading

import optax
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax.checkpoint import (
    list_steps,
    read_parameter_arrays,
    read_record,
    restore,
    save,
)
from slidedp_jax.errors import UserError
from slidedp_jax.stage_arrays import MASTER, ahead, read_stages, state_key, verify


def test_the_next_is_made_while_one_is_used():
    """Each side waits for the other: neither may run to its end before the other begins."""
    made, used = [], []
    first_is_used, second_is_made = threading.Event(), threading.Event()

    def make(item):
        if item == 1:
            assert first_is_used.wait(10)
        made.append(item)
        if item == 1:
            second_is_made.set()
        return item * 10

    for item, value in ahead(make, range(4)):
        if item == 0:
            first_is_used.set()
            assert second_is_made.wait(10)
        assert len(made) <= len(used) + 3
        used.append((item, value))
    assert used == [(0, 0), (1, 10), (2, 20), (3, 30)]


def test_nothing_ahead_of_nothing():
    assert list(ahead(str, [])) == []


def test_errors_of_either_side_come_through():
    def make(item):
        if item == 2:
            raise OSError("no more")
        return item

    seen = []
    with pytest.raises(OSError, match="no more"):
        seen.extend(item for item, _ in ahead(make, range(5)))
    with pytest.raises(KeyError):
        for _ in ahead(make, range(2)):
            raise KeyError("from the caller")


def test_stages_hold_all_parameters_and_their_state_uncopied():
    config = small_config(tied=True, layers=3)
    with trainer(config, optax.adamw(1e-3), strategy(), num_devices=1) as it:
        seen = {}
        stages = it.model.stages()
        for stage, arrays, sums in read_stages(it.store, stages):
            assert list(arrays) == list(sums) == list(stage.parameter_names())
            verify(arrays, sums)
            verify(arrays, None)
            seen |= arrays
        assert set(seen) == set(it.store.parameter_names)
        for name, arrays in seen.items():
            assert list(arrays) == [MASTER, state_key(0), state_key(1)]
            assert arrays[MASTER].tobytes() == it.store.read(name).tobytes()
            assert arrays[state_key(1)].shape == it.store.shapes[name]
            # What Orbax does before it writes: with arrays of this size, half the time of a save.
            assert copy.deepcopy(arrays[MASTER]) is arrays[MASTER]


def test_changed_values_in_a_checkpoint_are_noticed(tmp_path):
    """Finite ones too, in any array; by restoring and by exporting."""
    config = small_config(tied=False, layers=2)

    def start():
        return trainer(config, optax.adamw(1e-3), strategy(), num_devices=1)

    with start() as it:
        save(it, tmp_path, {})
        (folder,) = list_steps(tmp_path)
        stages = it.model.stages()
    stage = next(one for one in stages if "layers.1" in one.name)
    item = next(path for path in folder.iterdir() if path.name.endswith(stage.name))
    data = max((p for p in item.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    middle = len(raw) // 2 // 4 * 4
    raw[middle : middle + 4] = struct.pack("<f", 0.5)
    data.write_bytes(raw)
    with start() as it, pytest.raises(UserError, match=r"damaged.*move .*step_"):
        restore(it, folder)
    assert read_parameter_arrays(folder, stages[0])
    with pytest.raises(UserError, match=r"(?s)damaged.*other values than were saved"):
        read_parameter_arrays(folder, stage)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "lacks ema_decay, extra, format"),
        ('{"format": 2}', "lacks ema_decay, extra"),
        ('{"format": 1}', "has format 1, this version reads 2"),
        ("{", "is damaged"),
    ],
)
def test_a_damaged_record_says_what_it_lacks(text, message, tmp_path):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_record(tmp_path)
