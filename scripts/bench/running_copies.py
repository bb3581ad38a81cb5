"""Copies that another process makes while something is measured, and measuring beside them.

    with copier(folder) as about:           # starts this file as a process of its own
        ... Exchange(folder).rates(step, ...)  # in any process that is given the folder

They go to and from the GPU where there is one, else from memory to memory.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HOPELESS_S = 2.0
"""A step that takes longer is timed only twice."""


def timed(step: Callable[[], None], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


class Exchange:
    """Files through which a measuring process switches the copies on and off and counts them.

    `mode` holds "off", "up" or "both"; `bytes` two counters, up and down.
    """

    def __init__(self, folder: pathlib.Path):
        import numpy as np

        self._mode = folder / "mode"
        self._bytes = np.memmap(folder / "bytes", np.uint64, "r", shape=(2,))
        self._modes = (folder / "modes").read_text().split()

    def rates(
        self, step: Callable[[], None], elements: int, bytes_per_element: int, repeats: int
    ) -> dict[str, Any]:
        """Times of `step` alone, then beside each kind of copies, with the copies' own rates."""
        rates: dict[str, Any] = {"elements": elements, "bytes_per_element": bytes_per_element}
        rates["seconds"] = timed(step, 2)
        if rates["seconds"][-1] > HOPELESS_S:
            return {**rates, "note": "too slow for more runs"}
        rates["seconds"] = timed(step, repeats)
        for mode in self._modes:
            self._mode.write_text(mode)
            time.sleep(0.3)
            before, start = self._bytes.copy(), time.perf_counter()
            seconds = timed(step, repeats)
            took = time.perf_counter() - start
            moved = [float(count) / took / 1e9 for count in self._bytes - before]
            self._mode.write_text("off")
            rates[f"beside_{mode}"] = {"seconds": seconds, "copied_gb_per_s": moved}
        return rates


@contextlib.contextmanager
def copier(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A process that copies when told; yields what it copies."""
    (folder / "mode").write_text("off")
    (folder / "modes").write_text("")
    (folder / "bytes").write_bytes(bytes(16))
    environment = dict(os.environ)
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield json.loads(line) if line else {"error": "the copying process did not start"}
    finally:
        (folder / "mode").write_text("quit")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if process.poll() is None:
            process.kill()


def copy_until_told(folder: pathlib.Path) -> None:
    import threading

    import numpy as np

    counters = np.memmap(folder / "bytes", np.uint64, "r+", shape=(2,))
    num_bytes = 1 << 26
    copies: list[Callable[[], None]]
    try:
        copies = gpu_copies(num_bytes)
        about = {"kind": "GPU", "bytes": num_bytes, "modes": ["up", "both"]}
    except Exception as error:  # no GPU, no page-locking: memory to memory still loads the DRAM
        copies = [memory_copy(num_bytes)]
        about = {"kind": "memory to memory, one thread", "bytes": num_bytes, "modes": ["up"]}
        about["no_gpu"] = f"{type(error).__name__}: {error}"[:200]
    mode = folder / "mode"
    (folder / "modes").write_text(" ".join(about["modes"]))
    print(json.dumps(about), flush=True)

    def work(index: int) -> None:
        wanted = ("up", "both") if index == 0 else ("both",)
        while (now := mode.read_text()) != "quit":
            if now in wanted:
                copies[index]()
                counters[index] += np.uint64(num_bytes)
            else:
                time.sleep(0.02)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(copies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gpu_copies(num_bytes: int) -> list[Callable[[], None]]:
    """[host to GPU from a page-locked slab, GPU to pinned memory], each one copy and its wait."""
    import mmap

    if not glob.glob("/dev/nvidia[0-9]*"):
        raise RuntimeError("no GPU")
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from slidedp_jax.jax_internals import page_lock

    gpu = jax.devices()[0]
    if gpu.platform == "cpu":
        raise RuntimeError("JAX sees no GPU")
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, np.uint16)
    slab[:] = 1
    page_lock(gpu, slab.ctypes.data, num_bytes)
    pinned = SingleDeviceSharding(gpu, memory_kind="pinned_host")
    resident = jax.block_until_ready(jax.device_put(slab, gpu))

    def up() -> None:
        jax.device_put(slab, gpu).block_until_ready()

    def down() -> None:
        jax.device_put(resident, pinned).block_until_ready()

    for copy in (up, down):
        copy()
    return [up, down]


def memory_copy(num_bytes: int) -> Callable[[], None]:
    import numpy as np

    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


if __name__ == "__main__":
    copy_until_told(pathlib.Path(sys.argv[1]))
