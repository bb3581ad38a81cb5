"""Which part of the training state lies on this host, where several train together.

Flat arrays are cut into H consecutive shares of whole pieces, as they are cut over compute devices:
the devices of host h, which come h-th in the mesh, pull and send what lies on host h. So nothing of
the state crosses the network but by the collectives of the route. Arrays of the state are arrays of
this host's devices alone, and programs that touch them know of no other host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_Sliced = TypeVar("_Sliced", np.ndarray, Sequence[int])


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """The h-th of H equal shares.

    Attributes:
      num_hosts: H.
      index: h.
    """

    num_hosts: int = 1
    index: int = 0

    def size(self, total: int) -> int:
        """Of so many, how many are this host's; H divides the total."""
        assert total % self.num_hosts == 0, (total, self.num_hosts)
        return total // self.num_hosts

    def first(self, total: int) -> int:
        """The first of them."""
        return self.index * self.size(total)

    def of(self, values: _Sliced) -> _Sliced:
        """This host's share of a sequence, or of an array along its first dimension."""
        start = self.first(len(values))
        return values[start : start + self.size(len(values))]

    def owned(self, total: int, offset: int, size: int) -> slice:
        """Which part of [offset, offset + size) of a flat array of `total` elements is here.

        As a slice of the range; an empty one where nothing is.
        """
        start = self.first(total)
        lower = min(max(start - offset, 0), size)
        upper = min(max(start + self.size(total) - offset, lower), size)
        return slice(lower, upper)

    def on_host(self, index: int) -> HostShare:
        """The share of another host."""
        return HostShare(num_hosts=self.num_hosts, index=index)


WHOLE = HostShare()
"""Of a single host."""
