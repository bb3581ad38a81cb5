"""What holds for the repository as a whole: the direction of imports, ruff and mypy."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "planner", "slidedp_jax")

MAY_IMPORT = {
    "models": {"models"},
    "planner": {"models", "planner"},
    "slidedp_jax": {"models", "planner", "slidedp_jax"},
}
"""models <- planner <- slidedp_jax."""

MODELS_WITHOUT_JAX = ("config.py", "hf_config.py", "hf_export.py", "hf_hub.py", "hf_load.py")
"""Of `planner`, all but `measure.py` stand without JAX."""


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its direction"
            found.add((node.module or "").split(".")[0])
    return found


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no sources in {ROOT / package}"
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_dependence_has_one_direction(package):
    wrong = {
        str(path.relative_to(ROOT)): sorted(extra)
        for path in sources(package)
        if (extra := imported_packages(path) & set(PACKAGES) - MAY_IMPORT[package])
    }
    assert not wrong


def test_planning_and_files_stand_without_jax():
    plain = [path for path in sources("planner") if path.name != "measure.py"]
    plain += [ROOT / "models" / name for name in MODELS_WITHOUT_JAX]
    wrong = [path.name for path in plain if imported_packages(path) & {"jax", "jaxlib", "flax"}]
    assert not wrong


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
