"""Tokenising in several processes, which know nothing of the caller's script or its devices.

Each is a Python process of its own that takes blocks on its standard input and gives what came of
them on its output, so that it works the same from a script without a main guard, from a notebook
and beside a runtime with threads, which must not be forked. It ends when its input does, whatever
becomes of the caller.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, final

from slidedp_jax.data.encode_block import BlockEncoder
from slidedp_jax.data.examples import Part
from slidedp_jax.data.records import Block
from slidedp_jax.data.report import Tally
from slidedp_jax.errors import UserError

_AHEAD = 2
"""Blocks for each process that may be done or under way before they are asked for."""

_SERVE = "from slidedp_jax.data.workers import serve; serve()"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals to the whole group of processes are the caller's to answer."""


def encoded_in_processes(
    work: BlockEncoder, blocks: Iterator[Block], num_proc: int
) -> Iterator[tuple[Block, Part, Tally]]:
    """What `work` makes of the blocks, in their order.

    Args:
      work: what to do.
      blocks: to be read; they are looked at only as far as there is work under way.
      num_proc: processes.

    Raises:
      UserError: as `work` does, for the first block in order; or a process was ended.
    """
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(num_proc))
        for _ in range(num_proc):
            process = _Process(work)
            stack.callback(process.end)
            idle.put(process)

        def encode(block: Block) -> tuple[Part, Tally]:
            process = idle.get()
            try:
                return process.encode(block)
            finally:
                idle.put(process)

        pending: deque[tuple[Block, Future[tuple[Part, Tally]]]] = deque()
        while True:
            for block in islice(blocks, _AHEAD * num_proc - len(pending)):
                pending.append((block, threads.submit(encode, block)))
            if not pending:
                return
            block, future = pending.popleft()
            yield block, *future.result()


@final
class _Process:
    """One process, and the pipes to it."""

    def __init__(self, work: BlockEncoder):
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TOKENIZERS_PARALLELISM": "false",  # each process has a core
            },
        )
        self._work: BlockEncoder | None = work  # sent with the first block

    def encode(self, block: Block) -> tuple[Part, Tally]:
        """Send a block and wait for what came of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        work, self._work = self._work, None
        try:
            for message in (work, block) if work is not None else (block,):
                pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            kind, result = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise UserError(
                f"a process that tokenised {block.path} ended {how}; the machine may be short of "
                "memory: use fewer processes (num_proc; dataset_num_proc of the command)"
            ) from error
        if kind == "refused":
            raise result
        if kind == "failed":
            raise RuntimeError(f"tokenising {block.path} failed in another process:\n{result}")
        part, tally = result
        return part, tally

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not taken is lost
                pipe.close()


def serve() -> None:
    """What a process does: take the work, then blocks, until there are no more."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    taken, given = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not stand between results
    with contextlib.suppress(EOFError, BrokenPipeError):
        work: BlockEncoder = pickle.load(taken)
        while True:
            pickle.dump(_answer(work, pickle.load(taken)), given, pickle.HIGHEST_PROTOCOL)
            given.flush()


def _answer(work: BlockEncoder, block: Block) -> tuple[str, Any]:
    try:
        return "done", work.encode(block)
    except UserError as error:
        return "refused", error
    except Exception:  # any: the caller is to see it
        return "failed", traceback.format_exc()
