"""What is wrong with a request, whatever fits."""

from __future__ import annotations

from slidedp_jax.planner.candidates import Choices, default_block_size, pieces_of_state
from slidedp_jax.planner.chunking import LARGEST_PIECE, chunk_stages
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.hardware import COMPUTE_DTYPES, HardwareProfile, size_text
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.strategy import UPDATE_POLICIES


def check_request(
    job: Job, choices: Choices, update_policy: str, compute_dtype: str, resident_state: bool
) -> None:
    """Reports everything that is wrong with the request at once.

    Raises:
      PlanError: something is.
    """
    batch, hardware = job.batch, job.hardware
    problems = []
    for name, budget, size in (
        ("the device memory budget", job.device_budget_bytes, hardware.device_memory_bytes),
        ("the host memory budget", job.host_budget_bytes, hardware.host_memory_bytes),
    ):
        if not 0 < budget <= size:
            problems.append(
                f"{name} is {size_text(budget)}; a run on {hardware.name} has {size_text(size)}, "
                "use more than 0 and at most that"
            )
    if resident_state and choices.gradient_route == "host_sum":
        problems.append(
            "gradient_route is 'host_sum', but state that stays on the devices is updated from "
            "gradients that they sum; use reduce_scatter, or no resident_state"
        )
    if update_policy not in UPDATE_POLICIES:
        problems.append(f"update_policy is {update_policy!r}; allowed: {UPDATE_POLICIES}")
    if compute_dtype not in COMPUTE_DTYPES:
        problems.append(f"compute_dtype is {compute_dtype!r}; allowed: {COMPUTE_DTYPES}")
    for name in Choices.__dataclass_fields__:
        value = getattr(choices, name)
        if isinstance(value, int) and value < 1:
            problems.append(f"{name} is {value}; it must be at least 1")
    if choices.loss_chunk_tokens is not None and job.workload.own_loss_tokens is not None:
        problems.append(
            f"loss_chunk_tokens is {choices.loss_chunk_tokens}, but how many tokens' logits exist "
            f"at once is decided by the loss of {job.workload.name} itself; leave it out"
        )
    layers, wanted = len(job.workload.layers), choices.layers_per_chunk
    if wanted is not None and wanted > layers:
        problems.append(f"layers_per_chunk is {wanted}; the model has {layers} layers")
    rows = choices.rows_per_microbatch
    per_device = -(-batch.num_rows // hardware.total_devices)
    if rows is not None and rows > per_device:
        problems.append(
            f"rows_per_microbatch is {rows}, but the {batch.num_rows} rows of a step give each of "
            f"{hardware.total_devices} devices {per_device}; use at most that, or more rows"
        )
    pieces = choices.num_host_devices
    if pieces is not None and pieces % hardware.num_devices:
        problems.append(
            f"num_host_devices is {pieces}; it must be a multiple of the {hardware.num_devices} "
            "compute devices"
        )
    problems += _routes_of_one_host(hardware, choices)
    problems = problems or _too_large_pieces(job, choices)
    if problems:
        raise PlanError("; ".join(problems) + ".")


def may_be_asked(request: Request) -> bool:
    """Whether nothing is wrong with it, as another than the one that was checked already."""
    try:
        check_request(
            request.job, request.choices, request.update_policy, request.compute_dtype, False
        )
    except PlanError:
        return False
    return True


def _routes_of_one_host(hardware: HardwareProfile, choices: Choices) -> list[str]:
    """Routes that are wanted and that several hosts cannot take."""
    if hardware.num_hosts == 1:
        return []
    only = {"weight_route": "shard_all_gather", "gradient_route": "reduce_scatter"}
    return [
        f"{name} is {getattr(choices, name)}; each of {hardware.num_hosts} hosts has a share of "
        f"the state alone, so it is {route}"
        for name, route in only.items()
        if getattr(choices, name) not in (None, route)
    ]


def _too_large_pieces(job: Job, choices: Choices) -> list[str]:
    """What is wrong where even the smallest chunks cannot be updated."""
    pieces = pieces_of_state(job.hardware, choices) * job.hardware.num_hosts
    layers = choices.layers_per_chunk or 1
    block_size = choices.block_size or default_block_size(job.workload, pieces)
    chunks = chunk_stages(job.workload, layers, block_size, pieces)
    if pieces < 1 or chunks.fit_pieces(pieces):
        return []
    largest = max(chunk.padded_parameters for chunk in chunks.all)
    return [
        f"with layers_per_chunk {layers} a chunk has {largest:,} parameters on {pieces} host "
        f"devices; each can update at most {LARGEST_PIECE:,}. Use fewer layers per chunk or more "
        "num_host_devices"
    ]
