"""What holds for the repository as a whole: ruff, mypy and what the README shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from second_points import SECOND_POINTS

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


@pytest.mark.parametrize("name", ["script_api_example.py", "resumable_example.py"])
def test_readme_shows_the_example_that_runs(name):
    example = (ROOT / "scripts" / name).read_text(encoding="utf-8")
    body = example.split('"""\n\n', 1)[1]
    assert f"```python\n{body}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def packages() -> list[Path]:
    own = [path.parent for path in (ROOT / "slidedp_jax").glob("*/__init__.py")]
    return [*own, ROOT / "models", ROOT / "planner"]


def test_the_table_of_files_names_every_package():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(packages()) > 8
    names = [str(path.relative_to(ROOT)) for path in packages()]
    assert not [name for name in names if f"`{name}/`" not in table]


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_a_package_names_its_files(package):
    page = "README.md" if package.name in ("models", "planner") else "__init__.py"
    text = (package / page).read_text(encoding="utf-8")
    names = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]


@pytest.mark.parametrize("node", SECOND_POINTS)
def test_second_points_are_tests(node):
    path, name = node.split("::")
    assert f"def {name.split('[')[0]}" in (ROOT / path).read_text()
