"""A training command that kills itself, or whose disk fails or hangs, at one of its system calls.

    python scripts/check/killed_run.py FAULT CALL NUMBER SETTINGS...

`checkpoint_faults.py` starts it. FAULT is `kill` (SIGKILL), `hang`, `clock` (the time of day jumps
at every look) or `none`; CALL names what is counted, from the first step on, or from the start
(`preadv`).
"""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

CALLS: dict[str, tuple[Any, str]] = {
    "pwrite": (os, "pwrite"),
    "fsync": (os, "fsync"),
    "ftruncate": (os, "ftruncate"),
    "rename": (pathlib.Path, "rename"),
    "replace": (os, "replace"),
    "rmtree": (shutil, "rmtree"),
    "mkdir": (pathlib.Path, "mkdir"),
    "preadv": (os, "preadv"),
}
"""Calls of saves, renames, retention and (`preadv`) restores."""


def break_call(fault: str, name: str, number: int) -> None:
    """Let the `number`-th call from now on be the last one that works."""
    owner, attribute = CALLS[name]
    real: Callable[..., Any] = getattr(owner, attribute)
    left, lock = [number], threading.Lock()

    def broken(*arguments: Any, **options: Any) -> Any:
        with lock:
            left[0] -= 1
            now = left[0] < 0
        if now and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if now:
            time.sleep(3600)
        return real(*arguments, **options)

    setattr(owner, attribute, broken)


def break_clock() -> None:
    """The time of day is any within a year of the real one, at every look."""
    chance, real = random.Random(0), time.time
    time.time = lambda: real() + chance.uniform(-3e7, 3e7)


def main() -> int:
    """Run the command; returns its exit code."""
    fault, call, number, *settings = sys.argv[1:]
    from slidedp_jax.train import main as train
    from slidedp_jax.trainer import Trainer

    if fault == "clock":
        break_clock()
    elif fault != "none":
        if call == "preadv":
            break_call(fault, call, int(number))
        else:
            real: Callable[..., Any] = Trainer.step
            begun: list[bool] = []

            def step(self: Trainer, *arguments: Any, **options: Any) -> Any:
                if not begun:
                    begun.append(True)
                    break_call(fault, call, int(number))
                return real(self, *arguments, **options)

            # By name, since mypy forbids to assign to a method.
            setattr(Trainer, "step", step)  # noqa: B010
    return train(settings)


if __name__ == "__main__":
    sys.exit(main())
