"""Ctrl-C, SIGTERM and SIGUSR1 at any time of a command: a line and an exit code, no traceback.

A thread takes the signals. Python calls handlers in the main thread and between its own
instructions only: while that one imports, compiles or waits for a device, Ctrl-C would do nothing
for minutes, and an exception there comes out of somebody else's code. Imports nothing of weight,
since it comes first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_INTERRUPTED = 130
EXIT_AGAIN = 75
"""Of a run that a scheduler has stopped and that has saved: start it again (`EX_TEMPFAIL`)."""

_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
_SIGNALS = (signal.SIGINT, *_OF_SCHEDULERS)
_SHARE_FOR_WORK = 0.95
"""Of the time that a scheduler leaves; the rest is for tidying."""
_MOST_SECONDS = 10.0
"""For tidying before a process ends."""


class StopAtSignal:
    """Ends the process at SIGINT, SIGTERM or SIGUSR1, or, `when_ready`, asks for that first.

    Attributes:
      requested: whether a stop was asked for.
      within_s: seconds from SIGTERM or SIGUSR1 after which the process is killed by whoever sent
        it; None: not known. It ends before, whatever it does then, and says so.
      last_words: what was kept, for the line that says that the process ends.
      tidy: called before it ends at once, from another thread; errors in it are ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self.within_s: float | None = None
        self._signal: int | None = None
        self._timer: threading.Timer | None = None
        self.last_words: Callable[[], str] = lambda: "nothing was changed"
        self.tidy: Callable[[], None] = lambda: None
        self._softly: str | None = None
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._former_pipe = -1

    def __enter__(self) -> StopAtSignal:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._former_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in _SIGNALS:
                # Does nothing: that there is one makes Python write to the pipe.
                self._previous[number] = signal.signal(number, lambda *_: None)
            threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.in_time()
        if self._pipe is None:
            return
        for number, handler in self._previous.items():
            # As `signal.signal` gave it: None only for a handler that was not set by Python.
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_pipe)
        os.close(self._pipe[1])  # which ends the thread
        self._pipe = None

    @property
    def exit_code(self) -> int:
        """Of a run that was asked to stop and has saved."""
        return EXIT_AGAIN if self._signal in _OF_SCHEDULERS else EXIT_INTERRUPTED

    def in_time(self) -> None:
        """What had to be done after a scheduler's signal is done."""
        if self._timer is not None:
            self._timer.cancel()

    @contextlib.contextmanager
    def when_ready(self, text: str) -> Iterator[None]:
        """Within it the first signal sets `requested` and prints `text`; the second ends."""
        self._softly = text
        try:
            yield
        finally:
            self._softly = None

    def _watch(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as signals:
            while taken := signals.read(1):
                if taken[0] in _SIGNALS:
                    self._take(taken[0])

    def _take(self, number: int) -> None:
        if self._softly is not None and not self.requested:
            self.requested, self._signal = True, number
            print(self._softly, file=sys.stderr, flush=True)
            if self.within_s is not None and number in _OF_SCHEDULERS:
                name, seconds = signal.Signals(number).name, self.within_s
                text = f"no checkpoint of this step within {seconds:g} s of {name}"
                self._timer = threading.Timer(_SHARE_FOR_WORK * seconds, self._end, (number, text))
                self._timer.daemon = True
                self._timer.start()
            return
        self._end(number, "stopped at once")

    def _end(self, number: int, why: str) -> None:
        """End the process now."""
        tidying = threading.Thread(target=self._tidied, daemon=True)
        tidying.start()
        tidying.join(_MOST_SECONDS)
        with contextlib.suppress(Exception):
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the cursor, which progress bars hide
            sys.stdout.flush()
            print(f"{why}; {self.last_words()}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    def _tidied(self) -> None:
        with contextlib.suppress(Exception):
            self.tidy()
