"""The flags of a command: what is wrong with them in a line, not the usage of all flags."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from slidedp_jax.wording import say_error

WRONG_COMMAND = 2
"""Exit code."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose messages are for people; flags are not abbreviated."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        """End with the message."""
        say_error(f"{message}. `{self.prog} --help` lists all flags")
        self.exit(WRONG_COMMAND)

    def parse_whole(self, words: Sequence[str]) -> argparse.Namespace:
        """Read the words of a command.

        Raises:
          SystemExit: the help was printed, or an error, which names all flags that there are not.
        """
        known = list(self._option_string_actions)
        flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
        if unknown := [flag for flag in dict.fromkeys(flags) if flag not in known]:
            told = []
            for flag in unknown:
                near = difflib.get_close_matches(flag, known, n=2)
                told.append(f"{flag} (did you mean {' or '.join(near)}?)" if near else flag)
            self.error(f"unknown flag{'s' if len(told) > 1 else ''} {', '.join(told)}")
        found, rest = self.parse_known_args(words)
        if rest:
            self.error(f"unknown word{'s' if len(rest) > 1 else ''} {' '.join(rest)}")
        return found
