"""Make a small model, its tokenizer and real English training rows, without any download.

    python scripts/make/make_demo_folder.py OUT [--experts 8]

writes

    OUT/model/        config.json (Qwen3 shape, about 1.2 million parameters; with --experts an
                      OLMoE's, in which a token visits two of them), model.safetensors (random
                      weights), tokenizer.json and tokenizer_config.json (byte-level BPE
                      with a ChatML template), generation_config.json
    OUT/train.jsonl   conversations about Python, one per line
    OUT/eval.jsonl    every twelfth of them, not in train.jsonl

The text is the language reference that every Python carries (`pydoc_data.topics`) and the
docstrings of its standard modules, so it differs a little between Python versions and is the same
on every machine with the same version.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PASSAGE_CHARACTERS = 600
PASSAGES_PER_ROW = 2
EVAL_EVERY = 12


def make_demo_folder(out: Path, *, seed: int = 0, vocab_size: int = 2048, experts: int = 0) -> None:
    """Write the demo folder.

    Args:
      out: folder to make; must not exist or be empty.
      seed: of the random weights.
      vocab_size: token ids, the three special ones and 256 bytes included.
      experts: of each layer; 0 for a dense model.
    """
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty; name a folder that does not exist, or remove it")
    model = out / "model"
    model.mkdir(parents=True)
    rows = list(conversations())
    write_tokenizer(model, rows, vocab_size)
    config = model_config(vocab_size)
    if experts:
        config = with_experts(config, experts)
    write_json(model / "config.json", config)
    write_json(
        model / "generation_config.json",
        {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False},
    )
    save_file(initial_weights(config, seed), model / "model.safetensors", metadata={"format": "pt"})
    held_out = [row for i, row in enumerate(rows) if i % EVAL_EVERY == EVAL_EVERY - 1]
    rest = [row for i, row in enumerate(rows) if i % EVAL_EVERY != EVAL_EVERY - 1]
    for name, part in (("train", rest), ("eval", held_out)):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out}: {len(rest)} training rows, {len(held_out)} evaluation rows, {model}")


# Text.


def conversations() -> Iterator[dict[str, Any]]:
    """Rows about the topics of the language reference, then about the standard modules."""
    for name, text in sorted(topics.topics.items()):
        parts = passages(text)
        for start in range(0, len(parts), PASSAGES_PER_ROW):
            messages = []
            for i, part in enumerate(parts[start : start + PASSAGES_PER_ROW], start=start):
                question = (
                    f'What does the Python manual say about "{name}"?' if i == 0 else "Go on."
                )
                if i == start and start:
                    question = f'Go on about "{name}", part {i + 1}.'
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": part})
            yield {"messages": messages}
    for name, docstring in module_docstrings():
        yield {
            "messages": [
                {"role": "user", "content": f'What is the Python module "{name}" for?'},
                {"role": "assistant", "content": passages(docstring)[0]},
            ]
        }


def passages(text: str) -> list[str]:
    """A text in parts of about `PASSAGE_CHARACTERS`, cut between paragraphs or else lines."""
    parts: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        separator = "\n\n"
        whole = len(paragraph) <= PASSAGE_CHARACTERS
        for piece in [paragraph] if whole else paragraph.split("\n"):
            if parts and len(parts[-1]) + len(piece) < PASSAGE_CHARACTERS:
                parts[-1] += separator + piece
            else:
                parts.append(piece)
            separator = "\n"
    return [part.strip() for part in parts]  # else indentation joins the line break before it


def module_docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of the standard library's top modules, read without importing them."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        path = library / f"{name}.py"
        if not path.exists():
            path = library / name / "__init__.py"
        if name.startswith("_") or not path.exists():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the modules' own source
            docstring = ast.get_docstring(ast.parse(path.read_bytes()))
        if docstring and len(docstring) > 80:
            yield name, docstring


# Tokenizer.


def write_tokenizer(folder: Path, rows: list[dict[str, Any]], vocab_size: int) -> None:
    """Train a byte-level BPE on the rows and write it as a Hugging Face folder has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        sys.exit(
            f"the text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}; ask for fewer"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    )


# Model.


def model_config(vocab_size: int) -> dict[str, Any]:
    """A Qwen3 configuration, small and with every ratio of the family in it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 4,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def with_experts(config: dict[str, Any], experts: int) -> dict[str, Any]:
    """An OLMoE configuration, else of the same size: two experts are as wide as the dense block."""
    foreign = ("head_dim", "use_sliding_window", "sliding_window", "max_window_layers")
    return {name: value for name, value in config.items() if name not in foreign} | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": config["intermediate_size"] // 2,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
    }


def initial_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names: N(0, initializer_range), norms 1."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_experts", 0)
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    block = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (queries if experts else head,),
            "self_attn.k_norm": (keys if experts else head,),
            "post_attention_layernorm": (hidden,),
        }
        if experts:
            of_layer["mlp.gate"] = (experts, hidden)
        for prefix in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            of_layer |= {f"{prefix}.{name}": shape for name, shape in block.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    rng, spread = np.random.default_rng(seed), config["initializer_range"]
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (spread * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense model")
    arguments = parser.parse_args()
    make_demo_folder(arguments.out, seed=arguments.seed, experts=arguments.experts)
