"""TensorBoard and Weights & Biases beside metrics.jsonl: asked for, and never in the way.

Each tool works on a thread of its own, so no step waits for a network or a disk. One that fails is
said once and left out; metrics.jsonl has everything in any case.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slidedp_jax.errors import UserError
from slidedp_jax.run.arguments import TrainArguments

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Tool -> the package that it needs, which the extra of the tool's name installs."""

CLOSE_S = 60.0
"""Most seconds that the end of a run waits for a tool."""

_NOT_FIGURES = frozenset({"step", "row_ids"})


class Tool(Protocol):
    """One of the tools, on its thread; any exception ends it."""

    def begin(self) -> None:
        """Make ready."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take figures by name, as `train/loss`."""

    def end(self, complete: bool) -> None:
        """Finish."""


def check_trackers(args: TrainArguments) -> None:
    """Whether the packages of what `report_to` names are there.

    Raises:
      UserError: one is not; it says how to get it, and how to do without.
    """
    for name in args.trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"report_to {name} needs the package {PACKAGES[name]}, which is not installed: "
                f"pip install {PACKAGES[name]}, or leave report_to out; metrics.jsonl has all "
                "figures, and `slidedp report` draws them"
            )


def make_tools(
    args: TrainArguments, *, first_step: int, starts: Sequence[Mapping[str, Any]]
) -> dict[str, Tool]:
    """What `report_to` names.

    Args:
      args: the run's settings.
      first_step: steps done before this start.
      starts: all starts of the run, of which the first tells it from all others.
    """
    root = pathlib.Path(args.output_dir)
    folder = root / "tensorboard" if args.logging_dir is None else pathlib.Path(args.logging_dir)
    made: dict[str, Tool] = {
        "tensorboard": TensorBoard(folder, first_step=first_step),
        "wandb": WeightsAndBiases(
            name=args.run_name or root.resolve().name,
            run_id=run_id(starts),
            settings=dataclasses.asdict(args),
        ),
    }
    return {name: made[name] for name in args.trackers}


def run_id(starts: Sequence[Mapping[str, Any]]) -> str:
    """A name for a run that is the same at each of its starts and no other run's."""
    text = json.dumps(starts[0], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by the names under which tools show them.

    `loss` -> `train/loss`, `eval_loss` -> `eval/loss`.
    """
    found = {}
    for name, value in record.items():
        if name in _NOT_FIGURES or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        shown = f"eval/{name.removeprefix('eval_')}" if "eval_" in name[:5] else f"train/{name}"
        found[shown] = float(value)
    return found


class Trackers:
    """Hands records on to tools.

    Args:
      tools: by name.
      say: prints a line.
      close_s: most seconds that `close` waits for each.
    """

    def __init__(
        self, tools: Mapping[str, Tool], say: Callable[[str], None], *, close_s: float = CLOSE_S
    ):
        self._say, self._close_s = say, close_s
        self._threads = {name: _ToolThread(name, tool) for name, tool in tools.items()}

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand on the record of a step or an evaluation; never fails and never waits."""
        shown = figures(record)
        for thread in self._threads.values():
            thread.put(record["step"], shown)
        self._say_failures()

    def close(self, *, complete: bool) -> None:
        """Let every tool finish.

        Args:
          complete: whether the run has reached its end.
        """
        for thread in self._threads.values():
            thread.finish(complete)
        deadline = time.monotonic() + self._close_s
        for name, thread in [*self._threads.items()]:
            if not thread.wait(max(0.0, deadline - time.monotonic())):
                self._say(
                    f"warning: {name} has not taken all figures within {self._close_s:g} s and is "
                    "left; metrics.jsonl has them"
                )
                del self._threads[name]
        self._say_failures()

    def _say_failures(self) -> None:
        for name, thread in [*self._threads.items()]:
            if thread.failure is not None:
                del self._threads[name]
                self._say(
                    f"warning: {name} failed ({thread.failure}); the run goes on without it, and "
                    "metrics.jsonl has all figures"
                )


class _ToolThread:
    """One tool, what it is still to take, and how it failed."""

    def __init__(self, name: str, tool: Tool):
        self.failure: str | None = None
        self._tool = tool
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, float]] | bool] = queue.SimpleQueue()
        # A daemon: a tool that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker_{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, shown: Mapping[str, float]) -> None:
        if self._thread.is_alive():
            self._queue.put((step, shown))

    def finish(self, complete: bool) -> None:
        self._queue.put(complete)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._tool.begin()
            while not isinstance(item := self._queue.get(), bool):
                self._tool.write(*item)
            self._tool.end(item)
        except Exception as error:  # whatever it is, training goes on
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]


class TensorBoard:
    """Event files, written through at every record.

    Args:
      folder: for them; every start of a run adds one.
      first_step: steps done before: what earlier files have of later ones is hidden.
    """

    def __init__(self, folder: pathlib.Path, *, first_step: int):
        self._folder, self._first_step = folder, first_step

    def begin(self) -> None:
        """Open a file."""
        # Not its SummaryWriter, on whose inner thread a failed write would never be known.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{os.getpid()}.{self._first_step}"
        self._writer = EventsWriter(str(self._folder / "events"), suffix)
        begun = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=self._first_step + 1, session_log=begun)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Append one event."""
        values = [self._summary.Value(tag=name, simple_value=v) for name, v in figures.items()]
        self._add(step=step, summary=self._summary(value=values))

    def end(self, complete: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))
        self._writer.flush()


class WeightsAndBiases:
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the like hold.

    Args:
      name: shown for it.
      run_id: the same at each start of a run, which it goes on with.
      settings: stored as its configuration.
    """

    def __init__(self, *, name: str, run_id: str, settings: Mapping[str, Any]):
        self._name, self._id, self._settings = name, run_id, settings

    def begin(self) -> None:
        """Start or go on with it.

        Raises:
          RuntimeError: nobody is logged in; wandb would ask, and the run would wait.
        """
        import wandb

        online = os.environ.get("WANDB_MODE", "online") == "online"
        if online and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in: wandb login, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "slidedp_jax"),
            id=self._id,
            name=self._name,
            resume="allow",
            config=dict(self._settings),
            settings=wandb.Settings(console="off"),
        )
        # Steps that a resumed run takes again have lower numbers than what was sent already.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log one record."""
        self._run.log({"step": step, **figures})

    def end(self, complete: bool) -> None:
        """Finish it."""
        self._run.finish(exit_code=0 if complete else 1)
