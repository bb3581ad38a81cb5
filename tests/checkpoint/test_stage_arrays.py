"""Checkpoints hold every stage completely, and damage to one is noticed."""

import copy
import dataclasses
import itertools
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax.checkpoint import save_restore as checkpoint
from slidedp_jax.checkpoint.save_restore import (
    list_steps,
    read_parameter_arrays,
    read_record,
)
from slidedp_jax.checkpoint.stage_arrays import (
    MASTER,
    checksums,
    read_stage,
    stage_bytes,
    state_key,
    verify,
)
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Stage


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
            assert stage_bytes(it.gate, stage) == sum(
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


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(300, 30), pytest.param(307, 307, marks=pytest.mark.thorough)]
)
def test_large_arrays_are_cut_if_they_can_be_and_come_back(vocab_size, rows, tmp_path, monkeypatch):
    """32 numbers of 4 bytes a row: 30 rows are the most that divide 300; only 1 divides 307."""
    monkeypatch.setattr(checkpoint, "BYTES_PER_FILE_CHUNK", 4096)
    monkeypatch.setattr(checkpoint, "SMALLEST_FILE_CHUNK", 512)
    config = dataclasses.replace(small_config(tied=True, layers=1), vocab_size=vocab_size)

    def start(seed):
        return trainer(config, optax.adamw(1e-3), strategy(), num_devices=1, seed=seed)

    with start(1) as it:
        it.save(tmp_path)
        saved = it.parameters()
    (folder,) = list_steps(tmp_path)
    with start(2) as it:
        it.restore(folder)
        restored = it.parameters()
    assert all(restored[name].tobytes() == saved[name].tobytes() for name in saved)
    item = (folder / "model.embed_tokens").absolute()
    metadata = ocp.PyTreeCheckpointHandler().metadata(item)
    of_embedding = jax.tree.leaves(getattr(metadata, "tree", metadata))
    assert [leaf.storage.chunk_shape for leaf in of_embedding] == [(rows, 32)] * 3


class Watch:
    """Bytes of the stages that are worked on at once, whenever one begins."""

    def __init__(self, sizes):
        self._sizes = sizes
        self._now = []
        self._lock = threading.Lock()
        self.together = []

    def around(self, function):
        def watched(*arguments):
            size = self._sizes[next(a.name for a in arguments if isinstance(a, Stage))]
            with self._lock:
                self._now.append(size)
                self.together.append(tuple(self._now))
            try:
                return function(*arguments)
            finally:
                with self._lock:
                    self._now.remove(size)

        return watched


@pytest.mark.parametrize("resident_chunks", [4, pytest.param(0, marks=pytest.mark.thorough)])
def test_stages_under_way_take_no_more_memory_than_two_neighbours(
    resident_chunks, tmp_path, monkeypatch
):
    """What stays on the devices is there twice while it is read: as it came, and gathered."""
    config = small_config(tied=False, layers=6)
    plan = strategy(resident_chunks=resident_chunks)
    with trainer(config, optax.adamw(1e-3), plan, num_devices=1) as it:
        saved = {stage.name: stage_bytes(it.gate, stage) for stage in it.model.stages()}
        limit = max(one + other for one, other in itertools.pairwise(saved.values()))
        read = {
            name: size * (2 if number < resident_chunks else 1)
            for number, (name, size) in enumerate(saved.items())
        }
        for name, work, sizes in (
            ("_write_item", it.save, saved),
            ("_load_item", it.restore, read),
        ):
            watch = Watch(sizes)
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint, name, watch.around(getattr(checkpoint, name)))
                work(tmp_path)
            # A restore reads twice where there are weights that it must not spoil.
            assert len(watch.together) == len(sizes) * (1 if name == "_write_item" else 2)
            assert all(sum(some) <= limit or len(some) == 1 for some in watch.together)
            assert max(map(len, watch.together)) > 1


def test_changed_values_in_a_checkpoint_are_noticed(tmp_path):
    """Finite ones too, in any array; by restoring and by exporting."""
    config = small_config(tied=False, layers=2)

    def start():
        return trainer(config, optax.adamw(1e-3), strategy(), num_devices=1)

    with start() as it:
        it.save(tmp_path)
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
        it.restore(folder)
    assert read_parameter_arrays(folder, stages[0])
    with pytest.raises(UserError, match=r"(?s)damaged.*other values than were saved"):
        read_parameter_arrays(folder, stage)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is damaged: it holds a list"),
        ('{"format": 2}', "lacks ema_decay, extra"),
        ('{"format": 1}', "has format 1, this version reads 2"),
        ("{", "is damaged"),
    ],
)
def test_a_damaged_record_says_what_it_lacks(text, message, tmp_path):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_record(tmp_path)
