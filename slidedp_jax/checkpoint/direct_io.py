"""Files that are written and read beside the page cache, a block at a time.

Copying through the page cache costs more processor time than everything else in a checkpoint, and
pushes out what others keep there. Direct I/O wants memory, places and lengths that are multiples of
a page; what is left at a file's end is written as a whole block and cut off. File systems without
direct I/O (some network ones, tmpfs) are used through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
from types import TracebackType

import numpy as np

BLOCK_BYTES = 1 << 22
"""Handed to the disk at once: long enough for its full rate, short enough for a core's cache."""

_ALIGNMENT = 4096
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class Block:
    """Memory that direct I/O may use, for one thread: `array` of uint8 [BLOCK_BYTES]."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK_BYTES)
        self.array = np.frombuffer(self.memory, np.uint8)


class DirectFile:
    """A file open for writing or reading; several threads may use different blocks of it.

    Args:
      path: of the file; one that is written must not exist.
      write: whether it is written.

    Raises:
      OSError: the file system refuses; so may every method.
    """

    def __init__(self, path: pathlib.Path, *, write: bool):
        self._path = path
        self._flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY if write else os.O_RDONLY
        self._direct = True
        self._descriptor = self._open()

    def _open(self) -> int:
        try:
            return os.open(self._path, self._flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            with contextlib.suppress(FileNotFoundError):  # some have made it by then
                if self._flags & os.O_CREAT:
                    self._path.unlink()
            self._direct = False
            return os.open(self._path, self._flags, 0o666)

    def write(self, block: Block, size: int, start: int) -> None:
        """Write the first `size` bytes of a block at `start`, a multiple of its length.

        What is no multiple of a page is followed by whatever the block holds, until `end`.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        done = 0
        with memoryview(block.memory) as view:
            while done < size:
                with view[done:size] as rest:
                    done += self._transfer(os.pwrite, rest, start + done)

    def read(self, block: Block, size: int, start: int) -> None:
        """Read `size` bytes at `start`, a multiple of the block's length, to a block's beginning.

        Raises:
          ValueError: the file ends before.
        """
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        done = 0
        with memoryview(block.memory) as view:
            while done < size:
                with view[done:whole] as rest:
                    count = self._transfer(_read_into, rest, start + done)
                if not count:
                    raise ValueError(f"{self._path.name} ends after {start + done} bytes")
                done += count
                if done < size and done % _ALIGNMENT:
                    raise ValueError(f"{self._path.name} ends after {start + done} bytes")

    def end(self, size: int) -> None:
        """Cut the file to its size and wait until all of it is on the disk."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close it; twice is once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _transfer(self, call: object, rest: memoryview, place: int) -> int:
        """One system call; where direct I/O turns out not to be possible, without it."""
        assert callable(call)
        direct = self._direct  # as it begins: others may find out meanwhile
        try:
            return int(call(self._descriptor, rest, place))
        except OSError as error:
            if error.errno not in _NO_DIRECT or not direct:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False
            return int(call(self._descriptor, rest, place))


def _read_into(descriptor: int, into: memoryview, place: int) -> int:
    return os.preadv(descriptor, [into], place)
