"""The flags of the plan command."""

from __future__ import annotations

import argparse

from slidedp_jax.command_parser import CommandParser
from slidedp_jax.models.config import config_names
from slidedp_jax.planner.disk import EXPORT_BYTES
from slidedp_jax.planner.hardware import COMPUTE_DTYPES
from slidedp_jax.planner.optimizers import OPTIMIZERS
from slidedp_jax.planner.presets import PRESETS
from slidedp_jax.planner.strategy import GRADIENT_ROUTES, WEIGHT_ROUTES

COUNTS = {
    "layers_per_chunk": "layers that travel and are updated together",
    "rows_per_microbatch": "rows that one GPU computes at once",
    "prefetch_depth": "chunks whose upload runs ahead; tried are 1 and 2",
    "loss_chunk_tokens": "tokens whose logits exist at once",
    "num_host_devices": "CPU devices over which the state is sharded, a multiple of the GPUs",
    "block_size": "elements that the host update handles at once",
}
"""Flags of what may be decided already."""


def parse(arguments: list[str], prog: str) -> argparse.Namespace:
    """Read the words of the command.

    Args:
      arguments: the words.
      prog: what the command is called, for help and messages.

    Raises:
      SystemExit: the help was printed, or an error.
    """
    return _parser(prog).parse_whole(arguments)


def _parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Predict memory, disk and step time of a fine-tuning run and pick its "
        "strategy, without the hardware.",
        epilog="Exit code 0: it fits; 1: it does not; 2: the command is wrong.",
    )
    job = parser.add_argument_group("job")
    add_job(job)
    _add_completion(job)
    _add_machine(parser.add_argument_group("machine"))
    fixed = parser.add_argument_group("decided already (default: the planner's choice)")
    fixed.add_argument(
        "--weight_route",
        choices=WEIGHT_ROUTES,
        help="every GPU pulls all weights, or each a part that they then gather",
    )
    fixed.add_argument(
        "--gradient_route",
        choices=GRADIENT_ROUTES,
        help="the GPUs sum gradients, or the host does",
    )
    for name, text in COUNTS.items():
        fixed.add_argument(f"--{name}", type=int, metavar="N", help=text)
    fixed.add_argument(
        "--keep_activations",
        action=argparse.BooleanOptionalAction,
        help="keep results of as many layer chunks as fit instead of recomputing them; by default "
        "on devices with memory of their own",
    )
    fixed.add_argument(
        "--resident_state",
        action=argparse.BooleanOptionalAction,
        help="let the training state of the lowest chunks stay on the devices where that pays or "
        "the host has no room; by default on devices with memory of their own",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text, also where nothing fits"
    )
    return parser


def add_job(job: argparse._ArgumentGroup) -> None:
    """The flags that say what is to be trained and how."""
    model = job.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model_name_or_path",
        "--model_config",
        metavar="DIR",
        help="model folder or its config.json (no weights are read), or the name of a known model",
    )
    model.add_argument(
        "--preset",
        metavar="NAME",
        help="shapes of a known model, also as the hub spells it (Qwen/Qwen3-8B): "
        f"{', '.join(config_names())}",
    )
    job.add_argument("--tokens_per_step", type=int, required=True, help="over all devices")
    job.add_argument(
        "--seq_length", "--max_seq_length", type=int, default=4096, help="tokens of a row (4096)"
    )
    job.add_argument(
        "--document_length", type=int, help="tokens of the documents packed into rows; default: one"
    )
    job.add_argument(
        "--max_grad_norm", type=float, default=1.0, help="0 switches clipping off (1.0)"
    )
    job.add_argument(
        "--compute_dtype",
        "--dtype",
        choices=COMPUTE_DTYPES,
        default="bfloat16",
        help="of forward and backward (bfloat16)",
    )
    state = job.add_mutually_exclusive_group()
    state.add_argument("--optim", choices=OPTIMIZERS, help="as in training (adamw)")
    state.add_argument(
        "--optimizer_state_bytes",
        type=float,
        metavar="BYTES",
        help="optimizer state per parameter in place of --optim: 8 for two moments in fp32 "
        "(AdamW), 4 for one (Lion, SGD with momentum) or for two in bf16",
    )
    job.add_argument(
        "--freeze",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="names that are not trained, as in training: no gradient, no state, no update",
    )
    job.add_argument(
        "--ema_decay", type=float, help="keep a moving average: 4 bytes per trained parameter more"
    )
    job.add_argument("--save_total_limit", type=int, default=2, help="checkpoints kept (2)")
    job.add_argument(
        "--export_dtype", choices=tuple(EXPORT_BYTES), default="bfloat16", help="(bfloat16)"
    )


def _add_completion(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--total_tokens", type=int, help="tokens of the whole job, for hours and cost")
    job.add_argument(
        "--price_per_device_hour", type=float, help="with --total_tokens, in any currency"
    )


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    which = machine.add_mutually_exclusive_group(required=True)
    which.add_argument("--hardware", metavar="NAME", help=f"one of {', '.join(sorted(PRESETS))}")
    which.add_argument(
        "--hardware_profile",
        metavar="FILE",
        help="a machine that `slidedp measure` has measured; auto: the one measured here",
    )
    machine.add_argument(
        "--num_devices", type=int, help="GPUs of one host (1, or as many as were measured)"
    )
    machine.add_argument("--num_hosts", type=int, default=1, help="such hosts (1)")
    machine.add_argument(
        "--network_gb_per_s",
        type=float,
        help="1e9 bytes per second that collectives bring into each of several hosts: about 40 for "
        "one adapter of 400 Gb/s, 10 for 100; default: 40",
    )
    machine.add_argument(
        "--host_cores", type=int, help="cores for the job; default: the usual share of the hardware"
    )
    machine.add_argument(
        "--host_memory_gib",
        help="memory of the host, or 'here' for what this machine and its control groups leave; "
        "default: the usual share of the hardware",
    )
    machine.add_argument(
        "--link_gb_per_s",
        type=float,
        help="1e9 bytes per second between host and each GPU, each way: about 12 for PCIe 3 x16, "
        "25 for PCIe 4, 50 for PCIe 5; default: the hardware's",
    )
    machine.add_argument(
        "--device_memory_gib", type=float, help="memory of each GPU; default: the hardware's"
    )
    machine.add_argument(
        "--device_memory_budget_gib", type=float, help="of that, what may be used; default: all"
    )
    machine.add_argument(
        "--host_memory_budget_gib", type=float, help="of the host's, what may be used; default: all"
    )
