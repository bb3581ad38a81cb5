"""Hosts join, agree and end together: processes of this machine, killed and stopped in turn."""

import signal

import pytest
from many_hosts import Hosts, run_hosts, until

JOIN = """
import sys, time
import slidedp_jax
from slidedp_jax import host_watch
setup = slidedp_jax.configure(platform="cpu", num_devices=2, num_host_devices=2)
me = setup.hosts.host_index
devices, own = setup.devices()
"""

WAIT_FOR_EVER = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
rows = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
x = jax.make_array_from_callback((len(devices),), rows, lambda index: np.ones(1, np.float32))
print("ready", flush=True)
jax.block_until_ready(jax.jit(lambda x: x.sum())(x))  # the others are waited for
"""


@pytest.mark.thorough
def test_all_devices_are_there_host_by_host_and_each_has_host_devices_of_its_own():
    hosts = run_hosts(
        2,
        JOIN
        + "print([d.process_index for d in devices], {d.process_index for d in own} == {me})\n"
        + "assert not set(devices) & set(own)\n"
        + "print(host_watch.watch().exchange(f'value of {me}'))",
    )
    for host in range(2):
        assert "[0, 0, 1, 1] True" in hosts.output(host)
        assert "['value of 0', 'value of 1']" in hosts.output(host)


@pytest.mark.thorough
def test_hosts_that_differ_say_so_and_end():
    hosts = Hosts(2, ["-c", JOIN + "host_watch.agree('plan', f'plan {me // 1}')"])
    assert hosts.wait() == [1, 1]
    for host in range(2):
        assert "UserError: hosts differ: host 0" in hosts.output(host)
        assert "plan=plan 0, host 1" in hosts.output(host)


@pytest.mark.thorough
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_ends_all_with_its_cause(failing):
    code = f"{JOIN}\nif me == {failing}:\n  time.sleep(2)\n  raise ValueError('no more rows')\n"
    hosts = Hosts(2, ["-c", code + WAIT_FOR_EVER])
    assert hosts.wait() == [1, 1]
    assert "ValueError: no more rows" in hosts.output(failing)
    assert f"host {failing} (" in hosts.output(1 - failing)
    assert "has ended: no more rows; this host ends, too" in hosts.output(1 - failing)


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_hangs_ends_the_others(killed, number):
    code = f"{JOIN}\nif me == {killed}:\n  print('ready', flush=True)\n  time.sleep(1000)\n"
    hosts = Hosts(2, ["-c", code + WAIT_FOR_EVER])
    try:
        until(lambda: all("ready" in hosts.output(host) for host in range(2)), hosts)
        hosts.processes[killed].send_signal(number)
        # About half a minute; more on a machine that is busy.
        assert hosts.processes[1 - killed].wait(200) != 0
        told = hosts.output(1 - killed)
        assert f"host {killed} (" in told or "coordination service" in told.lower(), told
    finally:
        hosts.kill()
