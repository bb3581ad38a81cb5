import json
import logging
import mmap
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from folders import BFLOAT16, QWEN2, random_tensors, read_index, write_folder, write_index
from safetensors.numpy import load_file, save_file

from slidedp_jax.models.hf_config import parse_config, read_config
from slidedp_jax.models.hf_load import check_folder, load_parameters

SHAPES = parse_config(QWEN2).parameter_shapes()
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def load(folder, shapes=SHAPES, **options):
    """All parameters of a folder, and proof that each was written once."""
    written, lock = {}, threading.Lock()

    def write(name, value):
        with lock:
            assert name not in written
            written[name] = value.copy()

    load_parameters(folder, shapes, write, **options)
    return written


def assert_refused(folder, message, error=ValueError):
    """Both the dry check and the load fail, before anything has been written."""
    with pytest.raises(error, match=message):
        check_folder(folder, read_config(folder))

    def write(name, value):
        pytest.fail(f"{name} was written before all checks had passed")

    with pytest.raises(error, match=message):
        load_parameters(folder, read_config(folder).parameter_shapes(), write)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("sharded", [True, False])
def test_every_parameter_arrives_bit_for_bit_in_the_files_dtype(tmp_path, sharded, dtype):
    tensors = random_tensors(QWEN2, dtype)
    write_folder(tmp_path, tensors=tensors, sharded=sharded)
    loaded = load(tmp_path, num_threads=3)
    assert loaded.keys() == SHAPES.keys()
    for name, value in loaded.items():
        assert value.dtype == dtype
        assert value.tobytes() == tensors[name].tobytes()
        assert value.shape == tensors[name].shape


def test_arrays_are_read_only_views(folder):
    def write(name, value):
        assert not value.flags.writeable
        assert not value.flags.owndata

    load_parameters(folder, SHAPES, write)


def test_a_failing_write_surfaces_and_stops_the_rest(folder):
    calls = []

    def write(name, value):
        calls.append(name)
        raise RuntimeError(f"no room for {name}")

    with pytest.raises(RuntimeError, match="no room for"):
        load_parameters(folder, SHAPES, write, num_threads=1)
    assert len(calls) < len(SHAPES)


def test_shard_names_do_not_matter(folder):
    renamed = {}
    for name, file in read_index(folder).items():
        new = file.replace("model-0000", "model.safetensors-0000").removesuffix(".safetensors")
        if (folder / file).exists():
            (folder / file).rename(folder / new)
        renamed[name] = new
    write_index(folder, renamed)
    assert load(folder).keys() == SHAPES.keys()


def test_files_beside_the_index_are_ignored_with_one_warning(folder, caplog):
    expected = load(folder)
    clashing = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(clashing, folder / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert len(caplog.records) == 1
    assert "consolidated.safetensors" in caplog.text
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_missing_bias_is_named(folder):
    name = "model.layers.1.self_attn.k_proj.bias"
    weight_map = read_index(folder)
    file = folder / weight_map.pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    write_index(folder, weight_map)
    assert_refused(folder, rf"Missing: {name}\. Unexpected: none")


def test_head_dim_that_the_tensors_contradict(tmp_path):
    raw = QWEN2 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    write_folder(tmp_path, raw)
    del raw["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_refused(
        tmp_path, r"q_proj.weight is \[128, 64\] in the file, expected \[512, 64\].*Check head_dim"
    )


def test_untied_without_a_head_hints_at_the_flag(tmp_path):
    write_folder(tmp_path, QWEN2 | {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert_refused(tmp_path, r"Missing: lm_head.weight\..*set tie_word_embeddings to true")


def test_tied_without_a_head_loads(tmp_path):
    raw = QWEN2 | {"tie_word_embeddings": True}
    write_folder(tmp_path, raw)
    assert load(tmp_path, parse_config(raw).parameter_shapes()).keys() == SHAPES.keys() - {
        "lm_head.weight"
    }


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_models_redundant_head_must_be_the_embedding(tmp_path, equal):
    tensors = random_tensors(QWEN2)
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    raw = QWEN2 | {"tie_word_embeddings": True}
    write_folder(tmp_path, raw, tensors)
    shapes = parse_config(raw).parameter_shapes()
    if equal:
        assert "lm_head.weight" not in load(tmp_path, shapes)
    else:
        with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
            load_parameters(tmp_path, shapes, lambda name, value: pytest.fail(name))


def test_another_prefix_is_named(tmp_path):
    tensors = {
        name.replace("model.", "model.language_model."): value
        for name, value in random_tensors(QWEN2).items()
    }
    write_folder(tmp_path, tensors=tensors)
    assert_refused(tmp_path, r"50 in all.*start with 'model.language_model.' where 'model.'")


def test_a_shard_that_is_not_there_is_an_incomplete_download(folder):
    (folder / SECOND).unlink()
    assert_refused(folder, f"{SECOND}. The download looks incomplete", FileNotFoundError)


def test_an_index_of_other_files_is_stale(folder):
    shutil.copy(folder / FIRST, folder / "model-00001-of-00030.safetensors")
    for file in set(read_index(folder).values()):
        (folder / file).unlink()
    assert_refused(folder, "The index looks stale", FileNotFoundError)


def test_an_index_of_another_split_is_stale(folder):
    weight_map = read_index(folder)
    swap = {FIRST: SECOND, SECOND: FIRST}
    write_index(folder, {name: swap.get(file, file) for name, file in weight_map.items()})
    assert_refused(folder, "the index looks stale. Not where the index says: ")


def test_a_tensor_that_the_index_forgot_is_reported(folder):
    weight_map = read_index(folder)
    del weight_map["model.norm.weight"]
    write_index(folder, weight_map)
    assert_refused(folder, "In a file, but not in the index: model.norm.weight in ")


def test_cut_files_are_named_with_both_sizes(folder):
    size = (folder / FIRST).stat().st_size
    with (folder / FIRST).open("r+b") as stream:
        stream.truncate(size - 1000)
    assert_refused(folder, f"{FIRST} has {size - 1000} bytes, its header describes {size}")
    with (folder / FIRST).open("r+b") as stream:
        stream.truncate(100)
    assert_refused(folder, f"{FIRST} has 100 bytes but its header needs at least")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes but its header needs at least 8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        ((4).to_bytes(8, "little") + b"{no}", "damaged safetensors header"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "damaged safetensors header"),
    ],
)
def test_files_that_are_no_weights(folder, content, message):
    (folder / FIRST).write_bytes(content)
    assert_refused(folder, message)


def test_quantised_tensors_are_refused(folder):
    file = folder / FIRST
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("proj.weight"))
    tensors[name] = tensors[name].astype(np.int8)
    save_file(tensors, file)
    assert_refused(folder, rf"{name} in .* has dtype I8; supported: F64, F32, F16, BF16")


def test_old_rotary_buffers_are_no_parameters(tmp_path):
    tensors = random_tensors(QWEN2)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_folder(tmp_path, tensors=tensors)
    assert load(tmp_path).keys() == SHAPES.keys()


def test_folders_without_weights_say_what_is_there(folder):
    (folder / "model.safetensors.index.json").unlink()
    assert_refused(folder, "without an index only a file named", FileNotFoundError)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    assert_refused(folder, "pytorch_model.bin: save the model as safetensors", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_parameters(folder / "nowhere", SHAPES, lambda name, value: None)


PEAK_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from slidedp_jax.models.hf_load import find_tensors, load_parameters

def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

folder = Path(sys.argv[1])
shapes = {name: tensor.shape for name, tensor in find_tensors(folder).items()}
sums = dict.fromkeys(shapes, 0.0)
def write(name, value):
    sums[name] = float(value.sum())
before = peak_bytes()
load_parameters(folder, shapes, write, num_threads=int(sys.argv[2]))
assert all(sums[name] == np.prod(shape) for name, shape in shapes.items())
print(peak_bytes() - before)
"""


NO_MADVISE = not hasattr(mmap, "MADV_DONTNEED")


# Where madvise is missing (no Linux), pages stay until the system needs the memory: no peak to see.
@pytest.mark.skipif(NO_MADVISE, reason="needs madvise to tell the system to drop pages")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_peak_extra_memory_is_one_tensor_per_thread(tmp_path, num_threads):
    """Reading 256 MB in tensors of 16 MB never has more than the tensors in flight in memory."""
    tensor_bytes, num_tensors = 1 << 24, 16
    value = np.ones(tensor_bytes // 4, np.float32)
    save_file({f"w{i:02d}": value for i in range(num_tensors)}, tmp_path / "model.safetensors")
    program = [sys.executable, "-c", PEAK_PROGRAM, str(tmp_path), str(num_threads)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    extra = int(done.stdout)
    assert 0.5 * tensor_bytes < extra < (num_threads + 0.5) * tensor_bytes
