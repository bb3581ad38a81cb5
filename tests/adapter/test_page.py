"""The documentation's example runs as it stands, and the script with it."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_example_of_the_page_runs_and_learns():
    page = (ROOT / "docs" / "bring_your_own_model.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    theirs, glue = code.split("\nmodel = ")
    assert len(theirs.splitlines()) < 40
    assert len(glue.splitlines()) <= 30
    *losses, shape = run("-c", code).strip().splitlines()
    assert len(losses) == 20
    assert float(losses[-1]) < 0.8 * float(losses[0])
    assert shape == "(8, 64, 256)"


@pytest.mark.thorough
def test_the_script_trains_three_ways(tmp_path):
    pytest.importorskip("tunix", reason="google-tunix is not installed", exc_type=ImportError)
    out = run(
        "scripts/train_tunix_qwen3.py",
        *("--compare", "--steps", "5", "--json", str(tmp_path / "report.json")),
    )
    names = [line.split(":")[0] for line in out.strip().splitlines()]
    assert names == ["resident", "adapted", "own_decoder"]
