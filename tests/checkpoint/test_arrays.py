"""Checkpoints hold every array completely, plain Orbax reads them, and damage is noticed."""

import dataclasses
import errno
import itertools
import os
import random
import shutil
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax.checkpoint import array_file, direct_io, stored_arrays
from slidedp_jax.checkpoint.array_file import ArrayFile, folder_name
from slidedp_jax.checkpoint.array_streams import (
    ArrayReader,
    ArrayWriter,
    for_each_piece,
    pieces_of,
)
from slidedp_jax.checkpoint.contents import copy
from slidedp_jax.checkpoint.crc import crc32, crc32_of_two, crc32c
from slidedp_jax.checkpoint.direct_io import Block, DirectFile
from slidedp_jax.checkpoint.record import read_record
from slidedp_jax.checkpoint.save_restore import read_parameter_arrays
from slidedp_jax.checkpoint.stored_arrays import StoredArray, item_name
from slidedp_jax.errors import UserError


@pytest.fixture
def small_blocks(monkeypatch):
    """Arrays of a few KiB take several blocks and pieces."""
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(stored_arrays, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(stored_arrays, "PIECE_BYTES", 3 * 4096)
    monkeypatch.setattr(array_file, "BYTES_PER_PIECE", 4096)


SHAPES = {
    (): np.int32,
    (1,): np.bool_,
    (5000,): np.float32,
    (307, 32): np.float32,  # a prime number of rows
    (300, 32): ml_dtypes.bfloat16,
    (3, 70, 32): np.float16,
    (4, 30, 6, 20): np.float32,
    (64, 16): np.float32,  # one block
    (2, 3000): np.float32,  # a row is larger than a piece may be
}


def some_arrays():
    """Stored arrays of one item, and their values."""
    rng = np.random.default_rng(0)
    values = {}
    for number, (shape, dtype) in enumerate(SHAPES.items()):
        array = StoredArray(
            item="layers.0",
            name=f"layers.0.w{number // 2}",
            number=number % 2 or None,
            shape=shape,
            dtype=np.dtype(dtype),
        )
        values[array] = np.asarray(rng.standard_normal(shape) * 9).astype(dtype)
    return values


def write_all(folder, values):
    """Write arrays by several threads; returns their checksums."""
    writer = ArrayWriter(folder, list(values))

    def fill(array, start, out):
        out[:] = values[array].reshape(-1)[start : start + len(out)]

    for_each_piece(lambda block, piece: writer.write(block, piece, fill), pieces_of(values))
    return writer.finish()


def read_all(folder, arrays, expected):
    found = {array: np.empty(array.shape, array.dtype) for array in arrays}

    def take(array, start, values):
        found[array].reshape(-1)[start : start + len(values)] = values

    reader = ArrayReader(folder, expected)
    for_each_piece(lambda block, piece: reader.read(block, piece, take), pieces_of(arrays))
    return found


def test_arrays_come_back_and_orbax_reads_them(small_blocks, tmp_path):
    values = some_arrays()
    sums = write_all(tmp_path, values)
    for array, own in values.items():
        assert sums[array.name][array.key] == zlib.crc32(own.tobytes())
        raw = array.file(tmp_path).data.read_bytes()
        assert raw[: own.nbytes] == own.tobytes()  # for those who have no reader of Zarr
    for array, found in read_all(tmp_path, list(values), sums).items():
        assert found.tobytes() == values[array].tobytes()
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "layers.0")
    assert sum(map(len, tree.values())) == len(values)
    for array, own in values.items():
        found = np.asarray(tree[array.name][array.key])
        assert (found.dtype, found.shape) == (own.dtype, own.shape)
        assert found.tobytes() == own.tobytes()


def test_arrays_without_elements_come_back_too(tmp_path):
    values = {}
    for number, shape in enumerate([(0,), (3, 0), (0, 5)]):
        array = StoredArray(
            item="item", name=f"empty.{number}", number=None, shape=shape, dtype=np.dtype("f4")
        )
        values[array] = np.empty(shape, np.float32)
    sums = write_all(tmp_path, values)
    for array, found in read_all(tmp_path, list(values), sums).items():
        assert found.size == 0 and sums[array.name] == {"master": 0}
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "item")
    for array in values:
        found = np.asarray(tree[array.name]["master"])
        assert (found.dtype, found.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_hold_whole_rows_without_gaps(small_blocks, shape):
    array = ArrayFile(folder=None, shape=shape, dtype=np.dtype(SHAPES[shape]))
    row = int(np.prod(shape[1:])) * array.dtype.itemsize
    piece_bytes = int(np.prod(array.pieces)) * array.dtype.itemsize
    assert piece_bytes <= max(4096, row if len(shape) < 2 else 0)
    cut = [axis for axis, (n, own) in enumerate(zip(shape, array.pieces, strict=True)) if n != own]
    if cut:  # all before it are single, all behind it whole
        assert all(own == 1 for own in array.pieces[: cut[-1]])
        assert cut[-1] == 0 or shape[cut[-1]] % array.pieces[cut[-1]] == 0
    assert array.file_bytes - array.num_bytes < piece_bytes + 16 * 100 + 4


def test_checksums_are_those_of_others():
    rng = random.Random(0)
    for sizes in ((0, 0), (1, 0), (0, 1), (4096, 1), (999, 70001)):
        one, other = (rng.randbytes(size) for size in sizes)
        assert crc32(other) == zlib.crc32(other)
        assert crc32(memoryview(bytearray(other)), crc32(one)) == zlib.crc32(one + other)
        both = crc32_of_two(zlib.crc32(one), zlib.crc32(other), len(other))
        assert both == zlib.crc32(one + other)
    # Of RFC 3720, appendix B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_a_flipped_byte_anywhere_is_noticed(small_blocks, tmp_path):
    values = some_arrays()
    sums = write_all(tmp_path, values)
    chance = random.Random(0)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.parent.name.startswith("layers.")]
    files = [path for path in files if path.is_file() and path.name != "_METADATA"]
    assert len(files) == 2 * len(values)
    for path in files:
        raw = path.read_bytes()
        for place in {0, len(raw) - 1, chance.randrange(len(raw)), chance.randrange(len(raw))}:
            bad = bytearray(raw)
            bad[place] ^= 1 << chance.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=r"w\d"):
                read_all(tmp_path, list(values), sums)
        for cut in (b"", raw[:-1], raw + b"x"):
            path.write_bytes(cut)
            with pytest.raises(ValueError, match=r"w\d"):
                read_all(tmp_path, list(values), sums)
        path.write_bytes(raw)
    read_all(tmp_path, list(values), sums)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 9000])
def test_files_have_the_size_that_was_asked_for(tmp_path, size):
    block = Block()
    block.array[:] = np.arange(len(block.array)) % 251
    with DirectFile(tmp_path / "a", write=True) as file:
        file.write(block, size, 0)
        file.end(size)
    assert (tmp_path / "a").read_bytes() == block.array[:size].tobytes()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a", write=True)
    other = Block()
    with DirectFile(tmp_path / "a", write=False) as file:
        file.read(other, size, 0)
        assert other.array[:size].tobytes() == block.array[:size].tobytes()
        with pytest.raises(ValueError, match="a ends after"):
            file.read(other, size + 1, 0)


def test_file_systems_without_direct_io_are_used_all_the_same(tmp_path, monkeypatch):
    """Some refuse it when a file is opened, some at the first transfer."""
    real_open, real_write = os.open, os.pwrite

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    calls = []

    def refuse_once(*arguments):
        calls.append(0)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(*arguments)

    block = Block()
    for name, fake in (("open", refuse), ("pwrite", refuse_once)):
        path = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fake)
            with DirectFile(path, write=True) as file:
                file.write(block, 5000, 0)
                file.end(5000)
        assert path.read_bytes() == bytes(5000)


def test_threads_that_find_out_together_that_there_is_no_direct_io(tmp_path, monkeypatch):
    real, calls, meet = os.pwrite, itertools.count(), threading.Barrier(2, timeout=20)
    first_has_written = threading.Event()

    def refuse_twice(descriptor, rest, place):
        if (number := next(calls)) < 2:
            meet.wait()
            if number == 1:
                first_has_written.wait(20)
            raise OSError(errno.EINVAL, "Invalid argument")
        done = real(descriptor, rest, place)
        first_has_written.set()
        return done

    monkeypatch.setattr(os, "pwrite", refuse_twice)
    with DirectFile(tmp_path / "a", write=True) as file, ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(file.write, Block(), 4096, place) for place in (0, 4096)]
        for write in writes:
            write.result()
        file.end(8192)
    assert (tmp_path / "a").read_bytes() == bytes(8192)


def test_a_write_that_fails_names_its_file_and_leaves_nothing(tmp_path, monkeypatch):
    with trainer(small_config(), optax.adamw(1e-3), strategy(), num_devices=1) as it:
        for call, code in (("pwrite", errno.EIO), ("fsync", errno.EIO), ("ftruncate", errno.EIO)):
            left, real = [5], getattr(os, call)

            def fail(*arguments, left=left, code=code, real=real):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(code, os.strerror(code))
                return real(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                with pytest.raises(OSError, match="step_00000000") as caught:
                    it.save(tmp_path)
            assert caught.value.errno == code
            assert list(tmp_path.iterdir()) == []
        it.save(tmp_path)
        assert len(os.listdir("/proc/self/fd")) < 200


def test_every_array_of_the_state_is_there(tmp_path):
    with trainer(small_config(tied=True), optax.adamw(1e-3), strategy(), num_devices=1) as it:
        folder = it.save(tmp_path)
        stages = it.model.stages()
        seen = 0
        for stage in stages:
            tree = ocp.PyTreeCheckpointer().restore(folder / item_name(stage))
            assert list(tree) == sorted(stage.parameter_names())
            for name, arrays in tree.items():
                assert sorted(arrays) == ["master", "state_0", "state_1"]
                assert arrays["master"].tobytes() == it.store.read(name).tobytes()
                assert arrays["state_1"].tobytes() == it.store.read_state(name, 1).tobytes()
                seen += 1
        assert seen == len(it.store.parameter_names)


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path):
    """One database of TensorStore's per item, as Orbax writes it."""

    def start(seed):
        return trainer(small_config(), optax.adamw(1e-3), strategy(), num_devices=1, seed=seed)

    with start(1) as it:
        folder = it.save(tmp_path)
        saved = it.parameters()
        stages = it.model.stages()
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
    for stage in stages:
        item = folder / item_name(stage)
        tree = ocp.PyTreeCheckpointer().restore(item)
        shutil.rmtree(item)
        ocp.Checkpointer(handler).save(item, args=ocp.args.PyTreeSave(tree))
        assert (item / "manifest.ocdbt").is_file()
    with start(2) as it:
        it.restore(folder)
        assert all(
            values.tobytes() == saved[name].tobytes() for name, values in it.parameters().items()
        )
    exported = read_parameter_arrays(folder, stages[1])
    assert all(values.tobytes() == saved[name].tobytes() for name, values in exported.items())
    data = max((p for p in item.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with start(3) as it, pytest.raises(UserError, match=r"damaged.*move .*step_"):
        it.restore(folder)


def test_changed_values_in_a_checkpoint_are_noticed(tmp_path):
    """Finite ones too; by restoring, and by exporting what is exported."""

    def start():
        return trainer(small_config(), optax.adamw(1e-3), strategy(), num_devices=1)

    with start() as it:
        folder = it.save(tmp_path)
        stages = it.model.stages()
    stage = next(one for one in stages if "layers.1" in one.name)
    name = stage.parameter_names()[0]
    data = next((folder / item_name(stage) / folder_name(name, "master")).glob("0*"))
    raw = bytearray(data.read_bytes())
    raw[8:12] = np.float32(0.5).tobytes()
    data.write_bytes(raw)
    with start() as it, pytest.raises(UserError, match=r"damaged.*move .*step_"):
        it.restore(folder)
    assert read_parameter_arrays(folder, stages[0])
    with pytest.raises(UserError, match=r"(?s)damaged.*other values than were saved"):
        read_parameter_arrays(folder, stage)


@pytest.mark.parametrize(
    ("code", "fails"),
    [("EIO", True), ("ENOSPC", True), ("EINVAL", False), ("ENOTSUP", False), ("EBADF", False)],
)
def test_names_that_do_not_reach_the_disk_fail_a_save(tmp_path, monkeypatch, code, fails):
    """The folder's own name, too; file systems that sync no folders are used all the same."""
    number, sync = getattr(errno, code), os.fsync

    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    with trainer(small_config(), optax.sgd(1e-3), strategy(), num_devices=1) as it:
        monkeypatch.setattr(os, "fsync", fsync)
        if fails:
            with pytest.raises(OSError, match=os.strerror(number)):
                it.save(tmp_path)
            assert list(tmp_path.iterdir()) == []
        else:
            assert read_record(it.save(tmp_path))


def test_a_copy_names_the_checkpoint_that_lacks_a_file(tmp_path):
    with trainer(small_config(), optax.sgd(1e-3), strategy(), num_devices=1) as it:
        folder = it.save(tmp_path / "run")
    lacking = next(folder.rglob("0*"))
    lacking.unlink()
    with pytest.raises(UserError, match=rf"^{folder} is damaged: .*{lacking}"):
        copy(folder, tmp_path / "copy", weights_only=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_save_takes_no_memory_but_blocks(tmp_path):
    """What is copied at once does not grow with the model."""
    config = dataclasses.replace(small_config(), vocab_size=1 << 16)
    with trainer(config, optax.adamw(1e-3), strategy(), num_devices=1) as it:
        state = it.store.owned_bytes
        largest = []
        fill = it.store.read_into

        def watched(name, start, out):
            largest.append(out.nbytes)
            fill(name, start, out)

        it.store.read_into = watched
        it.save(tmp_path)
    assert state > 8 * direct_io.BLOCK_BYTES
    assert max(largest) == direct_io.BLOCK_BYTES and len(largest) > 8


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
