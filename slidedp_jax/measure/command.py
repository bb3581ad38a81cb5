"""Measure this machine for plans: `slidedp measure`.

Times copies, collectives, the host update, products, attention, a layer, the head and Python's own
part, and writes a profile that `slidedp train`, `slidedp plan` and scripts plan with
(`--hardware_profile`). Nothing else should run meanwhile. Takes about a minute on a GPU machine.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slidedp_jax
from slidedp_jax.command_parser import WRONG_COMMAND, CommandParser
from slidedp_jax.planner.hardware import HardwareProfile, size_text
from slidedp_jax.planner.machine_profile import FORMAT, Machine, hardware_record, profiles_folder
from slidedp_jax.whole_files import write_whole
from slidedp_jax.wording import say_error

if TYPE_CHECKING:
    from slidedp_jax.measure.stopwatch import Stopwatch

DEFAULT_BUDGET_S = 85.0


def main(argv: Sequence[str] | None = None, *, prog: str = "slidedp measure") -> int:
    """Run the command; returns its exit code: 0: measured, 1: failed, 2: wrong command."""
    args = _parser(prog).parse_whole(sys.argv[1:] if argv is None else list(argv))
    try:
        ids = None if args.devices is None else tuple(map(int, args.devices.split(",")))
        setup = slidedp_jax.configure(
            platform=args.platform,
            num_devices=args.num_devices if ids is None else None,
            device_ids=ids,
            compilation_cache=None if args.platform == "cpu" else "auto",
            num_hosts=1,
        )
        devices, _ = setup.devices()
    except (ValueError, RuntimeError) as error:
        say_error(error)
        return WRONG_COMMAND
    from slidedp_jax.machine_here import machine_here
    from slidedp_jax.measure.stopwatch import Stopwatch

    machine = machine_here(devices)
    path = Path(args.out).expanduser() if args.out else profiles_folder() / machine.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
        watch = Stopwatch(args.budget_s, say)
        record = measured(watch, machine)
        write_whole(path, json.dumps(record, indent=1))
    except OSError as error:
        say_error(error)
        return 1
    if args.json:
        print(json.dumps(record, indent=1))
        return 0
    print("\n".join(summary(record)))
    print(f"\n{watch.elapsed_s:.0f} s; written to {path}")
    print("plan with it: slidedp train ... --hardware_profile auto, or the path")
    return 0


def _parser(prog: str) -> CommandParser:
    assert __doc__ is not None
    parser = CommandParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--out", metavar="FILE", help="where to write; default: a file of this machine's own in "
        f"{profiles_folder()}, which --hardware_profile auto reads",
    )  # fmt: skip
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--num_devices", type=int, help="compute devices; all by default")
    parser.add_argument("--devices", help="GPU indices, such as 1,3")
    parser.add_argument(
        "--budget_s",
        type=float,
        default=DEFAULT_BUDGET_S,
        help=f"seconds after which nothing more is begun ({DEFAULT_BUDGET_S:.0f})",
    )
    parser.add_argument("--json", action="store_true", help="print the file, and nothing else")
    return parser


def measured(watch: Stopwatch, machine: Machine) -> dict[str, Any]:
    """Measure everything there is time for; the content of the file."""
    import jax.numpy as jnp

    from slidedp_jax.machine_here import more_facts, peer_access
    from slidedp_jax.measure import dispatch, host, links
    from slidedp_jax.measure.compute import Compute
    from slidedp_jax.measure.to_profile import to_profile
    from slidedp_jax.process import current_setup
    from slidedp_jax.this_machine import this_machine

    setup = current_setup()
    devices, host_devices = setup.devices()
    base = this_machine()
    compute = Compute(watch, devices)
    few, many = compute.shapes.rows
    attempt = watch.attempt
    attempt("links", links.measure_links, watch, devices, needs_s=2)
    attempt("uploads", dispatch.measure_uploads, watch, devices, needs_s=1)
    attempt("host", host.measure_host, watch, devices, host_devices, needs_s=5)
    attempt("collectives", links.measure_collectives, watch, devices, needs_s=4)
    attempt("elementwise", compute.elementwise, needs_s=1)
    attempt("attention", compute.attention, needs_s=3)
    attempt("layer", compute.layer, jnp.bfloat16, many, needs_s=8)
    if base.unified_memory:
        attempt("layer in float32", compute.layer, jnp.float32, many, needs_s=5)
    attempt("small trainings", dispatch.measure_steps, watch, devices, needs_s=15)
    attempt("products", compute.products, needs_s=4)
    attempt("layer of fewer rows", compute.layer, jnp.bfloat16, few, needs_s=8)
    attempt("head", compute.head, jnp.bfloat16, needs_s=8)
    attempt("device to device", links.measure_peer_copies, watch, devices, needs_s=2)
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    hardware, assumed = to_profile(
        watch,
        base,
        num_host_devices=setup.num_host_devices,
        provenance=f"measured by `slidedp measure` on {now[:10]}",
    )
    return {
        "format": FORMAT,
        "slidedp_jax": slidedp_jax.__version__,
        "date": now,
        "elapsed_s": watch.elapsed_s,
        "machine": asdict(machine),
        "peer_access": peer_access(len(devices)),
        "hardware": hardware_record(hardware),
        "assumed": assumed,
        "not_measured": watch.left_out,
        "preset": hardware_record(base),
        "facts": more_facts(devices),
        "samples": [one.record() for one in watch.measured],
    }


def summary(record: dict[str, Any]) -> list[str]:
    """What plans will use, beside what they assumed before."""
    from slidedp_jax.planner.machine_profile import hardware_recorded

    hardware = hardware_recorded(record["hardware"])
    preset = hardware_recorded(record["preset"])
    lines = ["", f"  {'':<34}{'measured':>16}{'preset':>16}"]
    for text, value in _LINES:
        lines.append(f"  {text:<34}{value(hardware):>16}{value(preset):>16}")
    own, host = size_text(hardware.device_memory_bytes), size_text(hardware.host_memory_bytes)
    lines.append(
        f"memory of each device {own}, of the host {host}, {hardware.num_host_cores} cores"
    )
    nodes = record["machine"]["numa_nodes"]
    if len(nodes) > 1:
        lines.append(f"NUMA nodes: {', '.join(f'{node} {cores}' for node, cores in nodes.items())}")
    if record["peer_access"] is not None:
        lines.append(f"peer access between the GPUs: {'yes' if record['peer_access'] else 'no'}")
    lines += [f"not measured: {name} ({why})" for name, why in record["not_measured"].items()]
    lines.append(f"assumed as before: {', '.join(sorted(record['assumed']))}")
    return lines


def _rate(name: str, scale: float, unit: str) -> Any:
    return lambda hardware: f"{getattr(hardware, name) / scale:.4g} {unit}"


def _last(name: str) -> Any:
    return lambda hardware: f"{getattr(hardware, name).points[-1][1] / 1e9:.1f} GB/s"


def _first(name: str) -> Any:
    def text(hardware: HardwareProfile) -> str:
        size, rate = getattr(hardware, name).points[0]
        return f"{rate / 1e9:.1f} at {size / 2**20:.0f} Mi"

    return text


_LINES = (
    ("products in layers, bf16", _rate("bf16_matmul_flops_per_s", 1e12, "TFLOP/s")),
    ("products, fp32", _rate("fp32_matmul_flops_per_s", 1e12, "TFLOP/s")),
    ("attention", _rate("attention_flops_per_s", 1e12, "TFLOP/s")),
    ("memory of a device", _rate("device_memory_bytes_per_s", 1e9, "GB/s")),
    ("host to device", _last("h2d")),
    ("  small copies", _first("h2d")),
    ("device to host", _last("d2h")),
    ("  small copies", _first("d2h")),
    ("both ways together", _rate("duplex_bytes_per_s", 1e9, "GB/s")),
    ("gathered into each device", _rate("gather_bytes_per_s", 1e9, "GB/s")),
    ("host update, AdamW", _rate("host_update_params_per_s", 1e9, "Gparam/s")),
    ("host memory", _rate("host_memory_bytes_per_s", 1e9, "GB/s")),
    ("gap between pieces", _rate("copy_gap_s", 1e-6, "us")),
    ("Python per visit of a chunk", _rate("visit_dispatch_s", 1e-3, "ms")),
    ("Python per piece", _rate("upload_call_s", 1e-6, "us")),
    ("end of a step", _rate("step_end_s", 1e-3, "ms")),
)


if __name__ == "__main__":
    sys.exit(main())
