"""A checkpoint written while training goes on is that of a run that stopped there, in every byte.

Delays are injected through the tracer, whose spans bracket uploads, updates, commits, copies and
writes.
"""

import contextlib
import dataclasses
import errno
import functools
import gc
import os
import random
import threading
import time
import weakref

import numpy as np
import optax
import pytest
from plain_training import initial_parameters, random_batch
from streamed_training import (
    Run,
    assert_bitwise_equal,
    optimizer_state,
    small_config,
    strategy,
    trainer,
)

from slidedp_jax import Trainer
from slidedp_jax.checkpoint import copy_buffer, save_beside, stored_arrays
from slidedp_jax.checkpoint.copy_buffer import Batch, CopyBuffer, Stopped, batches_of
from slidedp_jax.checkpoint.retention import list_steps
from slidedp_jax.checkpoint.stored_arrays import StoredArray
from slidedp_jax.errors import TrainingStopped, UserError
from slidedp_jax.models import decoder
from slidedp_jax.state.fences import Fences
from slidedp_jax.tracer import Tracer
from slidedp_jax.update.state_snapshot import StateSnapshot
from slidedp_jax.update.step_guard import StepGuard
from slidedp_jax.update.update_kernel import UpdateKernels

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4))
MUON = optax.contrib.muon(1e-2)
BATCH_BYTES = 8192


class RandomDelays(Tracer):
    """Sleeps at the begin and end of spans, differently for every seed."""

    def __init__(self, seed: int, longest_s: float = 0.004):
        self._random = random.Random(seed)
        self._longest_s = longest_s

    @contextlib.contextmanager
    def span(self, lane, name):
        self._sleep()
        yield
        self._sleep()

    def _sleep(self):
        if self._random.random() < 0.5:
            time.sleep(self._random.uniform(0, self._longest_s))


class Slow(Tracer):
    """Work whose name begins so takes so long."""

    def __init__(self, begins, seconds):
        self._begins, self._seconds = begins, seconds

    @contextlib.contextmanager
    def span(self, lane, name):
        if name.startswith(self._begins):
            time.sleep(self._seconds)
        yield


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Each chunk of a few KiB is copied in several batches."""
    for module in (copy_buffer, stored_arrays):
        monkeypatch.setattr(module, "PIECE_BYTES", BATCH_BYTES)
    monkeypatch.setattr(save_beside, "SMALLEST_BUFFER_BYTES", BATCH_BYTES)


KINDS = {
    "deferred": ({}, {}),
    "resident": ({"resident_chunks": 3}, {}),
    "eager": ({"update_policy": "eager"}, {"max_grad_norm": None}),
    "host_sum": ({"gradient_route": "host_sum"}, {}),
    "eager_host_sum": (
        {"update_policy": "eager", "gradient_route": "host_sum"},
        {"max_grad_norm": None},
    ),
    "average": ({}, {"ema_decay": 0.9, "frozen": ["model.layers.1.*"]}),
    "whole": ({}, {"optimizer": MUON}),
}
OFTEN = [
    name if name in ("resident", "eager") else pytest.param(name, marks=pytest.mark.thorough)
    for name in KINDS
]
SAVED_AFTER = (1, 3)


def start(name, **options):
    plan, own = KINDS[name]
    options = {"parameters": initial_parameters(small_config()), "num_devices": 2} | own | options
    optimizer = options.pop("optimizer", ADAMW)
    options.setdefault("max_grad_norm", 0.7)
    plan = {"rows_per_microbatch": 1, "num_microbatches": 2, "num_host_devices": 2} | plan
    return trainer(small_config(), optimizer, strategy(**plan), **options)


def batches(number=4):
    return [random_batch(small_config(), 4, 12, packed=True, seed=i) for i in range(number)]


def run(name, save, **options) -> Run:
    """Four steps in flow, `save(trainer, step)` after each."""
    with start(name, **options) as it:
        metrics = []
        for step, batch in enumerate(batches(), start=1):
            metrics.append(it.step(batch))
            save(it, step)
        it.finish_save()
        return Run(
            losses=[figures.loss for figures in metrics],
            norms=[figures.grad_norm for figures in metrics],
            parameters=it.parameters(),
            state=optimizer_state(it.store),
        )


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def beside(folder, buffer_bytes=BATCH_BYTES):
    def save(it, step):
        if step in SAVED_AFTER:
            it.save_beside(folder, {"step": step}, buffer_bytes=buffer_bytes)

    return save


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs that stop to save: their figures, and the files of their checkpoints."""

    @functools.cache
    def stopped(name):
        folder = tmp_path_factory.mktemp(name)

        def save(it, step):
            if step in SAVED_AFTER:
                it.save(folder, {"step": step})

        return run(name, save), files(folder)

    return stopped


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 3))]
)
@pytest.mark.parametrize("name", OFTEN)
def test_random_delays_change_no_byte_of_a_checkpoint_nor_of_the_run(name, seed, stopped, tmp_path):
    wanted, checkpoints = stopped(name)
    buffer_bytes = (1, 5, 1000)[seed % 3] * BATCH_BYTES
    found = run(name, beside(tmp_path, buffer_bytes), tracer=RandomDelays(seed))
    assert_bitwise_equal(found, wanted)
    assert len(list_steps(tmp_path)) == 2
    assert files(tmp_path) == checkpoints


BROKEN = {
    "updates that do not wait until a chunk is copied": (
        (Fences, "_is_uncopied", lambda *_: False),
        Slow("copy", 0.02),
    ),
    "copies that do not wait until a chunk is updated": (
        (StateSnapshot, "wait", lambda *_: None),
        Slow(("update", "start"), 0.05),
    ),
}


@pytest.mark.parametrize("name", ["deferred", pytest.param("eager", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "broken",
    [
        name if name.startswith("updates") else pytest.param(name, marks=pytest.mark.thorough)
        for name in BROKEN
    ],
)
def test_a_broken_fence_is_noticed(broken, name, stopped, tmp_path, monkeypatch):
    fence, tracer = BROKEN[broken]
    monkeypatch.setattr(*fence)
    run(name, beside(tmp_path), tracer=tracer)
    assert files(tmp_path) != stopped(name)[1]


def test_what_fits_the_buffer_holds_up_nothing(tmp_path):
    """With room for all of it, updates go on though the disk takes nothing yet; without, not."""
    disk = threading.Event()

    class Waits(Tracer):
        @contextlib.contextmanager
        def span(self, lane, name):
            if name.startswith("write"):
                disk.wait(20)
            yield

    with start("deferred", tracer=Waits()) as it:
        it.step(batches()[0])
        it.save_beside(tmp_path, buffer_bytes=1000 * BATCH_BYTES)
        for batch in batches()[1:]:
            it.step(batch)
        it.wait()
        assert not it._saving.done
        disk.set()
        assert it._saving.result().held_s < 1
        disk.clear()
        saving = it.save_beside(tmp_path, buffer_bytes=BATCH_BYTES)
        threading.Timer(0.3, disk.set).start()
        it.step(batches()[0])
        it.wait()
        assert saving.result().held_s > 0.1
    assert [path.name for path in list_steps(tmp_path)] == ["step_00000001", "step_00000004"]


def test_the_buffer_is_never_larger_than_stated(tmp_path, monkeypatch):
    taken, now, lock = [], [0], threading.Lock()
    take, give_back = CopyBuffer.take, CopyBuffer.give_back

    def watched_take(self, batch):
        memory = take(self, batch)
        with lock:
            now[0] += len(memory)
            taken.append(now[0])
        return memory

    def watched_give_back(self, memory):
        with lock:
            now[0] -= len(memory)
        give_back(self, memory)

    monkeypatch.setattr(CopyBuffer, "take", watched_take)
    monkeypatch.setattr(CopyBuffer, "give_back", watched_give_back)
    run("deferred", beside(tmp_path, 3 * BATCH_BYTES))
    assert max(taken) == 3 * BATCH_BYTES and now == [0] and len(taken) > 20


def test_batches_hold_each_byte_once():
    shapes = [(3,), (5000,), (70, 30), (0,), (2048,), (1, 7), (20000,)]
    arrays = [
        StoredArray(item="a", name=f"p{n}", number=None, shape=shape, dtype=np.dtype(np.float32))
        for n, shape in enumerate(shapes)
    ]
    arrays.append(dataclasses.replace(arrays[1], name="w", number=0, whole=True))
    found = list(batches_of(7, arrays))
    assert [batch.is_last for batch in found] == [False] * (len(found) - 1) + [True]
    covered = {array.name: [] for array in arrays}
    for batch in found:
        end = 0
        for place, piece in batch.pieces:
            assert place >= end and place % 64 == 0 and piece.start % 4096 == 0
            end = place + piece.num_bytes
            covered[piece.array.name].append((piece.start, piece.num_bytes))
        assert end <= batch.num_bytes
    for array in arrays:
        position = 0
        for begin, size in covered[array.name]:
            assert begin == position
            position += size
        assert position == array.num_bytes and covered[array.name]
    full = [batch for batch in found if not batch.pieces[0][1].array.whole]
    total = sum(array.num_bytes for array in arrays if not array.whole)
    assert len(full) <= -(-total // BATCH_BYTES) + 2


class Order(Tracer):
    """What was copied and written, in the order in which it began."""

    def __init__(self):
        self.begun = []

    @contextlib.contextmanager
    def span(self, lane, name):
        if lane == "save":
            self.begun.append(name.split()[0])
        yield


@pytest.mark.parametrize("name", ["deferred", "resident"])
def test_nothing_is_written_before_all_is_copied_or_there_is_no_room(name, tmp_path):
    for number, batches_at_once in enumerate((1000, 2)):
        order = Order()
        with start(name, tracer=order) as it:
            it.step(batches()[0])
            it.save_beside(
                tmp_path / str(number), buffer_bytes=batches_at_once * BATCH_BYTES
            ).result()
        copies, first = order.begun.count("copy"), order.begun.index("write")
        assert copies == order.begun.count("write") > 10
        assert first == copies if batches_at_once == 1000 else first <= 2 + 8


# Memory that is made ahead.


def wait_for_memory():
    while any(thread.name.startswith("save-memory") for thread in threading.enumerate()):
        time.sleep(0.001)


def test_memory_is_made_ahead_and_taken_by_the_next_save(tmp_path, stopped):
    made = []

    def save(it, step):
        if step == 2:
            it.prepare_save(buffer_bytes=5 * BATCH_BYTES)
            it.prepare_save(buffer_bytes=5 * BATCH_BYTES)
            wait_for_memory()
            made.append(it._save_memory._ahead)
            made.extend(it._save_memory._ahead._unused)
        if step in SAVED_AFTER:
            assert it.save_beside(tmp_path, {"step": step}).path.name
            assert it._save_memory._ahead is None

    found = run("deferred", save)
    buffer, *memory = made
    assert len(memory) == 5
    assert {id(array) for array in memory} <= {id(array) for array in buffer._unused}
    wanted, wanted_files = stopped("deferred")
    assert_bitwise_equal(found, wanted)
    assert files(tmp_path) == wanted_files


def test_memory_that_no_save_takes_is_freed(tmp_path):
    with start("deferred") as it:
        it.step(batches()[0])
        it.prepare_save(buffer_bytes=3 * BATCH_BYTES)
        first = it._save_memory._ahead
        it.prepare_save(buffer_bytes=4 * BATCH_BYTES)
        second = it._save_memory._ahead
        it.save_beside(tmp_path, buffer_bytes=6 * BATCH_BYTES).result()
        it.prepare_save(buffer_bytes=4 * BATCH_BYTES)
        third = it._save_memory._ahead
        it.save_beside(tmp_path).result()  # is there: nothing is copied
        it.prepare_save(buffer_bytes=4 * BATCH_BYTES)
        last = it._save_memory._ahead
    wait_for_memory()
    assert len({id(buffer) for buffer in (first, second, third, last)}) == 4
    assert all(buffer._unused == [] for buffer in (first, second, third, last))
    with pytest.raises(UserError, match="closed"):
        it.prepare_save()


def test_memory_that_was_made_ahead_counts_beside_batches_of_other_sizes():
    buffer = CopyBuffer(8 * BATCH_BYTES)
    buffer.make_ahead()
    assert len(buffer._unused) == 8
    odd = Batch(chunk=0, pieces=(), num_bytes=BATCH_BYTES * 5 // 2, is_last=True)
    taken = [buffer.take(odd) for _ in range(3)]
    assert buffer._unused == [] and sum(len(array) for array in taken) <= 8 * BATCH_BYTES
    for array in taken:
        buffer.give_back(array)
    full = Batch(chunk=0, pieces=(), num_bytes=BATCH_BYTES, is_last=True)
    memory = [buffer.take(full) for _ in range(4)]
    buffer.take(odd)
    for array in memory:
        buffer.give_back(array)
    assert len(buffer._unused) == 4  # of 5.5 that are left


def test_a_buffer_below_the_smallest_is_made_ahead_too(monkeypatch):
    monkeypatch.setattr(save_beside, "SMALLEST_BUFFER_BYTES", 4 * BATCH_BYTES)
    memory = save_beside.SaveMemory(100 * BATCH_BYTES)
    memory.make_ahead(BATCH_BYTES)
    first = memory._ahead
    memory.make_ahead(BATCH_BYTES)
    assert memory._ahead is first and first.num_bytes == 4 * BATCH_BYTES
    assert memory.take(BATCH_BYTES) is first
    wait_for_memory()


def test_memory_is_no_longer_made_once_it_is_used():
    buffer = CopyBuffer(1000 * BATCH_BYTES)
    batch = Batch(chunk=0, pieces=(), num_bytes=BATCH_BYTES, is_last=True)
    memory = buffer.take(batch)
    buffer.make_ahead()
    assert buffer._unused == []
    buffer.give_back(memory)
    assert buffer.take(batch) is memory


# Failures.


def test_a_buffer_that_was_stopped_keeps_no_memory():
    buffer = CopyBuffer(3 * BATCH_BYTES)
    batch = Batch(chunk=0, pieces=(), num_bytes=BATCH_BYTES, is_last=True)
    memory = [buffer.take(batch) for _ in range(3)]
    kept = [weakref.ref(array) for array in memory]
    buffer.give_back(memory.pop())
    assert kept[2]() is not None
    buffer.stop()
    buffer.give_back(memory.pop())
    assert [ref() is not None for ref in kept] == [True, False, False]
    with pytest.raises(Stopped):
        buffer.take(batch)


def failing_write(monkeypatch, code=errno.ENOSPC, kind=OSError):
    def fail(*_):
        raise kind(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("said_by", ["step", "save", "save_beside", "close"])
def test_a_failed_save_is_said_by_whatever_comes_next(said_by, tmp_path, monkeypatch):
    calls = {
        "step": lambda it: it.step(batches()[1]),
        "save": lambda it: it.save(tmp_path),
        "save_beside": lambda it: it.save_beside(tmp_path),
        "close": lambda it: it.close(),
    }
    with start("deferred") as it:
        it.step(batches()[0])
        with monkeypatch.context() as patch:
            failing_write(patch)
            it.save_beside(tmp_path).wait()
        with pytest.raises(OSError, match=r"step_00000001 cannot be written: No space left"):
            calls[said_by](it)
        assert list(tmp_path.iterdir()) == []
        if said_by != "close":
            assert it.step_count == 1
            it.step(batches()[1])
            it.save_beside(tmp_path).result()
            assert [path.name for path in list_steps(tmp_path)] == ["step_00000002"]


@pytest.mark.parametrize("kind", [OSError, MemoryError])
def test_another_error_is_not_hidden_by_a_failed_save(kind, tmp_path, monkeypatch, caplog):
    with pytest.raises(ZeroDivisionError), start("deferred") as it:
        it.step(batches()[0])
        failing_write(monkeypatch, errno.EIO, kind)
        it.save_beside(tmp_path)
        raise ZeroDivisionError
    assert "a checkpoint was not written" in caplog.text


def test_a_failed_step_is_said_by_the_end_where_no_step_follows(tmp_path):
    options = {"max_loss": 1e-9, "tracer": Slow("wait for the norm", 0.3)}
    with pytest.raises(TrainingStopped, match="step 1"), start("deferred", **options) as it:
        it.step(batches()[0])
        it.save_beside(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_save_that_cannot_begin_holds_nothing(tmp_path, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    with start("deferred") as it:
        it.step(batches()[0])
        it.wait()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", no_thread)
            it.save_beside(tmp_path)
        it.step(batches()[1])
        it.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["save", "host_update"])
def test_a_dropped_trainer_is_freed_by_any_of_its_threads(lane, tmp_path):
    """A thread that collects it neither waits for itself nor takes the state from a save."""
    dropped, collected = threading.Event(), []

    class Collects(Tracer):
        @contextlib.contextmanager
        def span(self, own, name):
            if own == lane and dropped.wait(20) and not collected:
                collected.append(gc.collect())
            yield

    it = Trainer(
        decoder.build(small_config()),
        ADAMW,
        strategy=strategy(rows_per_microbatch=1, num_microbatches=2, num_host_devices=2),
        kernel_form="whole",
        num_devices=2,
        tracer=Collects(),
    )
    it.itself = it
    it.step(batches()[0])
    saving = it.save_beside(tmp_path)
    store, gone = it.store, weakref.ref(it)
    del it
    dropped.set()
    saving.result()
    assert collected and gone() is None
    while store.chunks:
        time.sleep(0.01)
    assert len(list_steps(tmp_path)) == 1


@pytest.mark.timeout(120)
def test_a_failed_step_ends_a_save_that_needs_it(tmp_path, monkeypatch):
    saved = threading.Event()

    def fail(*_):
        saved.wait(20)
        raise MemoryError("no memory")

    with start("deferred") as it:
        it.step(batches()[0])
        it.wait()
        monkeypatch.setattr(UpdateKernels, "start_update", fail)
        it.step(batches()[1])
        saving = it.save_beside(tmp_path)
        saved.set()
        with pytest.raises(TrainingStopped):
            saving.result()
        with pytest.raises(TrainingStopped):
            it.step(batches()[2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_what_was_copied_before_a_step_failed_is_written(tmp_path, monkeypatch):
    with start("deferred", tracer=Slow("write", 0.02)) as it:
        it.step(batches()[0])
        saving = it.save_beside(tmp_path, buffer_bytes=1000 * BATCH_BYTES)
        it._fences.wait_snapshots()
        monkeypatch.setattr(UpdateKernels, "start_update", lambda *_: 1 / 0)
        it.step(batches()[1])
        with pytest.raises(TrainingStopped):
            it.wait()
        saving.result()
    assert [path.name for path in list_steps(tmp_path)] == ["step_00000001"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["save_beside", "save"])
def test_a_step_that_stops_after_its_updates_is_not_saved(how, tmp_path):
    """Eager updates whose gradients the host sums are committed before the loss is judged."""
    options = {"max_loss": 1e-9, "tracer": Slow("wait for the norm", 0.5)}
    with pytest.raises(TrainingStopped, match="step 1"), start("eager_host_sum", **options) as it:
        it.step(batches()[0])
        if how == "save":
            it.save(tmp_path)
        else:
            it.save_beside(tmp_path, buffer_bytes=1000 * BATCH_BYTES).result()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_step_that_fails_later_leaves_a_save_alone(tmp_path, monkeypatch):
    """Its chunks have this version and keep it; the end of the trainer waits for their copies."""
    with start("deferred", tracer=Slow("write", 0.02)) as it:
        it.step(batches()[0])
        wanted = it.save(tmp_path / "stopped")
        saving = it.save_beside(tmp_path / "beside", buffer_bytes=BATCH_BYTES)
        monkeypatch.setattr(StepGuard, "problem", lambda *_: "it is bad")
        figures = it.step(batches()[1])
        with pytest.raises(TrainingStopped, match="it is bad"):
            _ = figures.grad_norm
        assert not saving.done
    saving.result()
    assert files(wanted) == files(tmp_path / "beside" / wanted.name)


def test_what_changes_the_state_waits_for_copies(tmp_path):
    """A restore, other weights in the trained ones' place, other rates."""
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    tracer = Slow("copy", 0.02)
    with start("average", optimizer=optimizer, tracer=tracer) as it:
        it.step(batches()[0])
        first = it.save(tmp_path / "stopped")
        it.save_beside(tmp_path / "beside")
        it.set_hyperparameters(learning_rate=5e-3)
        it.step(batches()[1])
        second = it.save(tmp_path / "stopped")
        it.save_beside(tmp_path / "beside")
        with it.evaluating():
            it.evaluate(batches()[0])
        it.step(batches()[2])
        third = it.save(tmp_path / "stopped")
        saving = it.save_beside(tmp_path / "beside")
        it.restore(first)
        assert saving.done
    for path in (first, second, third):
        assert files(path) == files(tmp_path / "beside" / path.name)


def test_copies_of_frozen_chunks_are_waited_for_too(tmp_path):
    """Other weights in the place of frozen ones, and the end of the trainer."""
    tracer = Slow("copy head", 0.5)
    with start("deferred", tracer=tracer, frozen=["lm_head.*", "model.norm.*"]) as it:
        it.step(batches()[0])
        wanted = it.save(tmp_path / "stopped")
        saving = it.save_beside(tmp_path / "beside", buffer_bytes=1000 * BATCH_BYTES)
        zeros = np.zeros(it.gate.shapes["lm_head.weight"], np.float32)
        with it.evaluating({"lm_head.weight": zeros}):
            saving.result()
        it.save_beside(tmp_path / "closed", buffer_bytes=1000 * BATCH_BYTES)
    assert files(wanted) == files(tmp_path / "beside" / wanted.name)
    assert files(wanted) == files(tmp_path / "closed" / wanted.name)


def test_a_checkpoint_that_is_there_is_compared(tmp_path):
    with start("deferred") as it:
        it.step(batches()[0])
        it.save(tmp_path)
        assert it.save_beside(tmp_path).result().num_bytes == 0
        before = files(tmp_path)
        it.restore(list_steps(tmp_path)[0])
        it.step(batches()[1])
        it.save(tmp_path)
        it.restore(tmp_path / "step_00000001")
        it.step(batches()[2])
        with pytest.raises(UserError, match="another state"):
            it.save_beside(tmp_path)
        with pytest.raises(TypeError):
            it.save_beside(tmp_path / "other", {"not": object()})
        it.step(batches()[2])  # nothing is held
        it.wait()
    assert files(tmp_path / "step_00000001") == {
        name.removeprefix("step_00000001/"): raw for name, raw in before.items()
    }
