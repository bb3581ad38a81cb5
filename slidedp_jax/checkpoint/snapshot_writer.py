"""The arrays of a snapshot, copied as soon as each chunk has its version and written behind that.

A chunk is updated again only when it has been copied, so what does not fit the buffer holds up the
next step's updates until the disk has taken enough of the rest. As long as there is room, nothing
is written: checksums and masters that are joined would take cores and memory from the copies that
updates wait for, while the disk has the time of many steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from slidedp_jax.checkpoint.array_streams import THREADS, ArrayWriter, Fill
from slidedp_jax.checkpoint.copy_buffer import Batch, CopyBuffer, Stopped, batches_of
from slidedp_jax.checkpoint.direct_io import Block
from slidedp_jax.checkpoint.stored_arrays import Piece, StoredArray
from slidedp_jax.tracer import Tracer
from slidedp_jax.update.state_snapshot import StateSnapshot

_COPIERS = 8
"""Threads that copy chunks into the buffer, each a batch."""


class SnapshotWriter:
    """Copies a snapshot and writes it.

    Args:
      snapshot: of the state; in the end all of it has been let go of.
      arrays: all of the state.
      writer: what writes them.
      buffer: memory for what is copied and not yet written.
      tracer: takes note of copies and writes.
    """

    def __init__(
        self,
        snapshot: StateSnapshot,
        arrays: Sequence[StoredArray],
        writer: ArrayWriter,
        *,
        buffer: CopyBuffer,
        tracer: Tracer,
    ):
        self._snapshot = snapshot
        self._arrays = arrays
        self._writer = writer
        self._buffer = buffer
        self._tracer = tracer
        self._lock = threading.Lock()
        self._uncopied: dict[int, int] = {}
        self._copied: list[tuple[Batch, np.ndarray]] | None = []  # None: written at once
        self._failure: BaseException | None = None
        self._blocks = threading.local()

    def run(self) -> None:
        """Do it; returns when everything is written.

        Raises:
          Exception: the first one; nothing is left running.
        """
        try:
            with ThreadPoolExecutor(THREADS) as writers:
                with ThreadPoolExecutor(_COPIERS) as copiers:
                    try:
                        self._copy_all(copiers, writers)
                    except BaseException as error:
                        self._fail(error)
                self._begin_to_write(writers)
        finally:
            self._snapshot.abandon()
        if self._failure is not None:
            raise self._failure

    def _copy_all(self, copiers: ThreadPoolExecutor, writers: ThreadPoolExecutor) -> None:
        for chunk, arrays in self._by_chunk():
            batches = list(batches_of(chunk, arrays))
            self._snapshot.wait(chunk)
            self._uncopied[chunk] = len(batches)
            for batch in batches:
                if not self._buffer.has_room(batch):
                    self._begin_to_write(writers)
                memory = self._buffer.take(batch)
                copiers.submit(self._guarded, self._copy, batch, memory, writers)

    def _by_chunk(self) -> list[tuple[int, list[StoredArray]]]:
        own: dict[int, list[StoredArray]] = {}
        for array in sorted(self._arrays, key=lambda a: -1 if a.number is None else a.number):
            # In a chunk masters, then one kind of state after the other: as these lie together,
            # little of what is on the devices has to be in host memory at once.
            own.setdefault(self._snapshot.chunk_of(array.name), []).append(array)
        return [(chunk, own[chunk]) for chunk in self._snapshot.order if chunk in own]

    def _copy(self, batch: Batch, memory: np.ndarray, writers: ThreadPoolExecutor) -> None:
        with self._tracer.span("save", f"copy {batch.pieces[0][1].array.item}"):
            for place, piece in batch.pieces:
                array, into = piece.array, memory[place : place + piece.num_bytes]
                if array.whole:
                    assert array.number is not None
                    values = self._snapshot.copy_whole(array.name, array.number)
                    into[:] = values.reshape(-1).view(np.uint8)
                else:
                    first, _ = piece.elements(piece.start, piece.num_bytes)
                    self._snapshot.copy(array.name, array.number, first, into)
        with self._lock:
            self._uncopied[batch.chunk] -= 1
            copied = self._uncopied[batch.chunk] == 0
        if copied:
            self._snapshot.let_go(batch.chunk)
        with self._lock:
            if self._copied is not None:
                self._copied.append((batch, memory))
                return
        writers.submit(self._guarded, self._write, batch, memory)

    def _begin_to_write(self, writers: ThreadPoolExecutor) -> None:
        """What has been copied, and from now on what is."""
        with self._lock:
            waiting, self._copied = self._copied or [], None
        for batch, memory in waiting:
            writers.submit(self._guarded, self._write, batch, memory)

    def _write(self, batch: Batch, memory: np.ndarray) -> None:
        if not hasattr(self._blocks, "own"):
            self._blocks.own = Block()
        with self._tracer.span("save", f"write {batch.pieces[0][1].array.item}"):
            for place, piece in batch.pieces:
                copied = memory[place : place + piece.num_bytes]
                self._writer.write(self._blocks.own, piece, self._from_memory(piece, copied))
        self._buffer.give_back(memory)

    def _from_memory(self, piece: Piece, copied: np.ndarray) -> Fill:
        begin, _ = piece.elements(piece.start, piece.num_bytes)

        def fill(array: StoredArray, start: int, out: np.ndarray) -> None:
            if array.number is None:
                self._snapshot.join(array.name, begin, copied, start, out)
            else:
                out[:] = copied.view(array.dtype)[start - begin : start - begin + len(out)]

        return fill

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Work in a pool: after a failure nothing more is begun."""
        if self._failure is None:
            try:
                work(*arguments)
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None and not isinstance(error, Stopped):
                self._failure = error
        self._buffer.stop()
        self._snapshot.abandon()  # steps go on, and are told at the next one
