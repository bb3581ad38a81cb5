"""What plans count on is what `configure()` gives."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slidedp_jax import UserError, configure
from slidedp_jax.planner.hardware import GIB
from slidedp_jax.planner.presets import named_hardware
from slidedp_jax.planner.process_limits import (
    DEVICE_MEMORY_FRACTION,
    pinned_pool_limit_gib,
    usable_device_bytes,
)
from slidedp_jax.process import current_setup
from slidedp_jax.state import pinned_memory

ROOT = Path(__file__).parents[2]


def test_a_run_has_the_allocators_share_and_what_lies_beside_it():
    assert usable_device_bytes(100.0, 1.5) == pytest.approx(93.5)
    assert usable_device_bytes(100.0, 20.0) == 100.0
    h200 = named_hardware("h200")
    assert h200.device_memory_bytes == pytest.approx((0.92 * 139 + 1.5) * GIB)


def test_configure_takes_the_share_that_plans_count_on():
    default = inspect.signature(configure).parameters["device_memory_fraction"].default
    assert default == DEVICE_MEMORY_FRACTION


def test_the_limit_of_page_locked_memory_follows_the_host():
    assert [pinned_pool_limit_gib(gib * GIB) for gib in (4, 128, 1000)] == [8, 76, 600]
    assert named_hardware("h200").pinned_pool_limit_bytes == 76 * GIB
    assert named_hardware("h200", num_devices=4).pinned_pool_limit_bytes == 307 * GIB
    stated = replace(named_hardware("h200"), stated_pinned_limit_bytes=30 * GIB)
    assert stated.pinned_pool_limit_bytes == 30 * GIB


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "0.92 76 0.92 76"),
        (
            {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "30"},
            "0.5 30 0.5 30",
        ),
    ],
)
def test_a_process_beside_gpus_says_what_holds(environment, expected):
    """In a process of its own; the CPU stands in, and its backends are not started."""
    code = (
        "import os\nfrom slidedp_jax import process\n"
        "process._resolve_platform = lambda platform: 'cuda'\n"
        "process._physical_memory_bytes = lambda: 128 * 2**30\n"
        "setup = process.configure(num_devices=1, compilation_cache=None)\n"
        "assert process.configure(num_devices=1, compilation_cache=None) is setup\n"
        "print(setup.device_memory_fraction, setup.pinned_limit_gib,\n"
        "    os.environ['XLA_CLIENT_MEM_FRACTION'],\n"
        "    os.environ['XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB'])\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == expected, done.stderr


class OfGpu:
    platform = "gpu"


def test_gradients_that_exceed_the_limit_are_refused_before_anything_is_made(monkeypatch):
    setup = replace(current_setup(), pinned_limit_gib=8)
    monkeypatch.setattr(pinned_memory, "current_setup", lambda: setup)
    pinned_memory.check_pinned_limit([4 * GIB, 4 * GIB], OfGpu())
    with pytest.raises(UserError, match=r"8\.00 GiB.*allows 8 GiB: pass pinned_limit_gib=9 to"):
        pinned_memory.check_pinned_limit([4 * GIB, 4 * GIB + 1], OfGpu())
