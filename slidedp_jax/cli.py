"""The console script `slidedp`: thin names for the package's commands."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

import slidedp_jax
from slidedp_jax.interrupts import StopAtSignal
from slidedp_jax.wording import say_error

_COMMANDS = {
    "train": "fine-tune a model folder",
    "preview": "look at the rows as training sees them",
    "plan": "predict memory and step time",
    "compare": "compare machines for a job",
    "measure": "measure this machine for plans",
    "export": "checkpoint -> Hugging Face folder",
    "checkpoints": "list, inspect, verify, export or copy checkpoints",
    "report": "draw a run: one HTML page",
    "schema": "JSON schema of `slidedp train --config`",
    "generate": "complete a prompt with a model folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command in _COMMANDS:
        with StopAtSignal():
            return _run(command, rest)
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command in ("-V", "--version", "version"):
        print(f"slidedp_jax {slidedp_jax.__version__}")
        return 0
    if command:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        say_error(
            f"there is no command {command!r}{hint}; there are {', '.join(_COMMANDS)} "
            "(`slidedp --help`)"
        )
        return 2
    print(_usage(), file=sys.stderr)
    return 2


def _usage() -> str:
    lines = [f"  {name:<13}{text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            f"usage: slidedp {{{','.join(_COMMANDS)}}} ...",
            "",
            *lines,
            "",
            "`slidedp COMMAND --help`",
        ]
    )


def _run(command: str, rest: list[str]) -> int:
    """Import what the command needs, and no more."""
    if command == "train":
        from slidedp_jax.train import main as train

        return train(rest)
    if command == "preview":
        from slidedp_jax.preview import main as preview

        return preview(rest)
    if command == "plan":
        from slidedp_jax.planner.command import main as plan

        return plan(rest, prog="slidedp plan")
    if command == "compare":
        from slidedp_jax.planner.comparison import main as compare

        return compare(rest)
    if command == "measure":
        from slidedp_jax.measure.command import main as measure

        return measure(rest)
    if command == "export":
        from slidedp_jax.export import main as export

        return export(rest)
    if command == "checkpoints":
        from slidedp_jax.checkpoints import main as checkpoints

        return checkpoints(rest)
    if command == "report":
        from slidedp_jax.report import main as report

        return report(rest)
    if command == "schema":
        from slidedp_jax.run.config_schema import config_schema_text

        if rest not in ([], ["-h"], ["--help"]):
            say_error(f"slidedp schema takes nothing, got {rest[0]!r}")
            return 2
        print(config_schema_text().strip() if not rest else "usage: slidedp schema > FILE.json")
        return 0
    from slidedp_jax.generate import main as generate

    return generate(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
