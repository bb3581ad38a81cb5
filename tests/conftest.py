"""Every test process: CPU only, eight compute devices beside eight that hold the state."""

import importlib.metadata
import os

import slidedp_jax

# The programs are tiny and run once or twice, so compiling them is most of the work. Processes that
# tests start inherit this.
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jax").startswith("0.10."):  # later versions do not know it
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)
slidedp_jax.configure(platform="cpu", num_devices=8, num_host_devices=8)

import gc
import pathlib

import jax
import numpy as np
import pytest
from jax._src import cache_key, compiler

jax.config.update("jax_numpy_rank_promotion", "raise")


MOST_MAPPINGS = 20_000
"""Every compiled program maps some memory; a process that reaches the kernel's limit of 65,530
mappings crashes while it compiles."""

compiled = {}


def share_compiled_programs() -> None:
    """Compile equal programs for equal devices once per process.

    Every trainer traces and compiles programs of its own, and most tests make trainers whose
    programs are equal: compiling them anew takes five sixths of the time.
    """
    compile_and_load = compiler.backend_compile_and_load

    def compile_once(backend, module, devices, options, host_callbacks):
        devices_key = tuple(device.id for device in devices)
        key = devices_key, cache_key.get(module, np.array([*devices]), options, backend)
        if host_callbacks:
            return compile_and_load(backend, module, devices, options, host_callbacks)
        if key not in compiled:
            compiled[key] = compile_and_load(backend, module, devices, options, host_callbacks)
        return compiled[key]

    compiler.backend_compile_and_load = compile_once


share_compiled_programs()


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs_in_time():
    """Let go of programs that other files compiled before there are too many."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        compiled.clear()
        jax.clear_caches()
        gc.collect()


LONGEST_FILES = (
    "test_against_plain_optax.py",
    "test_update_policies.py",
    "test_fences.py",
    "test_generate.py",
    "test_resume.py",
    "test_optimizers.py",
    "test_resident_state.py",
    "test_freezing.py",
    "test_faults.py",
    "test_residency.py",
    "test_long_update.py",
    "test_schedule.py",
    "test_kept_chunks.py",
    "test_page.py",
    "test_search.py",
)
"""They begin first, so that no worker is left alone with one of them at the end."""


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run every point of every matrix")


def pytest_collection_modifyitems(config, items):
    """Leave out what only --thorough runs; longest files first, the others keep their order."""
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]

    def place(item):
        name = item.path.name
        return LONGEST_FILES.index(name) if name in LONGEST_FILES else len(LONGEST_FILES)

    items.sort(key=place)
