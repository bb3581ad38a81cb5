"""Gathers and sums over all compute devices, so that each byte enters a host once.

Over several hosts with several devices each, a collective of all devices at once takes no account
of where they are: round a ring, all but one device's share enters every host, and of an exchange,
each device of a host gets what each device of the others has. So there are two of each here: one
between the devices that have the same place on their hosts, one between the devices of a host.
Weights are gathered between hosts first, gradients summed within hosts first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from slidedp_jax.transfer.copies import first_of_this_host

DATA_AXIS = "data"
"""The mesh axis of compute devices, host by host."""


class DeviceGroups:
    """Collectives over the data axis, all to be called inside `shard_map`.

    Args:
      num_devices: G, over all hosts.
      per_host: devices of each host, g; H = G / g.
    """

    def __init__(self, num_devices: int, per_host: int):
        assert num_devices % per_host == 0, (num_devices, per_host)
        self._num_devices, self._per_host = num_devices, per_host
        self._num_hosts = num_devices // per_host
        devices = [
            [host * per_host + own for own in range(per_host)] for host in range(self._num_hosts)
        ]
        self._within = devices
        self._between = [list(same) for same in zip(*devices, strict=True)]
        self._in_two = self._num_hosts > 1 and per_host > 1

    @staticmethod
    def of(mesh: Mesh) -> DeviceGroups:
        """Those of a mesh of compute devices, which come host by host."""
        return DeviceGroups(mesh.size, first_of_this_host(mesh)[1])

    def gather(self, share: jax.Array) -> jax.Array:
        """Shares [n / G] in the order of the devices -> [n] on each."""
        if not self._in_two:
            gathered: jax.Array = jax.lax.all_gather(share, DATA_AXIS, tiled=True)
            return gathered
        of_hosts = jax.lax.all_gather(share, DATA_AXIS, axis_index_groups=self._between)
        whole: jax.Array = jax.lax.all_gather(
            of_hosts, DATA_AXIS, axis=1, axis_index_groups=self._within
        )
        return whole.reshape(-1)

    def scatter_sum(self, values: jax.Array) -> jax.Array:
        """[n] on each device -> its share [n / G] of the sum, in the values' dtype."""
        if not self._in_two:
            share: jax.Array = jax.lax.psum_scatter(values, DATA_AXIS, tiled=True)
            return share
        by_place = values.reshape(self._num_hosts, self._per_host, -1)
        of_host = jax.lax.psum_scatter(
            by_place, DATA_AXIS, scatter_dimension=1, axis_index_groups=self._within
        )
        share = jax.lax.psum_scatter(of_host, DATA_AXIS, axis_index_groups=self._between)
        return share

    def exchange_sum(self, values: jax.Array) -> jax.Array:
        """[n] on each device -> its share [n / G] of the sum in fp32.

        Values travel in their own dtype between the devices of a host, or where there is one device
        per host; between hosts, sums of a host's travel in fp32. Either way they are added as pairs
        of pairs: where g is a power of two, in one order whatever the number of hosts.
        """
        if not self._in_two:
            shares = values.reshape(self._num_devices, -1)
            received = jax.lax.all_to_all(shares, DATA_AXIS, split_axis=0, concat_axis=0)
            return _sum_of_pairs(received)
        by_place = values.reshape(self._num_hosts, self._per_host, -1)
        received = jax.lax.all_to_all(
            by_place, DATA_AXIS, split_axis=1, concat_axis=0, axis_index_groups=self._within
        )
        of_host = _sum_of_pairs(received)
        sums = jax.lax.all_to_all(
            of_host, DATA_AXIS, split_axis=0, concat_axis=0, axis_index_groups=self._between
        )
        return _sum_of_pairs(sums)


def _sum_of_pairs(summands: jax.Array) -> jax.Array:
    """[n, ...] -> fp32 [...]: neighbours are added, then the neighbours among those sums."""
    left = [summands[at].astype(jnp.float32) for at in range(len(summands))]
    while len(left) > 1:
        pairs = [left[at] + left[at + 1] for at in range(0, len(left) - 1, 2)]
        left = [*pairs, left[-1]] if len(left) % 2 else pairs
    return left[0]
