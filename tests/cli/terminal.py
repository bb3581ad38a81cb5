"""A terminal of a given size: what a command that runs in it shows, moment by moment."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator

_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Screen:
    """Enough of a VT100 for text, carriage returns, erasing and moving up; scrollback is kept."""

    def __init__(self, columns: int):
        self.columns = columns
        self.rows = [""]
        self._row = self._column = 0
        self._pending = ""

    def feed(self, text: str) -> None:
        text, self._pending = self._pending + text, ""
        while text:
            if text[0] == "\x1b":
                match = _CONTROL.match(text)
                if match is None:
                    assert len(text) < 16, f"unknown sequence {text[:16]!r}"
                    self._pending = text  # the rest of it comes next
                    return
                self._control(match[2], match[1])
                text = text[match.end() :]
                continue
            self._character(text[0])
            text = text[1:]

    def _control(self, letter: str | None, argument: str | None) -> None:
        if letter == "K":
            kept = {"2": "", "": self.rows[self._row][: self._column]}[argument or ""]
            self.rows[self._row] = kept
        elif letter == "A":
            self._row -= int(argument or 1)
        else:
            assert letter in (None, "m", "h", "l"), f"unknown sequence {argument}{letter}"

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character.isprintable():
            if self._column == self.columns:
                self._column = 0
                self._down()
            line = self.rows[self._row].ljust(self._column)
            self.rows[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")

    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


def run_in_terminal(words: list[str], columns: int, **options) -> Iterator[Screen]:
    """Runs a command; yields its screen whenever something was written, it must succeed."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    sizes = ("COLUMNS", "LINES")
    environment = {name: value for name, value in os.environ.items() if name not in sizes}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        words, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True, **options
    )
    os.close(its)
    screen, decode = Screen(columns), codecs.getincrementaldecoder("utf-8")().decode
    try:
        while True:
            try:
                read = os.read(mine, 4096)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            screen.feed(decode(read))
            yield screen
        assert process.wait(60) == 0, screen.lines()
    finally:
        process.kill()
        process.wait()
        os.close(mine)
