"""`configure()`: once, early, and what it fixes. Each case needs a process of its own."""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import jax
import optax
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax import UserError, jax_internals, process
from slidedp_jax.compilation_cache import cache_folder
from slidedp_jax.process import current_setup

ROOT = pathlib.Path(__file__).parents[1]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NPROC")
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def failure(code: str) -> str:
    """The last line of the error of a process that must fail."""
    result = run(code)
    assert result.returncode != 0, result.stdout
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param("import jax; jax.devices()", marks=pytest.mark.thorough),
        "import jax.numpy as jnp; jnp.zeros(1)",
        pytest.param("from flax import nnx; nnx.Rngs(0)", marks=pytest.mark.thorough),
    ],
)
def test_too_late_is_an_error_that_says_what_to_move(use):
    message = failure(
        f"{use}\nimport slidedp_jax\nslidedp_jax.configure(platform='cpu', num_devices=2)"
    )
    assert message.startswith("RuntimeError: JAX's backends have already started")
    assert "CPU devices" in message
    assert "XLA flags" in message
    assert "Call slidedp_jax.configure() before the first use of JAX" in message
    assert "move it above nnx.Rngs(...), jnp arrays and jax.devices()" in message


@pytest.mark.thorough
@pytest.mark.parametrize("modules", ["jax", "optax, flax.linen, flax.nnx"])
def test_importing_before_is_fine(modules):
    result = run(
        f"import {modules}, jax, slidedp_jax\n"
        "slidedp_jax.configure(platform='cpu', num_devices=2, num_host_devices=2)\n"
        "print(len(jax.devices()))"
    )
    assert result.stdout.strip() == "4", result.stderr


def test_twice_the_same_is_fine_and_another_time_different_is_not():
    message = failure(
        "import slidedp_jax\n"
        "first = slidedp_jax.configure(platform='cpu', num_devices=2, num_host_devices=2)\n"
        "import jax; jax.devices()\n"
        "again = slidedp_jax.configure(platform='cpu', num_devices=2, num_host_devices=2)\n"
        "assert again is first\n"
        "slidedp_jax.configure(platform='cpu', num_devices=4, num_host_devices=4)"
    )
    assert message.startswith(
        "RuntimeError: configure() already fixed num_devices=2, num_host_devices=2 in this "
        "process; now it is asked for num_devices=4, num_host_devices=4."
    )
    assert message.endswith("call configure() once, or with equal arguments")


AGAIN = """
import sys
import slidedp_jax
first = slidedp_jax.configure({before})
assert slidedp_jax.configure({before}) is first
try:
    print(slidedp_jax.configure({after}) is first)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [
        ("device_memory_fraction", 0.92, 0.5),
        ("pinned_limit_gib", 20, 30),
        ("compilation_cache", None, "there"),
    ],
)
def test_another_value_of_any_setting_is_named(setting, before, after, tmp_path):
    if after == "there":
        after = str(tmp_path / after)
    values = [f"platform='cpu', {setting}={value!r}" for value in (before, after)]
    message = run(AGAIN.format(before=values[0], after=values[1])).stdout.strip()
    assert message.startswith(
        f"configure() already fixed {setting}={before!r} in this process; now it is asked for "
        f"{setting}={after!r}. JAX reads these once"
    )


@pytest.mark.thorough
def test_arguments_that_mean_the_same_are_the_same():
    """The default number of devices, and the cache that there is none of on CPUs."""
    same = run(
        AGAIN.format(
            before="platform='cpu'",
            after="platform='auto', compilation_cache=None, num_devices=None",
        ),
        JAX_PLATFORMS="cpu",
    )
    assert same.stdout.strip() == "True", same.stderr


def test_a_trainer_without_configure_names_it():
    message = failure(
        "import optax\n"
        "from slidedp_jax.models import decoder\n"
        "from slidedp_jax.models.config import named_config\n"
        "from slidedp_jax.planner.strategy import Strategy\n"
        "from slidedp_jax import Trainer\n"
        "plan = Strategy(layers_per_chunk=1, rows_per_microbatch=1, num_microbatches=1)\n"
        "Trainer(decoder.build(named_config('tiny')), optax.adamw(1e-3), strategy=plan)"
    )
    assert message.startswith("RuntimeError: slidedp_jax.configure() has not been called")


DESCRIBE = """
import json, os
import slidedp_jax
setup = slidedp_jax.configure(platform='cpu', {arguments})
compute, host = setup.devices()
print(json.dumps([[d.id for d in compute], [d.id for d in host], [d.platform for d in compute],
                  os.environ.get('XLA_FLAGS', '')]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "num_compute", "num_host"),
    [
        ("num_devices=2, num_host_devices=4", 2, 4),
        ("num_devices=3, num_host_devices=4", 3, 6),  # up to a multiple
        ("num_devices=8", 8, 8),
        ("num_host_devices=1", 1, 1),
    ],
)
def test_compute_and_host_devices_are_disjoint(arguments, num_compute, num_host):
    result = run(DESCRIBE.format(arguments=arguments))
    assert result.returncode == 0, result.stderr
    compute, host, platforms, _ = json.loads(result.stdout)
    assert (len(compute), len(host)) == (num_compute, num_host)
    assert set(platforms) == {"cpu"}
    assert not {*compute} & {*host}
    assert len({*compute}) == num_compute
    assert len({*host}) == num_host


def test_flags_of_the_user_are_kept():
    flags = "--xla_cpu_enable_fast_math=false --xla_backend_extra_options=xla_cpu_one,xla_cpu_two"
    result = run(DESCRIBE.format(arguments="num_devices=1, num_host_devices=1"), XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    after = json.loads(result.stdout)[3]
    for option in ("--xla_cpu_enable_fast_math=false", "xla_cpu_one", "xla_cpu_two"):
        assert option in after
    assert after.count("--xla_backend_extra_options=") == 1  # the last one wins in XLA


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ("", "0"),
        pytest.param(
            "--xla_gpu_autotune_level=3 --xla_gpu_force_compilation_parallelism=1",
            "3",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_beside_gpus_no_stopwatch_chooses_kernels(given, level):
    """Unless the user wants it; XLA ends the process where it does not know a flag."""
    code = (
        "import os\nfrom slidedp_jax import process\n"
        "process._set_environment(process.ProcessSetup(platform='cuda', num_devices=1,\n"
        "    device_ids=None, num_host_devices=1, device_memory_fraction=0.9,\n"
        "    pinned_limit_gib=8, compilation_cache=None, profiled=True))\n"
        "import jax\njax.config.update('jax_platforms', 'cpu')\njax.devices()\n"
        "print(os.environ['XLA_FLAGS'])"
    )
    result = run(code, XLA_FLAGS=given)
    assert result.returncode == 0, result.stderr
    flags = result.stdout.split()
    assert [f for f in flags if "autotune_level" in f] == [f"--xla_gpu_autotune_level={level}"]
    assert {"--xla_gpu_enable_triton_gemm=false", "--xla_gpu_enable_command_buffer="} <= set(flags)
    assert set(given.split()) <= set(flags)


def test_graphs_that_are_asked_for_rule_out_a_profile(monkeypatch):
    """The process could not use its GPUs any more once jax.profiler has stopped."""
    setup = process.ProcessSetup(
        platform="cuda",
        num_devices=1,
        device_ids=None,
        num_host_devices=1,
        device_memory_fraction=0.9,
        pinned_limit_gib=8,
        compilation_cache=None,
        profiled=True,
    )
    for name in (jax_internals.GPU_MEMORY_FRACTION, jax_internals.PINNED_LIMIT_GIB):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(process, "_map_large_allocations", lambda: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    with pytest.raises(ValueError, match="command_buffer=FUSION, and steps are to be profiled"):
        process._set_environment(setup)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    process._set_environment(setup)


REFUSED = [
    ("platform='tpu'", "ValueError: platform='tpu'; allowed: 'auto', 'cpu', 'cuda'"),
    ("platform='cpu', num_devices=0", "ValueError: num_devices=0; at least 1 is needed"),
    (
        "platform='cpu', device_ids=(0, 1)",
        "ValueError: device_ids names GPUs, but the platform is cpu; use num_devices",
    ),
    (
        "platform='cpu', device_memory_fraction=1.5",
        "ValueError: device_memory_fraction=1.5; a share of GPU memory above 0, at most 1",
    ),
    (
        "platform='cpu', pinned_limit_gib=0",
        "ValueError: pinned_limit_gib=0; at least 1 is needed",
    ),
    (
        "device_ids=(1, 1)",
        "ValueError: device_ids=(1, 1); name each GPU once, by its index from 0 among the "
        "visible ones",
    ),
    (
        "num_devices=3, device_ids=(0, 1)",
        "ValueError: num_devices=3 and device_ids=(0, 1) disagree; give one of them",
    ),
]
EACH = """
import slidedp_jax
for arguments in {refused!r}:
    try:
        eval(f"slidedp_jax.configure({{arguments}})")
    except ValueError as error:
        print(f"ValueError: {{error}}")
"""


def test_arguments_that_contradict_are_refused():
    """In one process, in which the first of them that was taken would fix all."""
    refused, messages = zip(*REFUSED, strict=True)
    done = run(EACH.format(refused=refused))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*messages]


def test_the_named_devices_are_taken_and_no_others(monkeypatch):
    """Four devices of this process stand for the GPUs that JAX lists."""
    cpus = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda *backend: cpus if backend else cpus[:4])
    setup = replace(current_setup(), platform="cuda", num_devices=2, device_ids=(1, 3))
    compute, host = setup.devices()
    assert compute == [cpus[1], cpus[3]] == setup.own_devices()
    assert len(host) == setup.num_host_devices
    for asked in ({"device_ids": (1, 4), "num_devices": 2}, {"device_ids": None, "num_devices": 8}):
        with pytest.raises(RuntimeError, match=r"not enough GPUs \(4 visible\)"):
            replace(setup, **asked).devices()


def test_device_counts_that_do_not_fit_the_process_are_refused():
    """In this process: eight compute and eight host devices."""

    def build(num_devices, **changes):
        plan = strategy(**changes)
        with trainer(small_config(layers=1), optax.sgd(1.0), plan, num_devices=num_devices):
            pass

    with pytest.raises(UserError, match=r"num_devices=9.*8 compute devices"):
        build(9)
    with pytest.raises(UserError, match="num_devices=0"):
        build(0)
    with pytest.raises(UserError, match=r"8 host devices.*multiple of its 3 compute devices"):
        build(3, num_host_devices=8)
    with pytest.raises(UserError, match="over 16 host devices; this process has 8"):
        build(8, num_host_devices=16)


def test_compiled_programs_are_kept_in_the_users_cache_on_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = pathlib.Path(cache_folder("auto", "cuda"))
    assert folder.parent == tmp_path / "slidedp_jax" and folder.name.startswith("compiled-")
    assert cache_folder("auto", "cpu") is None
    assert cache_folder(str(tmp_path / "here"), "cpu") == str(tmp_path / "here")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file cannot be used"):
        cache_folder(str(tmp_path / "file"), "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder("auto", "cuda") is None
    assert cache_folder(None, "cuda") is None
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    assert cache_folder("auto", "cuda") is None


@pytest.mark.thorough
def test_a_named_folder_keeps_programs_for_the_next_process(tmp_path):
    code = (
        "import slidedp_jax, jax\n"
        f"slidedp_jax.configure(platform='cpu', compilation_cache={str(tmp_path)!r})\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "from jax._src import monitoring\n"
        "events = []\n"
        "monitoring.register_event_listener(lambda name, **_: events.append(name))\n"
        "jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64)))\n"
        "print(sum('cache_hits' in name for name in events))"
    )
    first, second = (run(code) for _ in range(2))
    assert int(first.stdout) == 0, first.stderr
    assert int(second.stdout) > 0, second.stderr
