"""Processes that train together on this machine, as hosts do: CPU devices, gloo between them."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
_INHERITED_NOT = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NPROC")


def free_port() -> int:
    """One at which nobody listens just now."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


class Hosts:
    """One process per host that runs a command line, started together; `{host}` in it is its index.

    Each has `NNODES`, `NODE_RANK` and the coordinator's address in its environment, and the flags
    of XLA that tests have.
    """

    def __init__(self, num_hosts: int, arguments: list[str], **environment: str):
        port = free_port()
        kept = {key: value for key, value in os.environ.items() if key not in _INHERITED_NOT}
        kept |= {
            "NNODES": str(num_hosts),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "training")]),
        }
        self.logs = [pathlib.Path(tempfile.mkstemp(suffix=".log")[1]) for _ in range(num_hosts)]
        self.processes = []
        for index, log in enumerate(self.logs):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *(own.replace("{host}", str(index)) for own in arguments)],
                        cwd=ROOT,
                        env=kept | environment | {"NODE_RANK": str(index)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self, timeout: float = 600.0) -> list[int]:
        """Exit codes; kills all and fails after the time."""
        deadline = time.monotonic() + timeout
        try:
            return [own.wait(max(0.1, deadline - time.monotonic())) for own in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout:g} s:\n{self.text()}") from None

    def kill(self) -> None:
        """End all that still runs."""
        for own in self.processes:
            with contextlib.suppress(OSError):
                own.kill()
            own.wait()

    def output(self, host: int) -> str:
        """What a host has printed."""
        return self.logs[host].read_text()

    def text(self) -> str:
        """What all have printed."""
        return "\n".join(f"--- host {n}\n{self.output(n)}" for n in range(len(self.logs)))


def run_hosts(num_hosts: int, code: str, *arguments: str, **environment: str) -> Hosts:
    """Run `code` on all hosts to its end, which must be a good one."""
    hosts = Hosts(num_hosts, ["-c", code, *arguments], **environment)
    codes = hosts.wait()
    assert codes == [0] * num_hosts, hosts.text()
    return hosts


def until(condition, hosts: Hosts, timeout: float = 400.0) -> None:
    """Wait for a condition while all hosts run."""
    deadline = time.monotonic() + timeout
    while not condition():
        ended = any(own.poll() is not None for own in hosts.processes)
        assert not ended and time.monotonic() < deadline, hosts.text()
        time.sleep(0.2)
