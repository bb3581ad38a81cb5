"""Checkpoints hold every stage completely, and damage to one is noticed."""

import copy
import dataclasses
import struct
from concurrent.futures import ThreadPoolExecutor

import optax
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax import checkpoint
from slidedp_jax.checkpoint import (
    list_steps,
    read_parameter_arrays,
    read_record,
    restore,
    save,
)
from slidedp_jax.errors import UserError
from slidedp_jax.stage_arrays import (
    MASTER,
    checksums,
    read_stage,
    stage_bytes,
    state_key,
    verify,
)


def test_stages_hold_all_parameters_and_their_state_uncopied():
    config = small_config(tied=True, layers=3)
    with (
        trainer(config, optax.adamw(1e-3), strategy(), num_devices=1) as it,
        ThreadPoolExecutor(3) as threads,
    ):
        seen = {}
        for stage in it.model.stages():
            arrays = read_stage(it.store, stage, threads)
            sums = checksums(arrays, threads)
            assert list(arrays) == list(sums) == list(stage.parameter_names())
            assert stage_bytes(it.store, stage) == sum(
                array.nbytes for of_name in arrays.values() for array in of_name.values()
            )
            verify(arrays, sums, threads)
            verify(arrays, None, threads)
            seen |= arrays
        assert set(seen) == set(it.store.parameter_names)
        for name, arrays in seen.items():
            assert list(arrays) == [MASTER, state_key(0), state_key(1)]
            assert arrays[MASTER].tobytes() == it.store.read(name).tobytes()
            assert arrays[state_key(1)].shape == it.store.shapes[name]
            # What Orbax does before it writes: with arrays of this size, half the time of a save.
            assert copy.deepcopy(arrays[MASTER]) is arrays[MASTER]


@pytest.mark.parametrize("shape", [(300, 64), (307, 61)])
def test_large_arrays_are_cut_and_come_back(shape, tmp_path, monkeypatch):
    """Also where no size but 1 divides a dimension."""
    monkeypatch.setattr(checkpoint, "BYTES_PER_FILE_CHUNK", 4096)
    config = dataclasses.replace(
        small_config(tied=True, layers=1), vocab_size=shape[0], intermediate_size=shape[1]
    )

    def start(seed):
        return trainer(config, optax.adamw(1e-3), strategy(), num_devices=1, seed=seed)

    with start(1) as it:
        save(it, tmp_path, {})
        saved = it.parameters()
    (folder,) = list_steps(tmp_path)
    with start(2) as it:
        restore(it, folder)
        restored = it.parameters()
    assert all(restored[name].tobytes() == saved[name].tobytes() for name in saved)


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
