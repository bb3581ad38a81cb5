"""What `CUDA_VISIBLE_DEVICES` leaves, and what `configure()` makes of it."""

import pytest

from slidedp_jax import process
from slidedp_jax.visible_gpus import count_visible, num_gpus, num_visible

UUIDS = ["GPU-1c2d0000-aaaa", "GPU-1c2e0000-bbbb", "GPU-9f000000-cccc"]


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        ("", 0),
        (" ", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("2,0", 2),
        (" 0 , 1 ", 2),
        ("0,-1,1", 1),  # nothing after an entry that is no GPU
        ("0,,1", 1),
        ("0,1,", 2),
        ("0,7,1", 1),
        ("7,0", 0),
        ("0,x,1", 1),
        ("0x,1", 2),  # as C reads numbers
        ("1,0,1", 0),  # twice the same
        ("0,GPU-9f", 1),
        ("GPU-9f", 1),
        ("GPU-1c2e0000-bbbb,GPU-9F", 2),
        ("GPU-1c2,GPU-9f", 0),  # two GPUs begin so
        ("GPU-9f,GPU-77,GPU-1c2d", 1),
        ("GPU-9f,0", 1),
        ("GPU-9f,GPU-9f00", 0),
        ("MIG-3b7f0000-0000", 1),
        ("MIG-GPU-9f000000-cccc/1/0,MIG-GPU-9f000000-cccc/2/0", 1),
    ],
)
def test_entries_count_as_for_cuda(setting, count):
    assert count_visible(setting, 3, UUIDS) == count


def test_what_cannot_be_known_is_taken_to_exist():
    assert count_visible("0,7,1", None, UUIDS) == 3
    assert count_visible("GPU-77,GPU-78", 3, []) == 2


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with three GPUs and JAX's plugin."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for number, uuid in enumerate(UUIDS):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\n")
    monkeypatch.setattr(process.jax_internals, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(process, "num_visible", lambda: num_visible(tmp_path))
    monkeypatch.setattr(process, "num_gpus", lambda: num_gpus(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "platform", "count"),
    [
        (None, "cuda", 3),
        ("0,2", "cuda", 2),
        ("GPU-1c2e,GPU-9f", "cuda", 2),
        ("GPU-nobodys", "cpu", 1),
        ("MIG-3b7f", "cuda", 1),
        ("0,-1,1", "cuda", 1),
        ("", "cpu", 1),
        ("-1", "cpu", 1),
    ],
)
def test_platform_and_number_follow_it(machine, monkeypatch, setting, platform, count):
    assert num_gpus(machine) == 3
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert process._resolve_platform("auto") == platform
    assert process._visible_gpus(platform) == count
    assert process._resolve_platform("cpu") == "cpu"
    if platform == "cpu":
        with pytest.raises(RuntimeError, match=f"CUDA_VISIBLE_DEVICES='{setting}' leaves no GPU"):
            process._resolve_platform("cuda")
    else:
        assert process._resolve_platform("cuda") == "cuda"


def test_without_gpus_the_cpu_computes(machine, monkeypatch):
    for path in (machine / "dev").iterdir():
        path.unlink()
    assert process._resolve_platform("auto") == "cpu"
    # Where there are no device files, who asks for CUDA is believed.
    assert process._resolve_platform("cuda") == "cuda"
    assert process._visible_gpus("cuda") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert process._visible_gpus("cuda") == 2
    assert process._resolve_platform("auto") == "cpu"
