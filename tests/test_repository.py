"""What holds for the repository as a whole: ruff, mypy and what the README shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "planner", "slidedp_jax")


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no sources in {ROOT / package}"
    return found


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (the dev extra has it)")
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)],
    ids=" ".join,
)
def test_checker_has_no_findings(command):
    result = run_tool(*command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_readme_shows_the_example_that_runs():
    example = (ROOT / "scripts" / "script_api_example.py").read_text(encoding="utf-8")
    body = example.split('"""\n\n', 1)[1]
    assert f"```python\n{body}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_names_every_module():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {path.name for package in PACKAGES for path in sources(package)} - {"__init__.py"}
    assert not [name for name in sorted(names) if f"`{name}`" not in readme]
