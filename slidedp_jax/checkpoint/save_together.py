"""A checkpoint that several hosts write: one folder, to which each adds what it has.

The files are those of a single host, so any number of hosts reads them. The first host makes the
folder and files of their full size, each host writes its share of every array into them, and the
first one gives the folder its name when all have. So all must see one file system; that is tried
before anything is written. Shares end anywhere within a page, so nothing is written here but a
host's own bytes: no direct I/O, which writes whole pages.

Between these parts the hosts wait for each other, and a failure of any is every host's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slidedp_jax.checkpoint.array_file import ARRAY_METADATA, METADATA
from slidedp_jax.checkpoint.array_streams import Checksums, metadata_of_items
from slidedp_jax.checkpoint.bounded_work import side_by_side
from slidedp_jax.checkpoint.crc import crc32, crc32_of_two
from slidedp_jax.checkpoint.direct_io import BLOCK_BYTES
from slidedp_jax.checkpoint.record import (
    RECORD,
    describe,
    describe_shared,
    read_record,
    write_record,
)
from slidedp_jax.checkpoint.state_arrays import from_state
from slidedp_jax.checkpoint.stored_arrays import StoredArray, arrays_of, total_bytes
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.host_watch import HostWatch
from slidedp_jax.models.streamed import StreamedModel
from slidedp_jax.update.state_gate import StateGate, StateReader
from slidedp_jax.whole_files import UNFINISHED, remove_whole, sync_folder, write_new

_SEEN_WITHIN_S = 20.0
"""A network file system may show after some seconds what another host has written."""

_WRITERS = 8
_FINE = ""


@dataclass(frozen=True, kw_only=True)
class Together:
    """The hosts of a run, as checkpoints need them.

    Attributes:
      watch: what they say to each other.
      is_first: whether this one makes folders and gives them names.
    """

    watch: HostWatch
    is_first: bool

    def each(self, work: Callable[[], str]) -> list[str]:
        """Work of every host, whose results all get; where any fails, all do.

        Raises:
          UserError, OSError: as this host's work did, or, of another's failure, with its text.
        """
        said: dict[str, Any]
        failure: Exception | None = None
        try:
            said = {"result": work()}
        except (UserError, OSError) as error:
            said, failure = {"failed": str(error), "user": isinstance(error, UserError)}, error
        answers = [json.loads(text) for text in self.watch.exchange(json.dumps(said))]
        if failure is not None:
            raise failure
        for host, answer in enumerate(answers):
            if "failed" in answer:
                text = f"host {host}: {answer['failed']}"
                raise UserError(text) if answer["user"] else OSError(text)
        return [answer["result"] for answer in answers]

    def leading(self, read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        """On the first host: `read`, which the others are told to call, too (`follow`)."""

        def told(name: str) -> np.ndarray:
            self.watch.exchange(name)
            return read(name)

        return told

    def follow(self, read: Callable[[str], np.ndarray]) -> None:
        """On the other hosts: read what the first one reads, until it has done."""
        while name := self.watch.exchange(_FINE)[0]:
            read(name)

    def lead_no_more(self) -> None:
        """On the first host: it has done."""
        self.watch.exchange(_FINE)

    def first(self, work: Callable[[], str]) -> str:
        """Work of the first host alone, whose result all get."""
        return self.each(work if self.is_first else lambda: _FINE)[0]


def save_together(
    gate: StateGate,
    model: StreamedModel,
    folder: pathlib.Path,
    extra: Mapping[str, Any],
    together: Together,
) -> pathlib.Path:
    """Write `folder/step_N` of the present step; every host calls it, with the same arguments.

    Returns:
      The checkpoint's folder. One that holds this very state is left as it is.

    Raises:
      UserError: hosts do not see one folder, or there is a checkpoint of another state with the
        same number of steps.
      OSError: a file system refuses; nothing is left behind.
    """
    with gate.reading() as reader:
        arrays = arrays_of(gate, model.stages())
        record = describe(gate, model.configuration, extra) | describe_shared(reader.shared)
        target = folder / f"step_{gate.version:08d}"
        check_one_folder(folder, together)
        if together.first(lambda: "yes" if (target / RECORD).is_file() else "") == "yes":
            _check_is_saved(reader, arrays, target, record, together)
            return target
        unfinished = target.with_name(f".{target.name}{UNFINISHED}")
        with writing(target, total_bytes(arrays)):
            try:
                together.first(lambda: _make_files(target, unfinished, arrays))
                share = _Share(reader, arrays)
                record["checksums"] = _whole_sums(
                    arrays, reader, together.each(lambda: share.write(unfinished))
                )
                together.first(lambda: _give_name(unfinished, target, record))
            except BaseException:
                if together.is_first:
                    with contextlib.suppress(OSError):
                        remove_whole(unfinished)
                raise
    return target


def check_one_folder(folder: pathlib.Path, together: Together) -> None:
    """Whether all hosts see the same folder.

    Raises:
      UserError: they do not.
    """
    sign = f".hosts-{uuid.uuid4().hex}{UNFINISHED}"

    def put() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        write_new(folder / sign, sign)
        return sign

    sign = together.first(put)

    def see() -> str:
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while not _is_there(folder, sign):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} is not the folder that host 0 has by that name: several hosts write "
                    "one checkpoint, so give a folder of a file system that all of them mount, "
                    "not of a local disk"
                )
            time.sleep(0.2)
        return _FINE

    try:
        together.each(see)
    finally:
        if together.is_first:
            with contextlib.suppress(OSError):
                (folder / sign).unlink()


def _is_there(folder: pathlib.Path, name: str) -> bool:
    with contextlib.suppress(OSError):
        return name in os.listdir(folder)  # which asks the server, unlike a look at a name
    return False


def _make_files(
    target: pathlib.Path, unfinished: pathlib.Path, arrays: Sequence[StoredArray]
) -> str:
    """Folders and files of their full size, with all but the values in them."""
    remove_whole(target)  # half copied
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for item, text in metadata_of_items(arrays).items():
        (unfinished / item).mkdir()
        write_new(unfinished / item / METADATA, text)
    for array in arrays:
        place = array.file(unfinished)
        place.folder.mkdir()
        write_new(place.folder / ARRAY_METADATA, place.description())
        with open(place.data, "xb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(place.tail), place.num_bytes)
            os.fsync(file.fileno())
        sync_folder(place.folder)
    for item in dict.fromkeys(array.item for array in arrays):
        sync_folder(unfinished / item)
    return _FINE


def _give_name(unfinished: pathlib.Path, target: pathlib.Path, record: dict[str, Any]) -> str:
    write_record(unfinished, record)
    unfinished.rename(target)
    sync_folder(target.parent)
    return _FINE


class _Share:
    """What of all arrays lies on this host.

    Args:
      reader: of the state.
      arrays: all of them.
    """

    def __init__(self, reader: StateReader, arrays: Sequence[StoredArray]):
        self._reader, self._arrays = reader, arrays
        self._fill = from_state(reader)

    def write(self, folder: pathlib.Path) -> str:
        """Write it into files that are there; its checksums."""

        def write(array: StoredArray) -> int:
            own = self._reader.owned(array.name)
            if own.stop == own.start:
                return 0
            descriptor = os.open(array.file(folder).data, os.O_WRONLY)
            try:
                value = self._walk(array, own, lambda at, data: _write_all(descriptor, data, at))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return value

        return self._of_all(write)

    def sums(self) -> str:
        """Its checksums alone."""
        return self._of_all(
            lambda array: self._walk(array, self._reader.owned(array.name), lambda *_: None)
        )

    def _of_all(self, work: Callable[[StoredArray], int]) -> str:
        values = [0] * len(self._arrays)

        def numbered(number: int) -> None:
            values[number] = work(self._arrays[number])

        numbers = range(len(self._arrays))
        for _ in side_by_side(numbered, numbers, cost=lambda _: 0.0, limit=1.0, workers=_WRITERS):
            pass
        return json.dumps(values)

    def _walk(self, array: StoredArray, own: slice, use: Callable[[int, memoryview], None]) -> int:
        """`use` gets (first byte within the array, bytes), block after block; their CRC-32."""
        size, value = array.dtype.itemsize, 0
        most = BLOCK_BYTES // size
        block = np.empty(min(most, own.stop - own.start), array.dtype)
        for start in range(own.start, own.stop, most):
            some = block[: min(most, own.stop - start)]
            self._fill(array, start, some)
            data = some.view(np.uint8).data
            value = crc32(data, value)
            use(start * size, data)
        return value


def _whole_sums(
    arrays: Sequence[StoredArray], reader: StateReader, of_hosts: Sequence[str]
) -> Checksums:
    """Checksums of whole arrays from those of the hosts' shares, which follow one another."""
    found: Checksums = {}
    values = [json.loads(text) for text in of_hosts]
    for number, array in enumerate(arrays):
        total = 0
        for host, of_host in enumerate(values):
            own = reader.owned(array.name, host)
            num_bytes = (own.stop - own.start) * array.dtype.itemsize
            total = crc32_of_two(total, of_host[number], num_bytes) if num_bytes else total
        found.setdefault(array.name, {})[array.key] = total
    return found


def _check_is_saved(
    reader: StateReader,
    arrays: Sequence[StoredArray],
    target: pathlib.Path,
    record: Mapping[str, Any],
    together: Together,
) -> None:
    """Whether a checkpoint holds the state of all hosts, bit for bit.

    Raises:
      UserError: it holds another one.
    """
    sums = _whole_sums(arrays, reader, together.each(_Share(reader, arrays).sums))

    def compare() -> str:
        saved = read_record(target)
        same = {name: saved.get(name) for name in record} == dict(record)
        if same and sums == saved.get("checksums"):
            return _FINE
        raise UserError(
            f"{target} holds another state of step {record['step']}, of another run or from before "
            "this one went back. Nothing was written: give another folder, or move that one away"
        )

    together.first(compare)


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
