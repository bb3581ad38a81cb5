"""Arrays to and from the files of a checkpoint, piece by piece, with their checksums.

A thread takes a piece through one block of memory: values are copied into it (or out of it), their
checksum is added up while they are in the core's cache, and the disk gets (or gave) them. So a
checkpoint takes no more memory than a block for each thread.
"""

from __future__ import annotations

import collections
import pathlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from slidedp_jax.checkpoint.array_file import ARRAY_METADATA, METADATA, item_metadata
from slidedp_jax.checkpoint.bounded_work import side_by_side
from slidedp_jax.checkpoint.crc import crc32, crc32_of_two
from slidedp_jax.checkpoint.direct_io import Block, DirectFile
from slidedp_jax.checkpoint.stored_arrays import Piece, StoredArray
from slidedp_jax.whole_files import sync_folder, write_new

THREADS = 12
"""That copy, add up checksums, and hand blocks to the disk: so many that while some compute, the
others keep it busy."""

Checksums = dict[str, dict[str, int]]
"""Parameter name -> `master`, `state_0`, ... -> CRC-32 of the array's bytes."""

Fill = Callable[[StoredArray, int, np.ndarray], None]
"""(array, first element, out): copies elements of the flattened array into `out`."""

Use = Callable[[StoredArray, int, np.ndarray], None]
"""(array, first element, values): takes elements that may be overwritten afterwards."""


class Blocks:
    """A block of memory for each thread that asks."""

    def __init__(self, number: int = THREADS):
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()
        for _ in range(number):
            self._free.put(Block())

    def __call__(self, work: Callable[[Block, Piece], None]) -> Callable[[Piece], None]:
        """`work` with a block."""

        def with_block(piece: Piece) -> None:
            block = self._free.get()
            try:
                work(block, piece)
            finally:
                self._free.put(block)

        return with_block


def for_each_piece(
    work: Callable[[Block, Piece], None], pieces: Iterable[Piece], *, threads: int = THREADS
) -> None:
    """`work` on every piece, several at once, begun in their order.

    Raises:
      Exception: the first one of `work`; none is left unfinished.
    """
    blocks = Blocks(threads)
    for _ in side_by_side(blocks(work), pieces, cost=lambda _: 0.0, limit=1.0, workers=threads):
        pass


def pieces_of(arrays: Iterable[StoredArray]) -> list[Piece]:
    """All pieces of arrays, in their order."""
    return [piece for array in arrays for piece in array.pieces()]


class Sums:
    """Checksums of arrays whose pieces come in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[StoredArray, dict[int, tuple[int, int]]] = collections.defaultdict(dict)
        self._left: dict[StoredArray, int] = {}

    def add(self, piece: Piece, value: int) -> int | None:
        """Note that of a piece; when it is the array's last missing one, that of the array."""
        array = piece.array
        with self._lock:
            self._pieces[array][piece.start] = value, piece.num_bytes
            left = self._left.get(array, array.num_bytes) - piece.num_bytes
            self._left[array] = left
            if left:
                return None
            total = 0
            for _, (one, num_bytes) in sorted(self._pieces.pop(array).items()):
                total = crc32_of_two(total, one, num_bytes)
            self._pieces[array] = {0: (total, array.num_bytes)}
            return total

    def of_all(self, arrays: Iterable[StoredArray]) -> Checksums:
        """Of these arrays, all of whose pieces have come, in their order."""
        found: Checksums = {}
        for array in arrays:
            assert self._left[array] == 0, f"{array.key} of {array.name} is not complete"
            found.setdefault(array.name, {})[array.key] = self._pieces[array][0][0]
        return found


class ArrayWriter:
    """Writes the arrays of a checkpoint that is not there yet.

    Args:
      folder: where; must exist and be empty.
      arrays: all of them.

    Raises:
      OSError: the file system refuses; so may every method.
    """

    def __init__(self, folder: pathlib.Path, arrays: Sequence[StoredArray]):
        self._folder = folder
        self._arrays = list(arrays)
        self.sums = Sums()
        self._lock = threading.Lock()
        self._open: dict[StoredArray, DirectFile] = {}
        for item, text in metadata_of_items(self._arrays).items():
            (folder / item).mkdir()
            write_new(folder / item / METADATA, text)

    def write(self, block: Block, piece: Piece, fill: Fill) -> None:
        """Write a piece, whose values `fill` gives."""
        array, file = piece.array, self._file(piece.array)
        tail = array.file(self._folder).tail if piece.is_last else b""
        value, end = 0, piece.start + piece.num_bytes
        for start in range(piece.start, end + len(tail), len(block.array)):
            size = max(0, min(len(block.array), end - start))
            if size:
                values = block.array[:size]
                fill(array, piece.elements(start, size)[0], values.view(array.dtype))
                value = crc32(values.data, value)
            after = _cut(tail, start - end, len(block.array))
            if after:
                block.array[size : size + len(after)] = np.frombuffer(after, np.uint8)
            file.write(block, size + len(after), start)
        if self.sums.add(piece, value) is not None:
            self._end(array)

    def _file(self, array: StoredArray) -> DirectFile:
        with self._lock:
            if array not in self._open:
                place = array.file(self._folder)
                place.folder.mkdir()  # its parent, too, would hide that the folder was moved away
                write_new(place.folder / ARRAY_METADATA, place.description())
                self._open[array] = DirectFile(place.data, write=True)
            return self._open[array]

    def _end(self, array: StoredArray) -> None:
        with self._lock:
            file = self._open.pop(array)
        place = array.file(self._folder)
        with file:
            file.end(place.file_bytes)
        sync_folder(place.folder)

    def finish(self) -> Checksums:
        """All pieces have been written: the names of files are on the disk, too."""
        assert not self._open, "some arrays are not complete"
        for item in dict.fromkeys(array.item for array in self._arrays):
            sync_folder(self._folder / item)
        return self.sums.of_all(self._arrays)

    def abandon(self) -> None:
        """Close what is open, after a failure."""
        with self._lock:
            files, self._open = list(self._open.values()), {}
        for file in files:
            file.close()


class ArrayReader:
    """Reads arrays of a checkpoint that `ArrayWriter` wrote, and checks that they are those.

    Args:
      checkpoint: its folder.
      expected: checksums of the arrays; None where earlier versions did not save them.
    """

    def __init__(self, checkpoint: pathlib.Path, expected: Mapping[str, Mapping[str, int]] | None):
        self._checkpoint = checkpoint
        self._expected = expected
        self._sums = Sums()

    def read(self, block: Block, piece: Piece, use: Use) -> None:
        """Read a piece and hand it on, a block at a time.

        Raises:
          ValueError: something is not what was written.
          OSError: the file system refuses.
        """
        array = piece.array
        place = array.file(self._checkpoint)
        if piece.start == 0:
            self._check_description(array)
        value = 0
        with DirectFile(place.data, write=False) as file:
            if file.size != place.file_bytes:
                raise ValueError(
                    f"{place.data.name} of {place.folder.name} has {file.size} bytes, "
                    f"{place.file_bytes} were written"
                )
            end = piece.start + piece.num_bytes
            tail = place.tail if piece.is_last else b""
            for start in range(piece.start, end + len(tail), len(block.array)):
                size = max(0, min(len(block.array), end - start))
                after = _cut(tail, start - end, len(block.array))
                file.read(block, size + len(after), start)
                if block.array[size : size + len(after)].tobytes() != after:
                    raise ValueError(
                        f"what {place.folder.name} holds behind its values is not what was written"
                    )
                if size:
                    values = block.array[:size]
                    value = crc32(values.data, value)
                    use(array, piece.elements(start, size)[0], values.view(array.dtype))
        total = self._sums.add(piece, value)
        if total is not None and self._expected is not None:
            self._compare(array, total)

    def _check_description(self, array: StoredArray) -> None:
        place = array.file(self._checkpoint)
        found = (place.folder / ARRAY_METADATA).read_bytes().decode(errors="replace")
        if found != place.description():
            raise ValueError(f"{ARRAY_METADATA} of {place.folder.name} is not what was written")

    def _compare(self, array: StoredArray, total: int) -> None:
        assert self._expected is not None
        try:
            wanted = self._expected[array.name][array.key]
        except KeyError:
            raise ValueError(f"there is no checksum of {array.key} of {array.name}") from None
        if total != wanted:
            folder = array.file(self._checkpoint).folder
            raise ValueError(f"{folder.name} has other values than were saved")


def check_metadata(checkpoint: pathlib.Path, arrays: Sequence[StoredArray]) -> None:
    """Whether the items of these arrays, which must be all of theirs, are named as they were.

    Raises:
      ValueError: they are not; `restore` does not read it, but plain Orbax does.
      OSError: the file system refuses.
    """
    for item, text in metadata_of_items(arrays).items():
        if (checkpoint / item / METADATA).read_bytes() != text.encode():
            raise ValueError(f"{METADATA} of {item} is not what was written")


def metadata_of_items(arrays: Sequence[StoredArray]) -> dict[str, str]:
    """Of each item of these arrays, which must be all of theirs, the text of its `_METADATA`."""
    own: dict[str, list[tuple[str, str]]] = {}
    for array in arrays:
        own.setdefault(array.item, []).append((array.name, array.key))
    return {item: item_metadata(names) for item, names in own.items()}


def _cut(tail: bytes, start: int, size: int) -> bytes:
    """What of a file's tail lies in `size` bytes that begin `start` bytes behind the values."""
    return tail[max(0, start) : max(0, start + size)]


def checksums(arrays: Sequence[StoredArray], fill: Fill) -> Checksums:
    """Of arrays that nobody writes down."""
    sums = Sums()

    def add_up(block: Block, piece: Piece) -> None:
        value = 0
        for start, size in piece.blocks():
            values = block.array[:size]
            fill(piece.array, piece.elements(start, size)[0], values.view(piece.array.dtype))
            value = crc32(values.data, value)
        sums.add(piece, value)

    for_each_piece(add_up, pieces_of(arrays))
    return sums.of_all(arrays)


def is_plain(item: pathlib.Path) -> bool:
    """Whether an item is of files as `ArrayWriter` makes them; earlier versions wrote databases."""
    return not (item / "manifest.ocdbt").exists()
