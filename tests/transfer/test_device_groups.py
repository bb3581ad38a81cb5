"""Collectives in two parts give what those of all devices at once give, for fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatched import stated_collectives
from jax.sharding import Mesh, PartitionSpec

from slidedp_jax.process import current_setup
from slidedp_jax.transfer.device_groups import DATA_AXIS, DeviceGroups

SIZE = 3 * 48


def collective(name, num_devices, per_host, inputs, outputs):
    """A method of `DeviceGroups` as a program; devices of this process stand for those of hosts."""
    devices = current_setup().devices()[0][:num_devices]
    mesh = Mesh(np.array(devices), (DATA_AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    method = getattr(DeviceGroups(num_devices, per_host), name)
    mapped = jax.shard_map(method, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped)


SAME, ROWS = PartitionSpec(), PartitionSpec(DATA_AXIS)


def summands(num_devices):
    """Of very different sizes, so that each order of a sum rounds in its own way."""
    rng = np.random.default_rng(0)
    scale = 2.0 ** rng.integers(-14, 14, (num_devices, 1))
    return jnp.asarray((rng.standard_normal((num_devices, SIZE)) * scale).reshape(-1), jnp.bfloat16)


@pytest.mark.parametrize(("num_devices", "per_host"), [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3)])
def test_shares_are_gathered_in_the_order_of_the_devices(num_devices, per_host):
    values = jnp.arange(float(SIZE))
    gather = collective("gather", num_devices, per_host, ROWS, SAME)
    np.testing.assert_array_equal(gather(values), values)
    scattered = collective("scatter_sum", num_devices, per_host, SAME, ROWS)(values)
    np.testing.assert_array_equal(scattered, num_devices * values)


def test_sums_agree_in_every_bit_however_many_hosts_there_are():
    """Where each has a power of two of the devices; any other order would round otherwise."""
    values = summands(8)
    found = [
        np.asarray(collective("exchange_sum", 8, per_host, ROWS, ROWS)(values))
        for per_host in (8, 4, 2, 1)
    ]
    for other in found[1:]:
        assert found[0].tobytes() == other.tobytes()
    each = np.asarray(values, np.float32).reshape(8, SIZE)
    in_a_row = np.zeros(SIZE, np.float32)
    for one in each:
        in_a_row += one
    np.testing.assert_allclose(found[0], each.astype(np.float64).sum(0), rtol=1e-5, atol=0.02)
    assert found[0].tobytes() != in_a_row.tobytes()


def test_three_devices_of_each_host_are_added_up_too():
    values = summands(6)
    found = collective("exchange_sum", 6, 3, ROWS, ROWS)(values)
    expected = np.asarray(values, np.float64).reshape(6, SIZE).sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0.02)


@pytest.mark.parametrize("per_host", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "dtype", "bytes_between"),
    [
        ("gather", jnp.bfloat16, 2),
        ("scatter_sum", jnp.float32, 4),
        ("exchange_sum", jnp.bfloat16, 4),
    ],
)
def test_each_byte_enters_a_host_once(name, dtype, bytes_between, per_host):
    """(H - 1) / H of the array; sums of a host's devices in fp32, one device's as it gave them."""
    gathers = name == "gather"
    program = collective(name, 8, per_host, *((ROWS, SAME) if gathers else (SAME, ROWS)))
    module = program.lower(jnp.zeros(SIZE, dtype)).compiler_ir()
    into = sum(own.into_each_host(per_host) for own in stated_collectives(module))
    if name == "exchange_sum" and per_host == 1:
        bytes_between = 2
    num_hosts = 8 // per_host
    assert into == bytes_between * SIZE * (num_hosts - 1) / num_hosts
