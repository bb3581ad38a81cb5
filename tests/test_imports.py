"""The direction of dependence, read off every import statement, and what stays free of JAX."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAY_IMPORT = {
    "models": {"models"},
    "planner": {"planner", "models"},
    "slidedp_jax": {"slidedp_jax", "planner", "models"},
}
PACKAGES = set(MAY_IMPORT) | {"tests", "scripts"}


def imported_modules(path: pathlib.Path) -> set[str]:
    """Absolute names that a file imports anywhere, also inside functions; relative ones fail."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names.add(str(node.module))
    return names


def sources(package: str) -> list[pathlib.Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(package):
    assert len(sources(package)) > 3
    for path in sources(package):
        ours = {name.split(".")[0] for name in imported_modules(path)} & PACKAGES
        assert ours <= MAY_IMPORT[package], path


def test_the_check_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from planner.search import plan\n    import slidedp_jax.chunk\n")
    assert imported_modules(file) == {"planner.search", "slidedp_jax.chunk"}


MEASURING = {"planner.measure"}
"""Modules of `planner` that may use JAX."""


def modules_without_jax() -> list[str]:
    planner = [
        f"planner.{path.stem}" for path in sources("planner") if path.stem not in ("__main__",)
    ]
    return sorted({"models.config", "slidedp_jax", "slidedp_jax.process", *planner} - MEASURING)


def test_configuration_and_planning_import_no_jax():
    """In a process of its own, since this one has JAX already."""
    code = f"""
import importlib, sys
for name in {modules_without_jax()!r}:
    importlib.import_module(name.removesuffix(".__init__"))
    heavy = {{"jax", "jaxlib", "flax", "optax", "torch"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{sorted(heavy)}}"
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_package_init_files_import_only_the_project_and_the_standard_library():
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("__init__.py"):
            roots = {name.split(".")[0] for name in imported_modules(path)}
            assert roots <= set(MAY_IMPORT) | set(sys.stdlib_module_names), path
