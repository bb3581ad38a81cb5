"""Several hosts that train as one: they join, agree on what must be equal, and end together.

A host that fails leaves the others in a collective that never ends. So each says through the
service of `jax.distributed` that it is there, every second, and why it ends if it does; each looks
at what the others say, and ends with that cause. A host that is killed, hangs or is cut off says
nothing: after `QUIET_S` the others end with that. The thread that does this runs no JAX program.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from slidedp_jax import jax_internals
from slidedp_jax.errors import UserError
from slidedp_jax.hosts import Hosts, bind_address

QUIET_S = 30.0
"""A host that has said nothing for so long is taken for dead."""

_LOOK_S = 1.0
_MOST_PER_LOOK_S = 3.0
"""Where a process has looked later than that, it was stopped, and has not waited."""
_SERVICE_QUIET_S = 100
"""The service's own limit. JAX ends a process after half of it: after ours, which says more."""
_MOST_TIDYING_S = 10.0
_TOLD_S = 5.0
"""How long a host that fails waits for the others to see why."""
_AS_LONG_AS_IT_TAKES_MS = 7 * 24 * 3600 * 1000
_EXIT_FAILED = 1

_PREFIX = "slidedp"


class HostWatch:
    """What this host says to the others, and hears.

    Args:
      hosts: of the run.
      client: of the service (`jax_internals.service_client`).

    Attributes:
      tidy: called before this process ends because another did; errors in it are ignored.
    """

    def __init__(self, hosts: Hosts, client: Any):
        self.tidy: Callable[[], None] = lambda: None
        self._hosts = hosts
        self._client = client
        self._round = 0
        self._beats: dict[int, tuple[str, float]] = {}
        self._unanswered_s = 0.0
        self._last_error = ""
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._watch, name="host_watch", daemon=True)
        self._names = [""] * hosts.num_hosts
        self._thread.start()
        threading.Thread(target=self._watch_service, name="host_watch", daemon=True).start()
        try:
            self._names = self._met()
        except UserError:  # a thread that is within the service's client must not see the end
            self._over.set()
            self._thread.join()
            raise

    def agree(self, what: str, value: str, *, advice: str = "") -> None:
        """Whether all hosts call this with one value; a barrier of all of them.

        Args:
          what: the value's name, for messages.
          value: compared as it is.
          advice: what to do where they differ.

        Raises:
          UserError: they differ, on every host.
        """
        self._round += 1
        found = self._all(f"same/{self._round}", f"{what}={value}")
        if len(set(found)) == 1:
            return
        odd = next(host for host, own in enumerate(found) if own != found[0])
        raise UserError(
            f"hosts differ: {self._named(0)} has {_short(found[0])}, {self._named(odd)} has "
            f"{_short(found[odd])}. {advice or 'Start the same command everywhere'}"
        )

    def agree_on(self, values: Mapping[str, str], *, advice: str = "") -> None:
        """Whether all hosts call this with equal values; a barrier of all of them.

        Args:
          values: by name; those that differ are told apart.
          advice: what to do where they differ.

        Raises:
          UserError: they differ, on every host.
        """
        of_hosts = [json.loads(text) for text in self.exchange(json.dumps(dict(values)))]
        for host, own in enumerate(of_hosts):
            if own == of_hosts[0]:
                continue
            both = sorted(of_hosts[0] | own)
            names = [name for name in both if of_hosts[0].get(name) != own.get(name)]
            texts = [
                f"{name} is {_short(str(of_hosts[0].get(name)))} on {self._named(0)} and "
                f"{_short(str(own.get(name)))} on {self._named(host)}"
                for name in names
            ]
            raise UserError(
                f"hosts differ: {'; '.join(texts)}. {advice or 'Start the same command everywhere'}"
            )

    def exchange(self, value: str) -> list[str]:
        """The values that all hosts give, by host; a barrier of all of them."""
        self._round += 1
        return self._all(f"value/{self._round}", value)

    def fail(self, cause: BaseException | str) -> None:
        """Tell the others why this host ends; returns when they have had time to see it."""
        if self._failed or self._over.is_set():
            return
        self._failed = True
        text = cause if isinstance(cause, str) else str(cause) or type(cause).__name__
        with contextlib.suppress(Exception):
            self._say(f"failed/{self._hosts.host_index}", text)
            deadline = time.monotonic() + _TOLD_S
            while time.monotonic() < deadline:
                if len(self._read("told")) >= self._hosts.num_hosts - 1:
                    break
                time.sleep(_LOOK_S / 5)
        if self._hosts.is_first:
            time.sleep(2 * _LOOK_S)  # with it goes what the others are still told by

    def leave(self) -> None:
        """At the end of a run that went well: wait for the others, then say nothing more.

        They may be long at their ends (the first host exports), and are watched meanwhile.
        """
        if self._over.is_set() or self._failed:
            return
        with contextlib.suppress(Exception):  # as a service that is gone; JAX will say so
            self._client.wait_at_barrier(f"{_PREFIX}/end", _AS_LONG_AS_IT_TAKES_MS)
        self._over.set()
        self._thread.join()

    def _all(self, what: str, value: str | None = None) -> list[str]:
        """What all hosts say of something, in their order."""
        if value is not None:
            self._say(f"{what}/{self._hosts.host_index}", value)
        self._client.wait_at_barrier(f"{_PREFIX}/{what}", _AS_LONG_AS_IT_TAKES_MS)
        found = self._read(what)
        return [found[host] for host in range(self._hosts.num_hosts)]

    def _met(self) -> list[str]:
        """Names of the machines; the service lets in whoever comes, whatever it was told."""
        self._say("at", json.dumps([self._own_name(), self._hosts.num_hosts]))
        self._client.wait_at_barrier(f"{_PREFIX}/at", _AS_LONG_AS_IT_TAKES_MS)
        found = {host: json.loads(text) for host, text in self._read("at").items()}
        for host, (name, count) in sorted(found.items()):
            if count != self._hosts.num_hosts:
                raise UserError(
                    f"hosts differ: host {host} ({name}) was told of {count} hosts, and host "
                    f"{self._hosts.host_index} ({self._own_name()}) of {self._hosts.num_hosts}. "
                    "Give all of them the same number"
                )
        return [found[host][0] for host in range(self._hosts.num_hosts)]

    def _own_name(self) -> str:
        return socket.gethostname()

    def _named(self, host: int) -> str:
        name = self._names[host]
        return f"host {host} ({name})" if name else f"host {host}"

    def _say(self, what: str, value: str) -> None:
        key = what if what.count("/") else f"{what}/{self._hosts.host_index}"
        self._client.key_value_set(f"{_PREFIX}/{key}", value, allow_overwrite=True)

    def _read(self, what: str) -> dict[int, str]:
        """What hosts have said of something, by their numbers."""
        found = self._client.key_value_dir_get(f"{_PREFIX}/{what}/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in found}

    def _watch(self) -> None:
        beat, laps = 0, _Laps()
        while not self._over.wait(_LOOK_S):
            try:
                beat += 1
                self._say("beat", str(beat))
                failed, beats = self._read("failed"), self._read("beat")
                self._unanswered_s = 0.0
            except Exception as error:  # of the service, whatever its client raises
                self._last_error = str(error)
                continue
            for host, cause in sorted(failed.items()):
                if host != self._hosts.host_index:
                    with contextlib.suppress(Exception):
                        self._say("told", "yes")
                    self._end(f"{self._named(host)} has ended: {cause}")
            self._look_for_silence(beats, laps.next_s())

    def _watch_service(self) -> None:
        """On a thread of its own, since a service that hangs answers with nothing at all."""
        laps = _Laps()
        while not self._over.wait(_LOOK_S):
            self._unanswered_s += laps.next_s()
            if self._unanswered_s > QUIET_S:
                self._end(
                    f"{self._named(0)}, where all meet, has not answered for {QUIET_S:g} s: it was "
                    f"killed, hangs or is cut off. {self._last_error}".rstrip()
                )

    def _look_for_silence(self, beats: dict[int, str], seconds: float) -> None:
        for host in range(self._hosts.num_hosts):
            beat = beats.get(host, "")
            before, quiet_s = self._beats.get(host, ("", 0.0))
            self._beats[host] = beat, quiet_s + seconds if beat == before else 0.0
            if self._beats[host][1] > QUIET_S and not self._failed:
                self._end(
                    f"{self._named(host)} has said nothing for {QUIET_S:g} s: it was killed, hangs "
                    "or is cut off"
                )

    def _end(self, why: str) -> None:
        """End the process now: the main thread may be in a collective that never ends."""
        if self._over.is_set() or self._failed:
            return
        tidying = threading.Thread(target=self._tidied, daemon=True)
        tidying.start()
        tidying.join(_MOST_TIDYING_S)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            print(f"error: {why}; this host ends, too", file=sys.stderr, flush=True)
        if self._hosts.is_first:
            time.sleep(2 * _LOOK_S)  # the others see the cause here
        os._exit(_EXIT_FAILED)

    def _tidied(self) -> None:
        with contextlib.suppress(Exception):
            self.tidy()


class _Laps:
    """Seconds between looks, of which a process that was stopped itself counts few."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def next_s(self) -> float:
        """Since the last call."""
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, _MOST_PER_LOOK_S)


_watch: HostWatch | None = None


def join(
    hosts: Hosts, environment: Mapping[str, str], local_device_ids: Sequence[int] | None
) -> None:
    """Join the other hosts; returns when all are there. Nothing is done for a single host.

    Args:
      hosts: of the run.
      environment: variables of this process.
      local_device_ids: GPUs of this host; None: there are none. Left to itself JAX takes one where
        it finds SLURM or Open MPI.

    Raises:
      UserError: the address is not to be used, or the others do not come.
    """
    global _watch
    if hosts.num_hosts == 1:
        return
    import jax

    listen = bind_address(hosts, environment) if hosts.is_first else None
    # It would take SIGTERM for itself, for which runs have an answer of their own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=hosts.coordinator,
            num_processes=hosts.num_hosts,
            process_id=hosts.host_index,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=listen,
            heartbeat_timeout_seconds=_SERVICE_QUIET_S,
        )
    except RuntimeError as error:
        raise UserError(
            f"{hosts.describe()}: they have not come together: {error}. Is the first one's port "
            "free, and can the others reach it?"
        ) from error
    try:
        _watch = HostWatch(hosts, jax_internals.service_client())
    except UserError:
        time.sleep(_TOLD_S)  # the first host's end is the service's, and all are to see it
        raise
    atexit.register(_watch.leave)  # before JAX's own end, since what comes last goes first
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end_with(error)

    sys.excepthook = tell


def watch() -> HostWatch | None:
    """That of this process; None for a single host."""
    return _watch


def agree(what: str, value: str, *, advice: str = "") -> None:
    """`HostWatch.agree`, where there are several hosts."""
    if _watch is not None:
        _watch.agree(what, value, advice=advice)


def agree_on(values: Mapping[str, str], *, advice: str = "") -> None:
    """`HostWatch.agree_on`, where there are several hosts."""
    if _watch is not None:
        _watch.agree_on(values, advice=advice)


def end_with(cause: BaseException | str, exit_code: int = _EXIT_FAILED) -> None:
    """Where there are several hosts: tell the others the cause, and end the process.

    At once, without the ways out of Python and JAX: those wait for the other hosts.
    """
    if _watch is None:
        return
    if type(cause).__name__ == "JaxRuntimeError":
        # A collective fails where another host is gone: if so, the watch ends this one with that.
        time.sleep(QUIET_S + 2 * _LOOK_S)
    _watch.fail(cause)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _short(text: str) -> str:
    return text if len(text) < 300 else f"{text[:300]}..."
