"""What a refusal names fits, and nothing nearer does: the command is asked with its flags."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp_jax.models.config import named_config
from slidedp_jax.planner.candidates import Choices
from slidedp_jax.planner.command import main
from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.fitting import sort_by_fit
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.request import Request
from slidedp_jax.planner.search import fastest
from slidedp_jax.planner.workload import BatchShape, Workload

JOBS = {
    "long row": "--preset qwen3-8b --hardware h200 --tokens_per_step 262144 --seq_length 262144 "
    "--device_memory_gib 24 --host_memory_gib 160",
    "many rows": "--preset qwen3-8b --hardware rtx4090 --tokens_per_step 2097152 "
    "--host_memory_gib 500",
    "small host": "--preset qwen3-8b --hardware rtx4090 --tokens_per_step 16384 "
    "--seq_length 2048 --host_memory_gib 96",
    "budgets": "--preset qwen3-4b --hardware h200 --tokens_per_step 32768 "
    "--device_memory_budget_gib 4",
    "packed": "--preset qwen3-4b --hardware h200 --tokens_per_step 131072 --seq_length 65536 "
    "--document_length 60000 --device_memory_gib 8",
    "72b": "--preset qwen2.5-72b --hardware rtx4090 --num_devices 4 --tokens_per_step 32768",
    "host budget": "--preset qwen3-0.6b --hardware h200 --tokens_per_step 8192 "
    "--host_memory_gib 12 --host_memory_budget_gib 11 --device_memory_gib 6",
    "device budget": "--preset qwen3-0.6b --hardware rtx4090 --tokens_per_step 4194304 "
    "--host_memory_gib 500 --device_memory_budget_gib 9",
    "rows at once": "--preset qwen3-8b --hardware rtx4090 --tokens_per_step 65536 "
    "--rows_per_microbatch 16",
    "host devices": "--preset qwen3-8b --hardware rtx4090 --tokens_per_step 65536 "
    "--num_host_devices 3",
}
WAYS = {
    "long row": {"--seq_length", "--device_memory_gib"},
    "many rows": {"--tokens_per_step", "--seq_length", "--device_memory_gib", "--num_devices"},
    "small host": {"--optim", "--host_memory_gib", "--device_memory_gib", "--num_devices"},
    "budgets": {"--device_memory_budget_gib"},
    "packed": {"--seq_length", "--device_memory_gib"},
    "72b": {"--optim", "--host_memory_gib", "--device_memory_gib"},
    "host budget": {"--host_memory_gib"},
    "device budget": {"--device_memory_gib"},
    "rows at once": {"--device_memory_gib"},
    "host devices": {"--host_memory_gib"},
}
QUICK = ("long row", "budgets", "host budget")


def asked(capsys, words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def nearer(flags):
    """A value that asks for a little less than what fits, or None where that is not a number."""
    name, value = flags[0], flags[1]
    if len(flags) == 4 and flags[2].endswith("_budget_gib"):
        return [name, str(int(value) - 1), flags[2], str(int(float(flags[3])) - 1)]
    if name in ("--host_memory_gib", "--device_memory_gib"):
        return [name, str(int(value) - 1)]
    if name.endswith("_budget_gib"):
        return [name, str(int(value) - 1)]
    if name == "--seq_length":
        rows = int(flags[3]) // int(value)
        longer = int(value) + 256
        rest = [name, str(longer), "--tokens_per_step", str(rows * longer)]
        return [*rest, "--document_length", str(longer)] if "--document_length" in flags else rest
    return None


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=() if job in QUICK else pytest.mark.thorough) for job in JOBS],
)
def test_each_way_out_fits_and_hardly_more_does_not(job, capsys):
    words = JOBS[job].split()
    code, refused = asked(capsys, words)
    assert code == 1
    named = set()
    for way in refused["ways_out"]:
        if "fits" not in way:
            continue
        flags = re.findall(r"(--\w+) (\S+?)(?=[ )]|$)", way)
        flags = [word for flag in flags for word in flag]
        assert asked(capsys, [*words, *flags])[0] == 0, way
        named.add(flags[0])
        if (less := nearer(flags)) is not None:
            assert asked(capsys, [*words, *less])[0] == 1, way
    assert named >= WAYS[job]


EIGHT_LAYERS = Workload.from_config(
    replace(named_config("qwen3-0.6b"), num_hidden_layers=8, layer_windows=())
)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 9),
    seq_length=st.sampled_from([512, 4096, 32768]),
    num_devices=st.integers(1, 2),
    device_gib=st.floats(2.5, 9),
    host_gib=st.floats(8, 20),
    choices=st.sampled_from([Choices(), Choices(layers_per_chunk=2), Choices(prefetch_depth=2)]),
)
def test_something_fits_if_one_of_the_leanest_does(
    rows, seq_length, num_devices, device_gib, host_gib, choices
):
    hardware = named_hardware("h200", num_devices=num_devices)
    request = Request(
        job=Job(
            workload=EIGHT_LAYERS,
            batch=BatchShape(num_rows=rows, seq_length=seq_length),
            hardware=hardware,
            optimizer_state_bytes=8,
            device_budget_bytes=device_gib * GIB,
            host_budget_bytes=host_gib * GIB,
        ),
        choices=choices,
        update_policy="deferred",
        compute_dtype="bfloat16",
        keep_activations=False,
        resident_state=True,
    )
    fitting, _ = sort_by_fit(request.job, request.families(), False, True)
    assert request.fits() == bool(fitting)
    if not fitting:
        with pytest.raises(PlanError) as caught:
            fastest(request)
        needs = {limit.name: limit.need_bytes for limit in caught.value.limits}
        enough = request.other(
            device_bytes=needs.get("device memory"), host_bytes=needs.get("host memory")
        )
        assert fastest(enough)
