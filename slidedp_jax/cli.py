"""The console script `slidedp`: thin names for the package's commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_USAGE = """usage: slidedp {train,preview,plan,export,generate} ...

  train     fine-tune a model folder                (python -m slidedp_jax.train)
  preview   look at the rows as training sees them  (python -m slidedp_jax.preview)
  plan      predict memory and step time            (python -m planner)
  export    checkpoint -> Hugging Face folder       (python -m slidedp_jax.export)
  generate  complete a prompt with a model folder   (python -m slidedp_jax.generate)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "train":
        from slidedp_jax.train import main as train

        return train(rest)
    if command == "preview":
        from slidedp_jax.preview import main as preview

        return preview(rest)
    if command == "plan":
        from slidedp_jax.planner.command import main as plan

        return plan(rest)
    if command == "export":
        from slidedp_jax.export import main as export

        return export(rest)
    if command == "generate":
        from slidedp_jax.generate import main as generate

        return generate(rest) or 0
    print(_USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
