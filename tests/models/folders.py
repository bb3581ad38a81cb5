"""Small Hugging Face folders, written with the safetensors package (not with our own writer)."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from slidedp_jax.models.hf_config import parse_config

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "float32",
}

TOKENIZER_FILES = {
    "tokenizer.json": b'{"version": "1.0",   "odd": "spacing"}',
    "tokenizer_config.json": b'{"eos_token": "<|im_end|>"}\n',
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}é\r\n{% endfor %}".encode(),
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "merges.txt": b"#version: 0.2\n",
    "LICENSE": b"terms",
}


def random_tensors(raw_config, dtype=np.float32, seed=0):
    """Name -> random array for every parameter that the configuration describes."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in parse_config(raw_config).parameter_shapes().items()
    }


def split_in_three(tensors):
    """Shard file name -> tensors, as an ordinary export of three shards."""
    names = list(tensors)
    parts = [names[start::3] for start in range(3)]
    return {
        f"model-0000{number}-of-00003.safetensors": {name: tensors[name] for name in part}
        for number, part in enumerate(parts, start=1)
    }


def write_folder(folder: Path, raw_config=QWEN2, tensors=None, *, sharded=True) -> Path:
    """A complete folder: configuration, weights and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(raw_config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2))
    for name, content in TOKENIZER_FILES.items():
        (folder / name).write_bytes(content)
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    shards = split_in_three(tensors)
    write_index(folder, {name: file for file, part in shards.items() for name in part})
    for file, part in shards.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    return folder


def write_index(folder: Path, weight_map) -> None:
    """`model.safetensors.index.json` with this weight map."""
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path):
    """The weight map of the folder's index."""
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
