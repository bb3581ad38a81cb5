"""`scripts/environment.sh`: which JAX for which NVIDIA driver; extras that advice names exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from slidedp_jax import jax_internals, process

ROOT = Path(__file__).parents[1]
VERSION = """NVRM version: NVIDIA UNIX {}  {}  Release Build  (root@host)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def cuda_extra(file: Path) -> tuple[str, str]:
    command = ["bash", "-ceu", f"source scripts/environment.sh; cuda_extra '{file}'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize(
    ("kind", "version", "extra", "said"),
    [
        ("Open Kernel Module for x86_64", "580.65.06", "cuda13", ""),
        ("x86_64 Kernel Module", "590.10", "cuda13", ""),
        ("x86_64 Kernel Module", "570.133.20", "cuda12", ""),
        ("x86_64 Kernel Module", "525.60.13", "cuda12", ""),
        ("x86_64 Kernel Module", "470.256.02", "", "driver is 470.256.02; JAX needs 525"),
        ("x86_64 Kernel Module", "unknown", "cuda13", "tells no version"),
    ],
)
def test_the_driver_decides_the_extra(kind, version, extra, said, tmp_path):
    file = tmp_path / "version"
    file.write_text(VERSION.format(kind, version))
    found, warned = cuda_extra(file)
    assert found == extra
    assert said in warned and bool(said) == bool(warned)


def test_without_a_driver_there_is_no_extra(tmp_path):
    assert cuda_extra(tmp_path / "none") == ("", "")


def test_every_extra_that_is_advised_exists_and_can_be_had_from_a_clone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*.py")]
    files += (ROOT / "slidedp_jax").rglob("*.py")
    advised = set()
    for file in files:
        text = file.read_text()
        assert "slidedp_jax[" not in re.sub(r"slidedp_jax\[\w+\]:", "", text), file
        advised |= {
            name for names in re.findall(r"'\.\[([\w,]+)\]'", text) for name in names.split(",")
        }
    assert {"cuda13", "cuda12", "hub"} <= advised <= set(extras)


def test_a_gpu_that_is_not_used_is_said(monkeypatch, caplog):
    monkeypatch.setattr(process, "num_gpus", lambda: 2)
    monkeypatch.setattr(process, "num_visible", lambda: 2)
    monkeypatch.setattr(jax_internals, "has_cuda_plugin", lambda: False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert process._resolve_platform("auto") == "cpu"
    assert "2 NVIDIA GPUs" in caplog.text and "pip install -e '.[cuda13]'" in caplog.text
    caplog.clear()
    assert process._resolve_platform("cpu") == "cpu"
    assert caplog.text == ""
    with pytest.raises(RuntimeError, match=r"in the clone, pip install -e '\.\[cuda13\]'"):
        process._resolve_platform("cuda")
