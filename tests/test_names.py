"""A user's own `models` and `planner`, as modules or packages, beside ours; ways to install."""

import os
import pathlib
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ("models", "planner")
SCRIPT = """
import sys
import models, planner
assert models.WHOSE == planner.WHOSE == "the user's", (models, planner)
import slidedp_jax
slidedp_jax.configure(platform="cpu")
import slidedp_jax.run.loop
from slidedp_jax.models import decoder
from slidedp_jax.planner import search
assert sys.modules["models"].WHOSE == "the user's"
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
real = [__import__("os").path.realpath(f) for f in files if "slidedp_jax" in f]
assert len(real) == len(set(real)) > 50, "a file was imported under two names"
print("fine", decoder.__name__, search.__name__)
"""


def of_the_user(folder: pathlib.Path, *, packages: bool) -> pathlib.Path:
    folder.mkdir()
    for name in NAMES:
        file = folder / name / "__init__.py" if packages else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text('WHOSE = "the user\'s"\n')
    return folder


def run(arguments, *, path=(), python=sys.executable, **options) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [python, *arguments], env=environment, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("packages", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "where", ["working folder", pytest.param("installed", marks=pytest.mark.thorough)]
)
def test_a_users_names_and_ours_do_not_meet(where, packages, tmp_path):
    """With the clone on the path, before what is installed."""
    theirs = of_the_user(tmp_path / "theirs", packages=packages)
    working = theirs if where == "working folder" else tmp_path
    (working / "script.py").write_text(SCRIPT)
    path = [ROOT] if where == "working folder" else [ROOT, theirs]
    assert run(["script.py"], path=path, cwd=working).startswith("fine slidedp_jax.models")
    assert "tokens/s" in run(["-m", "slidedp_jax.planner", *JOB], path=path, cwd=working)


JOB = ["--preset", "qwen3-4b", "--hardware", "h200", "--tokens_per_step", "8192"]
JOB += ["--seq_length", "4096"]


@pytest.mark.thorough
def test_the_planner_is_a_command_in_the_clone():
    assert "tokens/s" in run(["-m", "planner", *JOB], cwd=ROOT)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_installed_it_is_whole_and_meets_nobody(way, tmp_path):
    """Needs a package registry, for the build; dependencies are those of this interpreter."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clone = tmp_path / "clone"
    run_git = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(run_git, check=True, capture_output=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, names)):
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    install = ["-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    run([*install, *(["-e"] if way == "editable" else []), str(clone)], python=python)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    here = next(p for p in map(pathlib.Path, sys.path) if (p / "jax").is_dir())
    (site / "dependencies.pth").write_text(f"{here}\n")
    theirs = of_the_user(tmp_path / "theirs", packages=False)
    (theirs / "script.py").write_text(SCRIPT)
    assert run(["script.py"], python=python, cwd=theirs).startswith("fine")
    command = [str(tmp_path / "venv" / "bin" / "slidedp"), "plan", *JOB]
    assert "tokens/s" in run(command, python=python, cwd=theirs)
    where = ["-c", "import slidedp_jax.models.decoder as it; print(it.__file__)"]
    found = run(where, python=python, cwd=theirs)
    assert str(clone if way == "editable" else site) in found
