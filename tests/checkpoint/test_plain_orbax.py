"""A checkpoint is read by the README's lines, in a process that has nothing of this package."""

import json
import os
import pathlib
import subprocess
import sys

import optax
import pytest
from streamed_training import small_config, strategy, trainer

from slidedp_jax.checkpoint.record import read_record

README = pathlib.Path(__file__).parents[2] / "README.md"
PLACEHOLDER = "/absolute/out/checkpoints/step_00000500/model.layers.0"
MORE = """
import json, sys, zlib
import numpy as np
assert not [name for name in sys.modules if name.startswith("slidedp")]
assert jax.device_count() == {devices} and arrays
shards = max(len(set(map(str, a.sharding.devices_indices_map(a.shape).values())))
             for a in jax.tree.leaves(arrays))
sums = {{name: {{key: zlib.crc32(np.asarray(value).tobytes()) for key, value in own.items()}}
        for name, own in arrays.items()}}
print(json.dumps([shards, sums]))
"""


@pytest.mark.parametrize("devices", [4, pytest.param(3, marks=pytest.mark.thorough)])
def test_plain_orbax_reads_it_on_another_number_of_devices(devices, tmp_path):
    with trainer(small_config(), optax.adamw(1e-3), strategy(), num_devices=2) as it:
        folder = it.save(tmp_path / "run")
    (block,) = [
        block for block in README.read_text().split("```python\n")[1:] if PLACEHOLDER in block
    ]
    code = block.split("```")[0].replace(PLACEHOLDER, str(folder / "model.layers.0"))
    assert len(code.strip().splitlines()) <= 11
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", code + MORE.format(devices=devices)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shards, sums = json.loads(done.stdout.splitlines()[-1])
    assert shards == devices
    written = read_record(folder)["checksums"]
    assert sums == {name: written[name] for name in sums} and len(sums) == 11
