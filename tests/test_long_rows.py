"""`scripts/check/check_long_rows.py`: at its size on a GPU, tried out on short rows elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "check" / "check_long_rows.py"
HAS_GPU = Path("/dev/nvidiactl").exists()


def checked(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU with 80 GiB or more")
@pytest.mark.thorough
def test_long_rows_are_right():
    results = checked()
    assert all(result["elements_over_2^31"] >= 1 for result in results)


@pytest.mark.thorough
def test_the_script_runs_and_its_references_are_right_on_short_rows():
    cases = [
        "norm",
        "embedding",
        "head-in-slices",
        "boundary",
        "attention-window",
        "attention-packed",
    ]
    results = checked("--shrink", "4096", "--only", *cases)
    assert [result["case"] for result in results if result["right"]] == cases
