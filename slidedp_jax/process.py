"""Process set-up: what JAX reads once, before its first use.

Platforms, the number of CPU devices, XLA flags and the limit of pinned host memory are fixed when
JAX's backends start; set later, XLA flags are ignored without a word. So `configure()` comes first.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from slidedp_jax import host_watch, jax_internals
from slidedp_jax.compilation_cache import AUTO, cache_folder
from slidedp_jax.hosts import SINGLE, Hosts, resolve_hosts
from slidedp_jax.planner.candidates import default_num_host_devices
from slidedp_jax.planner.process_limits import DEVICE_MEMORY_FRACTION, pinned_pool_limit_gib
from slidedp_jax.visible_gpus import VARIABLE, num_gpus, num_visible

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    import jax

Platform = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class ProcessSetup:
    """What `configure()` fixed for this process.

    Attributes:
      platform: where the model computes, "cpu" or "cuda".
      num_devices: compute devices of this host; None means every visible GPU.
      device_ids: which GPUs, by index among the visible ones; None means the first `num_devices`.
      num_host_devices: CPU devices over which this host's state is sharded; a multiple of those.
      device_memory_fraction: share of GPU memory that JAX takes at its start.
      pinned_limit_gib: limit of JAX's pool of page-locked host memory in GiB; CPUs have none.
      compilation_cache: folder of compiled programs; None: JAX's own setting.
      hosts: those that train together, each with as many devices.
      profiled: whether GPUs can be gone on with when jax.profiler has stopped.
    """

    platform: str
    num_devices: int | None
    device_ids: tuple[int, ...] | None
    num_host_devices: int
    device_memory_fraction: float
    pinned_limit_gib: int
    compilation_cache: str | None
    hosts: Hosts = SINGLE
    profiled: bool = False

    def devices(self) -> tuple[list[jax.Device], list[jax.Device]]:
        """Compute devices and host devices, two disjoint lists; starts JAX's backends.

        Of several hosts, the compute devices of all, host by host, and this one's host devices.

        Raises:
          RuntimeError: fewer devices are there than were asked for.
        """
        import jax

        if self.platform == "cpu":
            count = self.num_devices or 1
            of_hosts = _by_host(jax.devices("cpu"), self.hosts)
            own = of_hosts[self.hosts.host_index]
            for cpus in of_hosts:
                _require(len(cpus) >= count + self.num_host_devices, "CPU devices", len(cpus))
            compute = [cpu for cpus in of_hosts for cpu in cpus[:count]]
            return compute, own[count : count + self.num_host_devices]
        gpus_of_hosts = _by_host(jax.devices(), self.hosts)
        own = gpus_of_hosts[self.hosts.host_index]
        wanted = self.device_ids or tuple(range(self.num_devices or len(own)))
        for gpus in gpus_of_hosts:
            _require(max(wanted) < len(gpus), f"GPUs ({len(gpus)} visible)", max(wanted) + 1)
        cpus = jax.local_devices(backend="cpu")
        _require(len(cpus) >= self.num_host_devices, "CPU devices", len(cpus))
        return [gpus[i] for gpus in gpus_of_hosts for i in wanted], cpus[: self.num_host_devices]

    def own_devices(self) -> list[jax.Device]:
        """The compute devices of this host."""
        devices, _ = self.devices()
        return [device for device in devices if device.process_index == self.hosts.host_index]


def _by_host(devices: Sequence[jax.Device], hosts: Hosts) -> list[list[jax.Device]]:
    """Devices of each host, in JAX's order."""
    return [
        [device for device in devices if device.process_index == host]
        for host in range(hosts.num_hosts)
    ]


def _require(condition: bool, what: str, got: int) -> None:
    if not condition:
        raise RuntimeError(
            f"not enough {what}: {got}. slidedp_jax.configure() must run before JAX's first use "
            "and ask for no more devices than the machine has."
        )


_asked: ProcessSetup | None = None
_setup: ProcessSetup | None = None
"""As `_asked`, but what the environment says of memory comes first."""


def configure(
    *,
    platform: Platform = "auto",
    num_devices: int | None = None,
    device_ids: tuple[int, ...] | None = None,
    num_host_devices: int | None = None,
    device_memory_fraction: float = DEVICE_MEMORY_FRACTION,
    pinned_limit_gib: int | None = None,
    compilation_cache: str | None = AUTO,
    num_hosts: int | None = None,
    host_index: int | None = None,
    coordinator: str | None = None,
    profiled: bool = False,
) -> ProcessSetup:
    """Fix platforms, CPU devices, XLA flags and memory limits; the first line of a script.

    Args:
      platform: "cuda", "cpu", or "auto": CUDA where JAX's CUDA plugin and a GPU are present, and
        `CUDA_VISIBLE_DEVICES` leaves one.
      num_devices: compute devices to use; None means every visible GPU, or one CPU device.
      device_ids: indices of the GPUs to use (`--devices 1,3`); excludes `num_devices`.
      num_host_devices: CPU devices that hold and update the state; None leaves a core per GPU
        to copies and dispatch. Rounded up to a multiple of the devices.
      device_memory_fraction: share of GPU memory that JAX reserves at its start; the environment
        (`jax_internals.GPU_MEMORY_FRACTION`) comes first.
      pinned_limit_gib: limit of JAX's pool of page-locked memory (waiting gradients), in GiB; None:
        most of the RAM. The environment (`jax_internals.PINNED_LIMIT_GIB`) comes first.
      compilation_cache: folder where compiled programs are kept for the next run; None leaves JAX's
        setting, "auto" is a folder in the user's cache on GPUs (`slidedp_jax.compilation_cache`).
      num_hosts: hosts that train together, one process each; 1 means this one alone. None: as the
        environment or a launcher says (`slidedp_jax.hosts`). With several, this waits for all.
      host_index: which one this is, from 0; None: likewise.
      coordinator: `address:port` where they meet, a private address of the first; None: likewise.
      profiled: jax.profiler will look at GPUs and be stopped before the work is done; then no CUDA
        graphs are made, since the process cannot use the GPUs any more otherwise.

    Returns:
      The set-up; a second call with the same arguments returns it again.

    Raises:
      UserError: the hosts are not clear, do not come together, or differ in devices or versions.
      RuntimeError: JAX's backends have already started, or an earlier call fixed something else.
      ValueError: arguments that contradict each other.
    """
    global _asked, _setup
    if device_ids is not None:
        if num_devices is not None and num_devices != len(device_ids):
            raise ValueError(
                f"num_devices={num_devices} and device_ids={device_ids} disagree; give one of them"
            )
        if len(set(device_ids)) < len(device_ids) or any(number < 0 for number in device_ids):
            raise ValueError(
                f"device_ids={device_ids}; name each GPU once, by its index from 0 among the "
                "visible ones"
            )
        num_devices = len(device_ids)
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; at least 1 is needed")
    if not 0 < device_memory_fraction <= 1:
        raise ValueError(
            f"device_memory_fraction={device_memory_fraction}; a share of GPU memory above 0, at "
            "most 1"
        )
    if pinned_limit_gib is not None and pinned_limit_gib < 1:
        raise ValueError(f"pinned_limit_gib={pinned_limit_gib}; at least 1 is needed")
    resolved = _resolve_platform(platform)
    if resolved == "cpu" and device_ids is not None:
        raise ValueError("device_ids names GPUs, but the platform is cpu; use num_devices")
    group = num_devices or _visible_gpus(resolved)
    host = num_host_devices or _default_host_devices(resolved, group)
    host = -(-host // group) * group
    wanted = ProcessSetup(
        platform=resolved,
        num_devices=num_devices,
        device_ids=device_ids,
        num_host_devices=host,
        device_memory_fraction=device_memory_fraction,
        pinned_limit_gib=pinned_limit_gib or pinned_pool_limit_gib(_physical_memory_bytes()),
        compilation_cache=cache_folder(compilation_cache, resolved),
        hosts=resolve_hosts(
            os.environ, num_hosts=num_hosts, host_index=host_index, coordinator=coordinator
        ),
        profiled=profiled and resolved == "cuda",
    )
    if _setup is not None and _asked is not None:
        _check_same(_asked, wanted)
        return _setup
    _check_not_started()
    setup = _set_environment(wanted)
    import jax

    jax.config.update("jax_platforms", "cuda,cpu" if resolved == "cuda" else "cpu")
    jax.config.update("jax_num_cpu_devices", host + (group if resolved == "cpu" else 0))
    if setup.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", setup.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _join_hosts(setup, group)
    _asked, _setup = wanted, setup
    return setup


def _join_hosts(setup: ProcessSetup, num_devices: int) -> None:
    """With several hosts: wait for all, and see whether they are alike."""
    if setup.hosts.num_hosts == 1:
        return
    visible = None if setup.platform == "cpu" else num_visible()
    ids = None if visible is None else range(visible)
    host_watch.join(setup.hosts, os.environ, ids)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    found = [*versions, setup.platform, f"{num_devices} compute devices"]
    host_watch.agree(
        "software and devices",
        ", ".join([*found, f"{setup.num_host_devices} host devices"]),
        advice="All hosts need the same versions and as many devices; --num_host_devices states "
        "the CPU devices of each",
    )
    _LOG.info("%s", setup.hosts.describe())


def _check_same(before: ProcessSetup, wanted: ProcessSetup) -> None:
    """A second call must ask for what the first one did."""
    was, now = asdict(before), asdict(wanted)
    changed = [name for name in was if getattr(before, name) != getattr(wanted, name)]
    if changed:
        fixed, asked = (", ".join(f"{name}={of[name]!r}" for name in changed) for of in (was, now))
        raise RuntimeError(
            f"configure() already fixed {fixed} in this process; now it is asked for {asked}. JAX "
            "reads these once, at its start: call configure() once, or with equal arguments"
        )


def current_setup() -> ProcessSetup:
    """The set-up of this process.

    Raises:
      RuntimeError: `configure()` was not called.
    """
    if _setup is None:
        raise RuntimeError(
            "slidedp_jax.configure() has not been called. Make it the first line of the script, "
            "before anything that uses JAX (nnx.Rngs, jnp arrays, jax.devices)."
        )
    return _setup


def _check_not_started() -> None:
    if jax_internals.backends_have_started():
        raise RuntimeError(
            "JAX's backends have already started, so platforms, CPU devices and XLA flags can no "
            "longer be set. Call slidedp_jax.configure() before the first use of JAX: move it "
            "above nnx.Rngs(...), jnp arrays and jax.devices()."
        )


def _set_environment(wanted: ProcessSetup) -> ProcessSetup:
    """Set what JAX reads; returns what then holds."""
    if jax_internals.gains_from_multi_output_fusion(jax_internals.jax_version()):
        jax_internals.add_backend_option(jax_internals.MULTI_OUTPUT_FUSION)
    if wanted.platform == "cpu":
        # Fewer threads than participants of a collective can deadlock on small machines.
        os.environ.setdefault(jax_internals.NUM_CPU_THREADS, "32")
        return wanted
    _map_large_allocations()
    jax_internals.add_xla_flags(jax_internals.CHOOSE_WITHOUT_TIMING)
    if wanted.profiled:
        jax_internals.add_xla_flags(jax_internals.WITHOUT_GRAPHS)
        if wrong := jax_internals.graph_flags():
            raise ValueError(
                f"XLA_FLAGS has {wrong[0]}, and steps are to be profiled: with CUDA graphs the "
                "process cannot use the GPUs any more once jax.profiler has stopped. Leave the "
                "flag out, or the profile"
            )
    fraction = jax_internals.set_gpu_memory_fraction(wanted.device_memory_fraction)
    limit_gib = jax_internals.set_pinned_limit_gib(wanted.pinned_limit_gib)
    return replace(wanted, device_memory_fraction=fraction, pinned_limit_gib=limit_gib)


def _map_large_allocations() -> None:
    """Give every allocation of a mebibyte or more pages of its own, so that it can be page-locked.

    The C library otherwise raises this threshold as memory is freed, and neighbouring arrays then
    share pages, which cannot be registered twice.
    """
    libc = ctypes.CDLL(None)
    threshold_parameter = -3  # M_MMAP_THRESHOLD of malloc.h
    if hasattr(libc, "mallopt"):
        libc.mallopt(threshold_parameter, 1 << 20)


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_PLUGIN = (
    "in the clone, pip install -e '.[cuda13]' (NVIDIA driver 580 or newer) or '.[cuda12]' (525 or "
    "newer)"
)


def _resolve_platform(platform: Platform) -> str:
    if platform not in ("auto", "cpu", "cuda"):
        raise ValueError(f"platform={platform!r}; allowed: 'auto', 'cpu', 'cuda'")
    plugin = jax_internals.has_cuda_plugin()
    if platform == "cuda" and not plugin:
        raise RuntimeError(f"platform='cuda' needs JAX's CUDA plugin: {_PLUGIN}")
    if platform == "cuda" and num_visible() == 0:
        raise RuntimeError(
            f"platform='cuda', but {VARIABLE}={os.environ.get(VARIABLE)!r} leaves no GPU: CUDA "
            "heeds entries up to the first that is no GPU's index or UUID, and none where one "
            "occurs twice. Unset it, or name GPUs that there are"
        )
    if platform != "auto":
        return platform
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return "cpu"
    gpus = num_gpus() and num_visible()
    if gpus and not plugin:
        _LOG.warning(
            "there are %d NVIDIA GPUs, but JAX's CUDA plugin is not installed, so the CPU "
            "computes: %s (platform='cpu' says that this is meant)",
            num_visible(),
            _PLUGIN,
        )
    return "cuda" if plugin and gpus else "cpu"


def _visible_gpus(platform: str) -> int:
    """Compute devices where no number is given."""
    return 1 if platform == "cpu" else num_visible() or 1


def _default_host_devices(platform: str, group: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if platform == "cpu":
        return max(group, cores // group * group)
    return default_num_host_devices(cores, group)
