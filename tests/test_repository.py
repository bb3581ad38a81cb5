"""What holds for the repository as a whole: ruff, mypy and what the README shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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


def packages() -> list[Path]:
    return [path.parent for path in (ROOT / "slidedp_jax").glob("*/__init__.py")]


def test_readme_names_every_package():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    own = [path for path in packages() if not path.is_symlink()]
    assert len(own) > 6
    assert not [path.name for path in own if f"`slidedp_jax/{path.name}/`" not in readme]


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_a_package_names_its_files(package):
    text = (package / "__init__.py").read_text(encoding="utf-8")
    names = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]
