import hashlib
import json
import os

import numpy as np
import pytest
from folders import BFLOAT16, QWEN2, TOKENIZER_FILES, random_tensors, read_index, write_folder
from safetensors import safe_open
from safetensors.numpy import load_file

from slidedp_jax.models.hf_config import parse_config
from slidedp_jax.models.hf_export import export
from slidedp_jax.models.hf_load import load_parameters

SHAPES = parse_config(QWEN2).parameter_shapes()
TIED = QWEN2 | {"tie_word_embeddings": True}


def wide(value):
    return np.asarray(value, np.float32)


def read_back(folder):
    """All tensors of an exported folder, through the safetensors package."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def export_all(folder, source, tensors=None, shapes=SHAPES, **options):
    tensors = random_tensors(QWEN2) if tensors is None else tensors
    export(folder, source, shapes, lambda name: wide(tensors[name]), **options)
    return folder


@pytest.mark.parametrize(
    ("dtype", "file_dtype"), [("float32", np.float32), ("bfloat16", BFLOAT16), ("float16", "f2")]
)
def test_in_and_out_again_is_bitwise(tmp_path, dtype, file_dtype):
    tensors = random_tensors(QWEN2, np.dtype(file_dtype))
    source = write_folder(tmp_path / "in", QWEN2 | {"torch_dtype": dtype}, tensors)
    masters = {}
    load_parameters(source, SHAPES, lambda name, value: masters.update({name: wide(value)}))
    out = export_all(tmp_path / "out", source, masters, dtype=dtype, max_shard_bytes=60_000)
    exported = read_back(out)
    assert exported.keys() == tensors.keys()
    for name, value in exported.items():
        assert value.dtype == file_dtype
        assert value.tobytes() == tensors[name].tobytes()
    # Nothing about the model changed, so no byte of the configuration does.
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_bfloat16_rounds_to_nearest_even(tmp_path):
    source = write_folder(tmp_path / "in")
    tensors = random_tensors(QWEN2)
    # Halfway between the neighbours 1 and 1 + 2^-7, and between 1 + 2^-7 and 1 + 2^-6.
    tensors["model.norm.weight"][:2] = [1 + 2**-8, 1 + 3 * 2**-8]
    exported = read_back(export_all(tmp_path / "out", source, tensors))
    assert exported["model.norm.weight"][:2].astype(float).tolist() == [1.0, 1 + 2**-6]


def test_shards_hold_at_most_their_size_and_the_index_is_complete(tmp_path):
    source = write_folder(tmp_path / "in")
    out = export_all(tmp_path / "out", source, max_shard_bytes=30_000)
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(map(np.prod, SHAPES.values()))
    located = {}
    for file in files:
        with safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            located |= dict.fromkeys(opened.keys(), file.name)
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    assert read_index(out) == located
    assert located.keys() == SHAPES.keys()


def test_a_small_model_is_one_file_without_index(tmp_path):
    out = export_all(tmp_path / "out", write_folder(tmp_path / "in"))
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_everything_else_is_copied_byte_for_byte(tmp_path):
    source = write_folder(tmp_path / "in")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_bytes(b"{{ tools }}")
    (source / "README.md").write_text("the card of another model")
    (source / "training_args.bin").touch()
    out = export_all(tmp_path / "out", source)
    copied = [*TOKENIZER_FILES, "additional_chat_templates/tools.jinja"]
    for name in copied:
        digests = [hashlib.sha256((f / name).read_bytes()).digest() for f in (source, out)]
        assert digests[0] == digests[1]
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {*copied, "config.json", "model.safetensors"}
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, dict.fromkeys(("dtype", "torch_dtype"))),
        ({}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_only_the_dtype_of_the_configuration_changes(tmp_path, given, expected):
    raw = {key: value for key, value in QWEN2.items() if key != "torch_dtype"}
    raw = raw | given | {"transformers_version": "4.51.0", "custom": ["kept", 1]}
    out = export_all(tmp_path / "out", write_folder(tmp_path / "in", raw))
    exported = json.loads((out / "config.json").read_text())
    assert exported == raw | dict.fromkeys(expected, "bfloat16")
    assert list(exported)[: len(raw)] == list(raw)


@pytest.mark.parametrize("source_has_head", [True, False])
def test_a_tied_export_repeats_the_sources_convention(tmp_path, source_has_head):
    tensors = random_tensors(TIED)
    in_files = dict(tensors)
    if source_has_head:
        in_files["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = write_folder(tmp_path / "in", TIED, in_files)
    shapes = parse_config(TIED).parameter_shapes()
    exported = read_back(
        export_all(tmp_path / "out", source, tensors, shapes=shapes, dtype="float32")
    )
    assert exported.keys() == in_files.keys()
    if source_has_head:
        np.testing.assert_array_equal(exported["lm_head.weight"], in_files["lm_head.weight"])


def test_a_template_of_the_users_own_replaces_the_sources(tmp_path):
    source = write_folder(tmp_path / "in")
    out = export_all(tmp_path / "out", source, chat_template="{{ mine }}")
    assert (out / "chat_template.jinja").read_text() == "{{ mine }}"


def test_no_folder_is_left_when_something_fails(tmp_path):
    source = write_folder(tmp_path / "in")
    tensors = random_tensors(QWEN2)

    def read(name):
        if name == "model.layers.3.mlp.up_proj.weight":
            raise OSError(28, "No space left on device")
        return tensors[name]

    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "out", source, SHAPES, read)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, "bfloat16", "is not finite in bfloat16"),
        (np.inf, "float32", "is not finite in float32"),
        (1e5, "float16", "overflows in float16"),
    ],
)
def test_values_that_would_poison_the_model_are_refused(tmp_path, value, dtype, message):
    tensors = random_tensors(QWEN2)
    tensors["model.layers.2.mlp.gate_proj.weight"][5, 6] = value
    source = write_folder(tmp_path / "in")
    with pytest.raises(ValueError, match=rf"model.layers.2.mlp.gate_proj.weight .*{message}"):
        export_all(tmp_path / "out", source, tensors, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_an_existing_export_is_never_overwritten(tmp_path):
    source = write_folder(tmp_path / "in")
    (tmp_path / "out").mkdir()
    export_all(tmp_path / "out", source)
    with pytest.raises(FileExistsError, match="choose another export folder"):
        export_all(tmp_path / "out", source)


def test_parameters_of_another_model_are_refused(tmp_path):
    source = write_folder(tmp_path / "in", QWEN2 | {"vocab_size": 271})
    with pytest.raises(ValueError, match=r"2 differ.*lm_head.weight, \(272, 64\) here and \(271"):
        export_all(tmp_path / "out", source)
    with pytest.raises(ValueError, match="dtype is 'int8'; supported: bfloat16, float16, float32"):
        export_all(tmp_path / "out", source, dtype="int8")
