"""What files import: the direction of dependence, what stays free of JAX, what is private."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
OURS = "slidedp_jax"
FLOORS = [
    {"jax_internals", "wording"},
    {"command_parser"},
    {"models"},
    {"planner"},
    {
        "errors",
        "tracer",
        "whole_files",
        "disk_room",
        "interrupts",
        "compilation_cache",
        "visible_gpus",
    },
    {"hosts"},
    {"host_watch"},
    {"process", "machine_here"},
    {"this_machine"},
    {"data", "adapter"},
    {"state"},
    {"transfer"},
    {"update"},
    {"step"},
    {"checkpoint", "assembly"},
    {"trainer"},
    {"generate", "pretrained", "measure"},
    {"run"},
    {"export", "preview", "report"},
    {"checkpoints"},
    {"train"},
    {"cli"},
]
"""Packages and files of slidedp_jax from the ground up; each imports only from floors below."""

APART = {
    "data": {"errors", "whole_files", "wording"},
    "adapter": {"errors", "jax_internals", "models", "planner"},
}
"""What these may import in all."""


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


def unit_of(module: str) -> str:
    """`slidedp_jax.state.layout` -> `state`; the package itself is `__init__`."""
    return [*module.split("."), "__init__"][1]


def sources_of(unit: str) -> list[pathlib.Path]:
    top = ROOT if unit in ("models", "planner") else ROOT / OURS
    file = top / f"{unit}.py"
    return [file] if file.is_file() else sorted((top / unit).rglob("*.py"))


@pytest.mark.parametrize(
    ("floor", "unit"), [(n, unit) for n, units in enumerate(FLOORS) for unit in sorted(units)]
)
def test_each_floor_imports_only_from_below(floor, unit):
    below = set().union(*FLOORS[:floor], {unit})
    allowed = APART.get(unit, below) | {unit}
    assert sources_of(unit)
    for path in sources_of(unit):
        modules = imported_modules(path)
        assert not {name.split(".")[0] for name in modules} & {"models", "planner", "tests"}, path
        ours = {unit_of(name) for name in modules if name.split(".")[0] == OURS}
        assert ours - {"__init__"} <= allowed, path


def test_the_command_has_no_way_of_its_own_from_and_to_hugging_face_folders():
    """What scripts use, `slidedp_jax.pretrained`, is what a run is made of."""
    theirs = {f"{OURS}.models.{name}" for name in ("decoder", "hf_config", "hf_hub", "hf_load")}
    theirs |= {f"{OURS}.models.hf_export", f"{OURS}.data.load_examples"}
    for path in (*sources_of("run"), *sources_of("train")):
        assert not with_names(path) & theirs, path
    assert theirs <= with_names(*sources_of("pretrained"))


def test_every_file_is_on_a_floor():
    units = {path.stem for path in (ROOT / OURS).iterdir() if not path.name.startswith("__")}
    assert units == set().union(*FLOORS)


def test_every_unit_has_a_place_in_the_table_of_files():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Files\n")[1].split("\n## ")[0]
    for unit in set().union(*FLOORS):
        assert re.search(rf"\b{unit}(\.py|/)`", table), unit


def test_the_check_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def f():\n    from slidedp_jax.planner import a\n    import slidedp_jax.run\n")
    assert imported_modules(file) == {"slidedp_jax.planner", "slidedp_jax.run"}


def modules_without_jax() -> list[str]:
    planner = [
        f"slidedp_jax.planner.{path.stem}"
        for path in sources_of("planner")
        if path.stem != "__main__"
    ]
    others = ("models.config", "process", "jax_internals")
    return sorted({OURS, *(f"{OURS}.{name}" for name in others), *planner})


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
    for path in [
        ROOT / OURS / "__init__.py",
        *(p for u in set().union(*FLOORS) for p in sources_of(u)),
    ]:
        if path.name == "__init__.py":
            roots = {name.split(".")[0] for name in imported_modules(path)}
            assert roots <= {OURS, *sys.stdlib_module_names}, path


PRIVATE_MODULES = ("jax._src", "jax.interpreters", "jaxlib", "orbax", "jax_plugins")
PRIVATE_NAMES = {
    *("client", "dma_map", "dma_unmap", "unsafe_buffer_pointer", "is_ready"),
    *("memory_analysis", "cost_analysis"),
}
PRIVATE_WORDS = re.compile(
    r"xla_(gpu|cpu|backend)_|PJRT_|XLA_\w*(MEM|LIMIT)|dot_product_attention_"
)


def private_uses(path: pathlib.Path) -> list[str]:
    """Of JAX, XLA and Orbax: modules, attributes and words that they do not promise."""
    found = [name for name in imported_modules(path) if name.startswith(PRIVATE_MODULES)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_NAMES:
            found.append(node.attr)
        if isinstance(node, ast.Constant) and PRIVATE_WORDS.search(str(node.value)):
            found.append(str(node.value))
    return found


def test_what_is_private_is_used_in_one_file():
    (one_file,) = sources_of("jax_internals")
    others = [path for unit in set().union(*FLOORS) for path in sources_of(unit)]
    others.remove(one_file)
    assert {path: used for path in others if (used := private_uses(path))} == {}
    assert {"jax._src.xla_bridge", "orbax.checkpoint", *PRIVATE_NAMES} <= {*private_uses(one_file)}


def imports_among_files() -> dict[str, set[str]]:
    """Module -> ours that it imports anywhere."""
    links = [ROOT / OURS / "models", ROOT / OURS / "planner"]
    files = [*(ROOT / OURS).rglob("*.py"), *(p for link in links for p in link.glob("*.py"))]
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }
    return {
        name: {own for own in with_names(file) if own in modules and own != name}
        for name, file in modules.items()
    }


def with_names(path: pathlib.Path) -> set[str]:
    """`from package import name` may be a module or a name in one."""
    found = imported_modules(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def cycles(imports: dict[str, set[str]]) -> set[str]:
    """Modules that no order of importing puts after all that they import."""
    left = dict(imports)
    while ready := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in ready:
            del left[name]
    return set(left)


def test_no_file_imports_itself_by_way_of_others():
    imports = imports_among_files()
    del imports[OURS]  # its public names, on first use
    assert len(imports) > 120
    assert cycles(imports) == set()
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"a", "b", "c"}
