"""What leaves after training is what came in: shapes, conventions, rows that nothing touched."""

import json

import numpy as np
import optax
import pytest

import slidedp_jax
from slidedp_jax.models.decoder import build
from slidedp_jax.models.hf_config import read_config
from slidedp_jax.models.hf_export import export
from slidedp_jax.models.hf_load import find_tensors, load_parameters
from slidedp_jax.planner.strategy import Strategy

VOCAB = 271  # a prime: no sharding divides it
USED = 259


def config_json(model_type: str, *, tied: bool) -> dict:
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


def make_folder(folder, model_type: str, *, tied: bool):
    """A folder of random weights, biases and norms included."""
    source = folder.with_name("source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config_json(model_type, tied=tied)))
    shapes = read_config(source).parameter_shapes()
    rng = np.random.default_rng(0)
    values = {name: 0.2 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    export(folder, source, shapes, values.__getitem__, dtype="float32", max_shard_bytes=20_000)
    return values


def train_and_export(folder, out, num_devices: int) -> dict[str, np.ndarray]:
    config = read_config(folder)
    shapes = config.parameter_shapes()
    strategy = Strategy(
        layers_per_chunk=1,
        rows_per_microbatch=1,
        num_microbatches=8 // num_devices,
        loss_chunk_tokens=64,
        compute_dtype="float32",
        num_host_devices=8,
        block_size=256,
    )
    token_ids = np.random.default_rng(1).integers(0, USED, (8, 16)).astype(np.int32)
    with slidedp_jax.Trainer(
        build(config),
        optax.adamw(1e-2, weight_decay=0.0),
        strategy=strategy,
        parameters=lambda write: load_parameters(folder, shapes, write),
        num_devices=num_devices,
        kernel_form="whole",
    ) as trainer:
        for _ in range(3):
            trainer.step({"input_ids": token_ids, "labels": token_ids})
        trainer.wait()
        export(out, folder, shapes, trainer.store.read, dtype="float32")
    written: dict[str, np.ndarray] = {}
    load_parameters(out, shapes, lambda name, values: written.update({name: values.copy()}))
    return written


@pytest.mark.parametrize(
    "num_devices",
    [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(8, marks=pytest.mark.thorough)],
)
def test_rows_of_a_prime_vocabulary_come_back_whole(tmp_path, num_devices):
    before = make_folder(tmp_path / "model", "qwen3", tied=False)
    after = train_and_export(tmp_path / "model", tmp_path / "out", num_devices)
    name = "model.embed_tokens.weight"
    assert after[name].shape == (VOCAB, 32)
    np.testing.assert_array_equal(after[name][USED:], before[name][USED:])
    assert (after[name][:USED] != before[name][:USED]).any()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCAB


@pytest.mark.thorough
def test_a_tied_model_is_exported_without_a_head(tmp_path):
    make_folder(tmp_path / "model", "qwen3", tied=True)
    train_and_export(tmp_path / "model", tmp_path / "out", 1)
    assert "lm_head.weight" not in find_tensors(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.thorough
def test_biases_of_qwen2_are_trained_and_exported(tmp_path):
    before = make_folder(tmp_path / "model", "qwen2", tied=False)
    after = train_and_export(tmp_path / "model", tmp_path / "out", 2)
    biases = [name for name in before if name.endswith(".bias")]
    assert len(biases) == 3 * 3
    for name in biases:
        assert (after[name] != before[name]).all(), name
