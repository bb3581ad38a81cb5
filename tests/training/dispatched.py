"""What a process dispatches: every program, the thread that does it, and the collectives in it."""

import math
import re
import threading
from dataclasses import dataclass

import numpy as np
from jax._src import compiler, pjit
from jax._src.interpreters import pxla
from jax._src.lib.mlir import ir

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective as a program states it, before a backend makes its own of it.

    Attributes:
      kind: its name.
      num_bytes: on one device, of the array before a scatter or exchange, or after a gather.
      groups: devices of each group that does it by itself.
    """

    kind: str
    num_bytes: int
    groups: tuple[tuple[int, ...], ...]

    def into_each_host(self, per_host: int) -> float:
        """Bytes that come from other hosts, on the host that gets the most of them.

        Gathers, reductions and scatters go round a ring of the group's devices, host by host; of an
        all-to-all every device gets a part from every other one.
        """
        hosts = {device // per_host for group in self.groups for device in group}
        return max(
            sum(self._into(host, group, per_host) for group in self.groups) for host in hosts
        )

    def _into(self, host: int, group: tuple[int, ...], per_host: int) -> float:
        here = sum(device // per_host == host for device in group)
        size, elsewhere = len(group), len(group) - here
        if not here or not elsewhere:
            return 0.0
        if self.kind == "all-to-all":
            return here * elsewhere * self.num_bytes / size
        assert self.kind in ("all-gather", "reduce-scatter", "all-reduce"), self.kind
        ways = 2 if self.kind == "all-reduce" else 1
        return ways * self.num_bytes * (size - 1) / size


class Dispatched:
    """Takes note of all programs that this process compiles and dispatches from now on.

    Attributes:
      calls: (thread, kinds of collectives that XLA has made, collectives stated), as issued.
    """

    def __init__(self):
        self.calls: list[tuple[str, frozenset[str], tuple[Collective, ...]]] = []
        self._compiled = {}
        compile_and_load, execute = (
            compiler.backend_compile_and_load,
            pxla.ExecuteReplicated.__call__,
        )

        def compiling(backend, module, *arguments, **named):
            stated = tuple(stated_collectives(module))
            program = compile_and_load(backend, module, *arguments, **named)
            text = "".join(own.to_string() for own in program.hlo_modules())
            kinds = frozenset(kind for kind in KINDS if re.search(rf" {kind}(-start)?\(", text))
            self._compiled[id(program)] = kinds, stated, program  # kept: its id stays its own
            return program

        def executing(own, *arguments):
            kinds, stated, _ = self._compiled[id(own.xla_executable)]
            self.calls.append((threading.current_thread().name, kinds, stated))
            return execute(own, *arguments)

        compiler.backend_compile_and_load = compiling
        pxla.ExecuteReplicated.__call__ = executing
        # Calls that do not come by Python would not be seen.
        pjit._get_fastpath_data = lambda *_, **__: None
        pxla.MeshExecutable.create_cpp_call = lambda *_, **__: None

    def of_threads(self) -> dict[str, list[str]]:
        """Thread -> kinds of collectives in its programs; `none` of those without."""
        found: dict[str, set[str]] = {}
        for thread, kinds, _ in list(self.calls):
            found.setdefault(thread, set()).update(kinds or {"none"})
        return {thread: sorted(kinds) for thread, kinds in found.items()}

    def into_each_host(self, first_call: int, per_host: int) -> list[float]:
        """Bytes that each collective since a call brings into a host."""
        return [
            collective.into_each_host(per_host)
            for _, _, stated in self.calls[first_call:]
            for collective in stated
        ]


def stated_collectives(module) -> list[Collective]:
    """Those of a program before it is compiled, a StableHLO module."""
    found = []

    def look(operation):
        kind = operation.name.removeprefix("stablehlo.").replace("_", "-")
        if kind in KINDS:
            groups = np.array(operation.attributes["replica_groups"])
            arrays = operation.results if kind == "all-gather" else operation.operands
            num_bytes = sum(map(_num_bytes, arrays))
            found.append(Collective(kind, num_bytes, tuple(map(tuple, groups.tolist()))))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look, ir.WalkOrder.PRE_ORDER)
    return found


def _num_bytes(value) -> int:
    bits = int(re.sub(r"\D", "", str(value.type.element_type)))
    return math.prod(value.type.shape) * bits // 8
