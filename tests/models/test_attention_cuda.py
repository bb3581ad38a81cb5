import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

no_gpu = not Path("/dev/nvidiactl").exists()
# cuDNN runs on NVIDIA GPUs only; what stands in for it elsewhere is tested in test_attention.py.
pytestmark = pytest.mark.skipif(no_gpu, reason="needs an NVIDIA GPU and JAX's CUDA plugin")


@pytest.fixture(scope="module")
def report():
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "cuda_attention_program.py")],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case", ["whole", "whole-window", "packed", "packed-window", "one-document"]
)
def test_cudnn_equals_the_reference_in_every_row(report, case):
    errors = report[case]
    assert not isinstance(errors, str), errors
    for name, rows in zip(("out", "d_q", "d_k", "d_v"), errors, strict=True):
        assert all(error < 0.02 for error in rows), f"{name}: {rows}"
