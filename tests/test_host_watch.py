"""Hosts join, agree and end together: processes of this machine, killed and stopped in turn."""

import ast
import signal
import time

import pytest
from many_hosts import Hosts, run_hosts, until

A_MINUTE = 60.0

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


SLURM = """
os.environ |= {
    "SLURM_JOB_ID": port, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
    "SLURM_PROCID": me, "SLURM_NODEID": me, "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1",
}
del os.environ["JAX_COORDINATOR_ADDRESS"]
"""
OPEN_MPI = """
os.environ |= {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": me, "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1",
}
"""
LISTENING = """
addresses = []
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        address, port = line.split()[1].split(":")
        if line.split()[3] == "0A" and int(port, 16) == int(setup.hosts.coordinator.split(":")[1]):
            addresses.append(address)
print("LISTENS", addresses)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [SLURM, OPEN_MPI], ids=["slurm", "open_mpi"])
def test_launchers_cut_no_process_down_to_one_device(launcher):
    """JAX's own detection would; and the service listens where it is called, and nowhere else."""
    begin = "import os\nme = os.environ['NODE_RANK']\ndel os.environ['NNODES']\n"
    begin += "port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')[1]\n"
    code = begin + launcher + JOIN + "print('SEES', len(own), len(devices))\n" + LISTENING
    hosts = run_hosts(2, code + "host_watch.agree('all have looked', '')\n")
    for host in range(2):
        assert "SEES 2 4" in hosts.output(host)
    (address,) = ast.literal_eval(hosts.output(0).split("LISTENS ")[1])
    assert address in ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1, also as IPv6


@pytest.mark.thorough
def test_hosts_that_differ_say_so_and_end():
    hosts = Hosts(2, ["-c", JOIN + "host_watch.agree('plan', f'plan {me // 1}')"])
    assert hosts.wait() == [1, 1]
    for host in range(2):
        assert "UserError: hosts differ: host 0" in hosts.output(host)
        assert "plan=plan 0, host 1" in hosts.output(host)


@pytest.mark.thorough
def test_hosts_that_were_told_of_other_numbers_say_so():
    join = JOIN.replace("platform=", "num_hosts=2 + int(os.environ['NODE_RANK']), platform=")
    hosts = Hosts(2, ["-c", f"import os{join}"])
    assert hosts.wait() == [1, 1]
    assert "was told of 3 hosts, and host 0 (" in hosts.output(0)
    assert "was told of 2 hosts, and host 1 (" in hosts.output(1)


@pytest.mark.thorough
def test_values_that_differ_are_told_by_name():
    values = "{'lr': str(me // 2), 'seed': '0', 'only' if me == 2 else 'other': ''}"
    hosts = Hosts(3, ["-c", f"{JOIN}host_watch.agree_on({values}, advice='Mend it')"])
    assert hosts.wait() == [1, 1, 1]
    for host in range(3):
        told = hosts.output(host)
        assert "UserError: hosts differ: lr is 0 on host 0 (" in told
        assert ") and 1 on host 2 (" in told and "only is None on host 0" in told
        assert "seed" not in told.split("UserError:")[1] and "). Mend it" in told


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("failing", "num_hosts"), [(0, 2), (1, 2), pytest.param(2, 4, id="one of four")]
)
def test_an_error_on_one_ends_all_with_its_cause(failing, num_hosts):
    code = f"{JOIN}\nif me == {failing}:\n  time.sleep(2)\n  raise ValueError('no more rows')\n"
    hosts = Hosts(num_hosts, ["-c", code + WAIT_FOR_EVER])
    assert hosts.wait() == [1] * num_hosts
    assert "ValueError: no more rows" in hosts.output(failing)
    for host in {*range(num_hosts)} - {failing}:
        assert f"host {failing} (" in hosts.output(host)
        assert "has ended: no more rows; this host ends, too" in hosts.output(host)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "ended", "num_hosts"),
    [
        *((signal.SIGKILL, host, 4) for host in range(4)),
        *((signal.SIGSTOP, host, 2) for host in range(2)),
    ],
)
def test_a_host_that_dies_or_hangs_ends_the_others_within_a_minute(number, ended, num_hosts):
    """A minute is what is promised."""
    code = f"{JOIN}\nif me == {ended}:\n  print('ready', flush=True)\n  time.sleep(1000)\n"
    hosts = Hosts(num_hosts, ["-c", code + WAIT_FOR_EVER])
    try:
        until(lambda: all("ready" in hosts.output(host) for host in range(num_hosts)), hosts)
        hosts.processes[ended].send_signal(number)
        deadline = time.monotonic() + A_MINUTE
        for host in {*range(num_hosts)} - {ended}:
            assert hosts.processes[host].wait(deadline - time.monotonic()) != 0
            told = hosts.output(host)
            assert f"host {ended} (" in told or "coordination service" in told.lower(), told
    finally:
        hosts.kill()
