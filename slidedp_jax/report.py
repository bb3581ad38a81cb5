"""Draw a run: `slidedp report OUT`, one HTML page that needs no network and no other file."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from slidedp_jax.command_parser import CommandParser
from slidedp_jax.disk_room import writing
from slidedp_jax.errors import UserError
from slidedp_jax.run.report_data import read_run_data
from slidedp_jax.run.report_page import report_page
from slidedp_jax.whole_files import write_whole
from slidedp_jax.wording import say_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="slidedp report",
        description="Draw a run, also one that is going on, as one HTML page: loss, learning rate, "
        "norm, speed, memory, lanes, prediction beside measurement, samples, settings.",
    )
    parser.add_argument("run", type=pathlib.Path, help="output_dir of the run")
    parser.add_argument("--out", type=pathlib.Path, help="page to write (report.html in the run)")
    args = parser.parse_whole(sys.argv[1:] if argv is None else argv)
    out = args.run / "report.html" if args.out is None else args.out
    try:
        page = report_page(read_run_data(args.run))
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, page)
    except (UserError, OSError) as error:
        say_error(error)
        return 1
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
