"""From flags, variables and launchers to the hosts of a run; environments as launchers set them."""

import socket

import pytest

from slidedp_jax import UserError
from slidedp_jax.hosts import DEFAULT_PORT, Hosts, bind_address, first_node, resolve_hosts

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def found(environment, **stated):
    hosts = resolve_hosts(environment, **stated)
    return hosts.num_hosts, hosts.host_index, hosts.coordinator


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0, None)),
        (SLURM, (2, 1, f"gpu07:{61440 + (16 * 4711 + 1) % 4096}")),
        (
            {
                "JAX_NUM_PROCESSES": "4",
                "JAX_PROCESS_ID": "3",
                "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:3389",
            },
            (4, 3, "run-node-0-0.run:3389"),
        ),
        (
            {
                "NUM_PROCESSES": "2",
                "PROCESS_ID": "0",
                "COORDINATOR_ADDRESS": "run-worker-0",
                "COORDINATOR_PORT": "6666",
            },
            (2, 0, "run-worker-0:6666"),
        ),
        (
            {"NNODES": "2", "NODE_RANK": "1", "JAX_COORDINATOR_IP": "10.0.0.1"},
            (2, 1, f"10.0.0.1:{DEFAULT_PORT}"),
        ),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            (2, 0, "a:29500"),
        ),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}, (2, 1, "10.0.0.1:99")),
        (
            {"NNODES": "3", "JOB_COMPLETION_INDEX": "2", "JAX_COORDINATOR_ADDRESS": "s-w-0-0.s"},
            (3, 2, f"s-w-0-0.s:{DEFAULT_PORT}"),
        ),
        (  # a JobSet of JAX's names, with an index for each pod
            {
                "JAX_NUM_PROCESSES": "4",
                "JOB_COMPLETION_INDEX": "1",
                "JAX_COORDINATOR_ADDRESS": "finetune-hosts-0-0.finetune:62831",
            },
            (4, 1, "finetune-hosts-0-0.finetune:62831"),
        ),
        (  # Open MPI within a SLURM job, by mpirun: the daemons' step has a task per node
            SLURM | {"SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI | {"MASTER_ADDR": "10.0.0.1"},
            (2, 1, f"10.0.0.1:{DEFAULT_PORT}"),
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "a-[3,5]"}, (2, 1, f"a-3:{61440 + 16 * 4711 % 4096 + 1}")),
        ({"NNODES": "1", "NODE_RANK": "0"}, (1, 0, None)),
        ({"JOB_COMPLETION_INDEX": "5"}, (1, 0, None)),
    ],
)
def test_each_launcher_is_understood(environment, expected):
    assert found(environment) == expected


def test_variables_come_before_launchers_and_what_is_stated_before_both():
    both = SLURM | {"NNODES": "4", "NODE_RANK": "3", "JAX_COORDINATOR_ADDRESS": "b:1"}
    assert found(both) == (4, 3, "b:1")
    assert found(both, host_index=2) == (4, 2, "b:1")
    assert found(both, num_hosts=3, host_index=0, coordinator="c:2") == (3, 0, "c:2")
    assert found(SLURM, coordinator="10.0.0.7") == (2, 1, f"10.0.0.7:{DEFAULT_PORT}")


def test_one_host_can_be_stated_whatever_the_launcher_says():
    assert found(SLURM, num_hosts=1) == (1, 0, None)
    assert found(SLURM | {"SLURM_STEP_NUM_TASKS": "16"}, num_hosts=1) == (1, 0, None)


def test_who_says_so_does_not_make_hosts_others():
    assert resolve_hosts({}) == resolve_hosts({}, num_hosts=1) == resolve_hosts({"NNODES": "1"})


def test_a_batch_script_and_a_step_of_one_task_are_one_host():
    script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert found(script) == (1, 0, None)
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    assert found(SLURM | one) == (1, 0, None)


@pytest.mark.parametrize(
    ("environment", "stated", "text"),
    [
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "16"},
            {},
            "16 tasks on 2 nodes.*--ntasks-per-node=1.*num_hosts=1",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {}, "8 processes on this host"),
        (OPEN_MPI, {}, "nothing says where they meet.*coordinator"),
        ({"NNODES": "2"}, {"coordinator": "a"}, "which one this is.*host_index"),
        ({"NNODES": "two"}, {}, "NNODES is 'two'"),
        ({"NNODES": "0", "NODE_RANK": "0"}, {}, "num_hosts is 0"),
        ({}, {"num_hosts": 2, "host_index": 2, "coordinator": "a"}, "host_index is 2 of 2"),
        ({}, {"num_hosts": 2, "host_index": -1, "coordinator": "a"}, "host_index is -1"),
        ({}, {"host_index": 1}, "state num_hosts"),
        ({}, {"coordinator": "a:1"}, "state num_hosts"),
        ({}, {"num_hosts": 1, "host_index": 1}, "num_hosts is 1"),
        ({}, {"num_hosts": 2, "host_index": 0, "coordinator": "a:b"}, "'a:b'; its port"),
        ({}, {"num_hosts": 2, "host_index": 0, "coordinator": "a:70000"}, "'a:70000'"),
    ],
)
def test_what_is_missing_or_contradicts_is_said(environment, stated, text):
    with pytest.raises(UserError, match=text):
        resolve_hosts(environment, **stated)


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[7,9-12]", "node7"),
        ("rack2-n[3-4]-ib", "rack2-n3-ib"),
    ],
)
def test_first_node_of_a_list(listed, first):
    assert first_node(listed) == first


@pytest.mark.parametrize(
    ("coordinator", "expected"),
    [
        ("10.1.2.3", f"10.1.2.3:{DEFAULT_PORT}"),
        ("fd00::1", f"[fd00::1]:{DEFAULT_PORT}"),
        ("[fd00::1]", f"[fd00::1]:{DEFAULT_PORT}"),
        ("[fd00::1]:5", "[fd00::1]:5"),
    ],
)
def test_a_coordinator_without_a_port_gets_one(coordinator, expected):
    stated = {"num_hosts": 2, "host_index": 0, "coordinator": coordinator}
    assert found({}, **stated)[2] == expected


def at(coordinator: str) -> Hosts:
    return Hosts(num_hosts=2, host_index=0, coordinator=coordinator, found_in="a test")


def test_the_service_listens_at_the_address_that_is_called_and_at_no_other():
    assert bind_address(at("127.0.0.1:99"), {}) == "127.0.0.1:99"
    assert bind_address(at("localhost:99"), {}) in ("127.0.0.1:99", "[::1]:99")
    assert bind_address(at("8.8.8.8:99"), {"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:1"}) == (
        "0.0.0.0:1"
    )


@pytest.mark.parametrize(
    ("coordinator", "text"),
    [
        ("8.8.8.8:99", "a public address.*asks nobody"),
        ("10.255.255.254:99", "none of this machine's addresses"),
        ("no-such-host.invalid:99", "cannot be found"),
    ],
)
def test_an_address_where_nobody_or_everybody_could_call_is_refused(coordinator, text):
    with pytest.raises(UserError, match=text):
        bind_address(at(coordinator), {})


def test_a_name_that_is_the_machine_itself_is_refused(monkeypatch):
    """As on systems whose own name is 127.0.1.1 in /etc/hosts."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 99))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    with pytest.raises(UserError, match=r"gpu07 is 127.0.1.1 on this machine"):
        bind_address(at("gpu07:99"), {})


def test_it_says_what_it_found():
    assert resolve_hosts(SLURM).describe() == (
        "host 1 of 2, which meet at gpu07:63089 (step 1 of SLURM job 4711)"
    )
    assert resolve_hosts({}).describe() == "one host (nothing names others)"
