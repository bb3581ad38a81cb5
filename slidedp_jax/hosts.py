"""Which hosts train together, which of them this one is, and where they meet.

One process per host drives all its GPUs. How many there are is taken from the first of these that
says so: what is stated, JAX's and Kubeflow's variables (`JAX_NUM_PROCESSES`, `NUM_PROCESSES`),
`NNODES` and `NODE_RANK` (as MaxText and torchrun's scripts have them), Open MPI, SLURM. What is
stated beside that wins field by field. Where nothing says so, there is one.

JAX's own detection is not used: under SLURM and Open MPI it takes a process per GPU for granted and
leaves each a single one, and its service listens on all addresses of the machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from slidedp_jax.errors import UserError

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""Where the first host's service listens, if not at the address that the others call."""

DEFAULT_PORT = 62831
_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Of ports made of a job's number, as JAX has them."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """What one process knows of the others.

    Attributes:
      num_hosts: H, processes that train together, each on a host of its own.
      host_index: which one this is, from 0; the first one owns the run's folder.
      coordinator: `address:port` where they meet, on the first host; None for a single host.
      found_in: what says so, in words.
    """

    num_hosts: int = 1
    host_index: int = 0
    coordinator: str | None = None
    found_in: str = field(default="nothing names others", compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this host owns what there is once."""
        return self.host_index == 0

    def describe(self) -> str:
        """A line for the console."""
        if self.num_hosts == 1:
            return f"one host ({self.found_in})"
        return (
            f"host {self.host_index} of {self.num_hosts}, which meet at {self.coordinator} "
            f"({self.found_in})"
        )


SINGLE = Hosts()


@dataclass(frozen=True, kw_only=True)
class _Found:
    num_hosts: int | None = None
    host_index: int | None = None
    coordinator: str | None = None
    source: str


def resolve_hosts(
    environment: Mapping[str, str],
    *,
    num_hosts: int | None = None,
    host_index: int | None = None,
    coordinator: str | None = None,
) -> Hosts:
    """Hosts that train together.

    Args:
      environment: variables of this process.
      num_hosts: stated; 1: this host alone, whatever the environment says.
      host_index: stated.
      coordinator: stated, `address` or `address:port`.

    Raises:
      UserError: numbers that are none or contradict each other, something is missing, or a launcher
        has started several processes per host.
    """
    stated = _Found(
        num_hosts=num_hosts, host_index=host_index, coordinator=coordinator, source="as stated"
    )
    if num_hosts == 1:
        if host_index not in (None, 0) or coordinator is not None:
            raise UserError(
                f"num_hosts is 1, with host_index {host_index} and coordinator {coordinator!r}; "
                "leave those out, or state how many hosts there are"
            )
        return Hosts(found_in="as stated")
    # Open MPI first: within a SLURM job its processes have the variables of its daemons' step.
    searched = (_jax_variables, _kubeflow_job, _node_variables, _open_mpi, _slurm)
    candidates = (found for search in searched if (found := search(environment)) is not None)
    found = next((own for own in candidates if own.num_hosts is not None), None)
    if found is None:
        if num_hosts is None and (host_index is not None or coordinator is not None):
            raise UserError(
                f"host_index {host_index} and coordinator {coordinator!r} are stated, but not how "
                "many hosts there are; state num_hosts, too"
            )
        found = stated
    return _joined(stated, found, environment)


def _joined(stated: _Found, found: _Found, environment: Mapping[str, str]) -> Hosts:
    """What is stated, and beside it what was found."""
    count = found.num_hosts if stated.num_hosts is None else stated.num_hosts
    if count is None or (count == 1 and stated.num_hosts is None):
        return Hosts(found_in=SINGLE.found_in if count is None else found.source)
    if count < 1:
        raise UserError(f"num_hosts is {count}; at least 1 is needed ({found.source})")
    index = found.host_index if stated.host_index is None else stated.host_index
    source = found.source
    if index is None and "JOB_COMPLETION_INDEX" in environment:
        index = _number(environment, "JOB_COMPLETION_INDEX")
        source = f"{source}, JOB_COMPLETION_INDEX"
    if index is None:
        raise UserError(
            f"there are {count} hosts ({found.source}), but nothing says which one this is: state "
            "host_index, or set NODE_RANK, 0 on the first"
        )
    if not 0 <= index < count:
        raise UserError(f"host_index is {index} of {count} hosts; they are counted from 0")
    address = stated.coordinator or found.coordinator or _coordinator_of_variables(environment)
    if address is None:
        raise UserError(
            f"there are {count} hosts ({found.source}), but nothing says where they meet: state "
            "coordinator, a private address of the first one with a port that is free there, such "
            f"as 10.0.0.1:{DEFAULT_PORT}, or set JAX_COORDINATOR_ADDRESS"
        )
    return Hosts(num_hosts=count, host_index=index, coordinator=with_port(address), found_in=source)


def _jax_variables(environment: Mapping[str, str]) -> _Found | None:
    """Names that JAX, Kubeflow Trainer's JAX runtime and others use."""
    counts = ("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT")
    count = next((name for name in counts if environment.get(name)), None)
    if count is None:
        return None
    index = next(
        (name for name in ("JAX_PROCESS_ID", "JAX_PROCESS_INDEX") if environment.get(name)), None
    )
    return _Found(
        num_hosts=_number(environment, count),
        host_index=None if index is None else _number(environment, index),
        coordinator=_coordinator_of_variables(environment),
        source=f"{count} and its like",
    )


def _kubeflow_job(environment: Mapping[str, str]) -> _Found | None:
    """What Kubeflow's JAXJob sets."""
    if not all(environment.get(name) for name in ("NUM_PROCESSES", "COORDINATOR_ADDRESS")):
        return None
    address, port = environment["COORDINATOR_ADDRESS"], environment.get("COORDINATOR_PORT")
    return _Found(
        num_hosts=_number(environment, "NUM_PROCESSES"),
        host_index=_number(environment, "PROCESS_ID") if environment.get("PROCESS_ID") else None,
        coordinator=_with_stated_port(address, port),
        source="NUM_PROCESSES, as Kubeflow's JAXJob sets it",
    )


def _node_variables(environment: Mapping[str, str]) -> _Found | None:
    if not environment.get("NNODES"):
        return None
    rank = environment.get("NODE_RANK")
    return _Found(
        num_hosts=_number(environment, "NNODES"),
        host_index=_number(environment, "NODE_RANK") if rank else None,
        coordinator=_coordinator_of_variables(environment),
        source="NNODES and NODE_RANK",
    )


def _coordinator_of_variables(environment: Mapping[str, str]) -> str | None:
    """The address that variables name, whatever says how many hosts there are."""
    pairs = (
        ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"),
        ("JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT"),
        ("MASTER_ADDR", "MASTER_PORT"),
    )
    for name, port in pairs:
        if address := environment.get(name):
            return _with_stated_port(address, environment.get(port))
    return None


def _slurm(environment: Mapping[str, str]) -> _Found | None:
    """A job step of `srun`; a batch script itself is none."""
    if not all(environment.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")):
        return None
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    tasks = next((_number(environment, name) for name in names if environment.get(name)), 1)
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", tasks)
    if tasks == 1:
        return _Found(num_hosts=1, host_index=0, source="a SLURM step of one task")
    if tasks != nodes:
        raise UserError(
            f"SLURM has started {tasks} tasks on {nodes} nodes; one process drives all GPUs of its "
            "host, so start one task per node (srun --ntasks-per-node=1, with all GPUs of the "
            "node, --gpus-per-node, and not --gpus-per-task). If these tasks are runs of their "
            "own, state num_hosts=1"
        )
    job = _number(environment, "SLURM_JOB_ID")
    step = _number(environment, "SLURM_STEP_ID", 0)
    # JAX makes ports of jobs alone, and two steps of a job would meet at one.
    port = _FIRST_PORT + (16 * job + step) % _NUM_PORTS
    return _Found(
        num_hosts=tasks,
        host_index=_number(environment, "SLURM_PROCID"),
        coordinator=f"{first_node(environment['SLURM_STEP_NODELIST'])}:{port}",
        source=f"step {step} of SLURM job {job}",
    )


def first_node(node_list: str) -> str:
    """The first name of a SLURM list: `node[007,9-12],b` -> `node007`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", node_list)
    assert match is not None
    prefix, number, suffix = match.groups()
    return f"{prefix}{number or ''}{suffix}"


def _open_mpi(environment: Mapping[str, str]) -> _Found | None:
    if not environment.get("OMPI_COMM_WORLD_SIZE"):
        return None
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if size == 1:
        return _Found(num_hosts=1, host_index=0, source="Open MPI, one process")
    per_host = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    if per_host != 1:
        raise UserError(
            f"Open MPI has started {per_host} processes on this host; one drives all its GPUs, so "
            "start one per host (mpirun --map-by ppr:1:node). If these are runs of their own, "
            "state num_hosts=1"
        )
    return _Found(
        num_hosts=size,
        host_index=_number(environment, "OMPI_COMM_WORLD_RANK"),
        coordinator=_coordinator_of_variables(environment),
        source="Open MPI",
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name} is {text!r}; it must be a whole number") from None


def _with_stated_port(address: str, port: str | None) -> str:
    return f"{address}:{port}" if port and not _has_port(address) else address


def with_port(address: str) -> str:
    """`address:port`, of either; an IPv6 address with a port is in brackets.

    Raises:
      UserError: the port is none.
    """
    if not _has_port(address):
        host = f"[{address}]" if address.count(":") > 1 and address[0] != "[" else address
        return f"{host}:{DEFAULT_PORT}"
    port = address.rsplit(":", 1)[1]
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"coordinator is {address!r}; its port must be a number from 1 to 65535")
    return address


def _has_port(address: str) -> bool:
    colons = address.count(":")
    return colons == 1 or (colons > 1 and "]:" in address)


def bind_address(hosts: Hosts, environment: Mapping[str, str]) -> str:
    """Where the first host's service listens: at the address that the others call, only.

    The service asks nobody who they are, and whoever reaches it can stop the run. So an address
    that the whole internet may reach has to be stated twice.

    Raises:
      UserError: the address is none of this machine's, a public one, or the machine's name for
        itself, at which no other can call.
    """
    assert hosts.coordinator is not None
    if stated := environment.get(BIND_VARIABLE):
        return stated
    name, port = hosts.coordinator.rsplit(":", 1)
    name = name.strip("[]")
    way_out = (
        f"state another coordinator, or {BIND_VARIABLE}, the address and port at which this host "
        "shall listen"
    )
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"the coordinator {name} cannot be found: {error}; {way_out}") from None
    family, *_, place = found[0]
    address = ipaddress.ip_address(str(place[0]).split("%")[0])
    if address.is_loopback and name not in ("localhost", str(address)):
        raise UserError(
            f"the coordinator {name} is {address} on this machine, where no other host can call; "
            f"{way_out}"
        )
    if address.is_global:
        raise UserError(
            f"the coordinator {name} is {address}, a public address; its service asks nobody who "
            f"they are. Give a private one, or, if a firewall keeps others away, {way_out}"
        )
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((str(place[0]), 0))
    except OSError:
        raise UserError(
            f"host 0 is to listen at {address} ({name}), which is none of this machine's "
            f"addresses; {way_out}"
        ) from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
