"""Every test process: CPU only, eight compute devices beside eight that hold the state."""

import importlib.metadata
import os

import slidedp_jax

# The programs are tiny and run once or twice, so compiling them is most of the work, which each of
# several test processes does on one core. Processes that tests start inherit this.
flags = [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jax").startswith("0.10."):  # later versions do not know it
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)
slidedp_jax.configure(platform="cpu", num_devices=8, num_host_devices=8)

import gc
import pathlib

import hypothesis
import jax
import pytest
import shared_programs
from second_points import SECOND_POINTS

# An example that takes long says that the machine is busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a sixth of the time of lowering


MOST_MAPPINGS = 40_000
"""Every compiled program maps some memory; a process that reaches the kernel's limit of 65,530
mappings crashes while it compiles. No file adds 10,000."""

shared_programs.share()
# Tracing leaves much that is garbage at once and little that is old.
gc.freeze()
gc.set_threshold(200_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs_in_time():
    """Let go of programs that other files compiled before there are too many."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        shared_programs.forget()
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """pytest has looked at what garbage was left; it would look again, which takes seconds."""
    gc.freeze()


@pytest.fixture
def traced_cudnn(monkeypatch):
    """JAX traces cuDNN's attention though there is no cuDNN; nothing can be compiled."""
    fused = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{fused}.check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(f"{fused}.check_compute_capability", lambda _: True)


LONGEST_FILES = (
    "test_against_plain_optax.py",
    "test_generate.py",
    "test_rounded_weights.py",
    "test_resume.py",
    "test_repository.py",
    "test_smollm2.py",
    "test_update_policies.py",
    "test_fences.py",
    "test_state_at_rest.py",
    "test_script.py",
    "test_random_walks.py",
    "test_strategy_is_obeyed.py",
    "test_optimizers.py",
    "test_resident_state.py",
    "test_freezing.py",
    "test_faults.py",
    "test_residency.py",
    "test_evaluation.py",
    "test_looking_inside.py",
    "test_long_update.py",
    "test_many_layers.py",
    "test_stacked_layers.py",
    "test_expert_training.py",
)
"""They begin first, so that no worker is left alone with one of them at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile" or config.getoption("--thorough"):
        return None  # every point of one folder takes longer than all others together
    from workers import ByPrograms

    return ByPrograms(config, log)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run every point of every matrix")


def pytest_collection_modifyitems(config, items):
    """Leave out what only --thorough runs; longest files first, the others keep their order."""
    for item in items:
        if item.nodeid.startswith(SECOND_POINTS):
            item.add_marker(pytest.mark.thorough)
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]

    def place(item):
        name = item.path.name
        return LONGEST_FILES.index(name) if name in LONGEST_FILES else len(LONGEST_FILES)

    items.sort(key=place)
