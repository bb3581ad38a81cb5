"""The kernels of an optimised XLA program and the bytes they touch, read off its text.

Bytes count every operand and result once; a slice of a large operand counts as the whole, so a
number is an upper bound. Bodies of loops are listed apart, once, whatever their trip count.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "s16": 2, "u16": 2, "f8e4m3fn": 1}
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^(\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_FREE = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "opt-barrier"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One instruction that runs.

    Attributes:
      name: its name in the program.
      kind: opcode, with the target of a custom call or the hero operations of a fusion.
      result: type of the result.
      bytes: of operands and results.
      computation: the computation it stands in.
      source: JAX's name of the operation.
    """

    name: str
    kind: str
    result: str
    bytes: int
    computation: str
    source: str


def array_bytes(text: str) -> int:
    """Bytes of all array types in a piece of HLO text."""
    return sum(
        _BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _ARRAY.findall(text)
    )


def kernels(text: str) -> list[Kernel]:
    """Kernels of the entry computation and of the loops' bodies, in order."""
    computations = _computations(text)
    entry = next(name for name, (_, is_entry) in computations.items() if is_entry)
    bodies = re.findall(r"\bbody=%?([\w.\-]+)", text)
    found: list[Kernel] = []
    for name in dict.fromkeys([entry, *bodies]):
        found.extend(_kernels_of(name, computations))
    return found


def report(title: str, text: str, *, floor_bytes: int = 1 << 20) -> str:
    """A table of the kernels that touch at least `floor_bytes`, and totals."""
    every = kernels(text)
    memory = sum(kernel.bytes for kernel in every if not _is_product(kernel))
    lines = [
        f"# {title}: {len(every)} kernels, {sum(map(_is_product, every))} of them products or "
        f"attention; the others touch {memory / 2**30:.2f} GiB (loops counted once)",
    ]
    for kernel in every:
        if kernel.bytes >= floor_bytes:
            mark = "  " if _is_product(kernel) else "* "
            lines.append(
                f"{mark}{kernel.bytes / 2**20:9.1f} MiB  {kernel.kind:60.60}  "
                f"{kernel.result:70.70}  {kernel.source[-90:]}  "
                f"[{kernel.computation[:24]}] {kernel.name}"
            )
    return "\n".join(lines)


def _is_product(kernel: Kernel) -> bool:
    return any(word in kernel.kind for word in ("gemm", "cublas", "cudnn", "dot", "fmha"))


def _computations(text: str) -> dict[str, tuple[list[str], bool]]:
    result: dict[str, tuple[list[str], bool]] = {}
    name = None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header.group(2)
            result[name] = ([], header.group(1) is not None)
        elif line.startswith("}"):
            name = None
        elif name is not None:
            result[name][0].append(line)
    return result


def _kernels_of(name: str, computations: dict[str, tuple[list[str], bool]]) -> list[Kernel]:
    sizes: dict[str, int] = {}
    found = []
    for line in computations[name][0]:
        parts = _LINE.match(line)
        match = _OPCODE.match(parts.group(2)) if parts else None
        if not parts or not match:
            continue
        result, opcode, rest = match.groups()
        sizes[parts.group(1)] = array_bytes(result)
        if opcode in _FREE or opcode.endswith("-done") or opcode == "while":
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
        source = re.search(r'op_name="([^"]*)"', rest)
        found.append(
            Kernel(
                name=parts.group(1),
                kind=_kind(opcode, rest, computations),
                result=re.sub(r"\{[^}]*\}", "", result),
                bytes=sizes[parts.group(1)] + sum(sizes.get(operand, 0) for operand in operands),
                computation=name,
                source=source.group(1) if source else "",
            )
        )
    return found


def _kind(opcode: str, rest: str, computations: dict[str, tuple[list[str], bool]]) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    if target:
        return f"{opcode} {target.group(1)}"
    called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", rest)
    if opcode != "fusion" or not called or called.group(1) not in computations:
        return opcode
    flavour = re.search(r'"kind":"([^"]+)"', rest)
    counts: dict[str, int] = {}
    for line in computations[called.group(1)][0]:
        parts = _LINE.match(line)
        match = _OPCODE.match(parts.group(2)) if parts else None
        if match and match.group(2) in {"reduce", "transpose", "dot", "scatter", "concatenate"}:
            counts[match.group(2)] = counts.get(match.group(2), 0) + 1
    heroes = " ".join(f"{name}x{count}" for name, count in counts.items()) or "elementwise"
    return f"fusion {called.group(1)[:28]} {heroes} {flavour.group(1) if flavour else ''}"
