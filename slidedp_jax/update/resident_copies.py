"""State that stays on the devices, in host memory for as long as a snapshot is copied from it.

Cutting a piece on a device is a program, which waits for all of a step that was issued before it: a
second for each handful of pieces. A whole array is sent by the copy engine beside the step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from slidedp_jax.state.device_state import DevicePartState
from slidedp_jax.state.layout import spans


@dataclass
class _Sent:
    """Arrays of a part that are read together: index -> its shares, in host memory or on the way.

    Attributes:
      left: elements that nobody has copied.
      readers: threads that copy some now.
    """

    shares: dict[int, list[jax.Array]]
    num_bytes: int
    left: int
    readers: int = 0
    _values: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def values(self, index: int, share: int) -> np.ndarray:
        """The memory of an array's share, once it is there.

        Taken once, by one thread: of an array that two threads ask for its memory at the same time,
        a plugin's count of references comes out wrong now and then, and ends the process when the
        array is dropped (JAX 0.11.2, `Non-zero type 1 hold on destruction`).
        """
        with self._turn:
            if (index, share) not in self._values:
                self._values[index, share] = np.asarray(self.shares[index][share])
            return self._values[index, share]


class ResidentCopies:
    """Arrays of parts on the devices; each element of an array is asked for once.

    Args:
      limit_bytes: most page-locked memory at once, if one group of arrays takes no more.
    """

    def __init__(self, limit_bytes: float):
        self._limit = limit_bytes
        self._sent: dict[tuple[DevicePartState, tuple[int, ...]], _Sent] = {}
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """In host memory now, or on the way there."""
        return sum(sent.num_bytes for sent in self._sent.values())

    def read_into(self, part: DevicePartState, start: int, out: Mapping[int, np.ndarray]) -> None:
        """Copy elements of arrays of a part, from `start` on.

        Args:
          part: whose they are.
          start: first element.
          out: index of an array -> where to, as many elements of each; always the same together.
        """
        key = part, tuple(out)
        sent = self._take(key)
        count = 0
        try:
            for index, into in out.items():
                size = len(sent.shares[index][0])
                for share, inner, outer in spans(start, len(into), size):
                    into[outer] = sent.values(index, share)[inner]
                count = len(into)
        finally:
            with self._changed:
                sent.readers -= 1
                sent.left -= count
                if sent.left <= 0:
                    self._sent.pop(key, None)
                self._changed.notify_all()

    def forget(self, parts: Sequence[object]) -> None:
        """Nothing more is read from these parts."""
        with self._changed:
            for key in [key for key in self._sent if key[0] in parts]:
                del self._sent[key]
            self._changed.notify_all()

    def _take(self, key: tuple[DevicePartState, tuple[int, ...]]) -> _Sent:
        part, indices = key
        num_elements = len(part.arrays[0])
        num_bytes = num_elements * sum(part.dtypes[index].itemsize for index in indices)
        with self._changed:
            self._changed.wait_for(lambda: key in self._sent or self._has_room(num_bytes))
            if key not in self._sent:
                self._sent[key] = _Sent(
                    shares={index: part.sent_to_host(index) for index in indices},
                    num_bytes=num_bytes,
                    left=part.layout.num_parameters,
                )
            sent = self._sent[key]
            sent.readers += 1
            return sent

    def _has_room(self, num_bytes: int) -> bool:
        """Whether to send more; what nobody reads, perhaps never again, is not waited for."""
        idle = not any(sent.readers for sent in self._sent.values())
        return idle or self.num_bytes + num_bytes <= self._limit
