"""Known models as people spell them."""

import pytest

from slidedp_jax.models.config import config_names
from slidedp_jax.planner.model_names import preset_of


@pytest.mark.parametrize("name", config_names())
def test_a_presets_own_name(name):
    assert preset_of(name) == preset_of(name.upper()) == preset_of(f"owner/{name}") == name


@pytest.mark.parametrize(
    ("spelling", "preset"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_names_of_the_hub(spelling, preset):
    assert preset_of(spelling) == preset


@pytest.mark.parametrize(
    ("spelling", "near"),
    [
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A4B", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.3"),
        ("qwen3-8b-8b", "qwen3-8b"),
    ],
)
def test_others_are_refused_with_the_nearest(spelling, near):
    with pytest.raises(ValueError, match=rf"No preset is named '{spelling}'.*Did you mean.*{near}"):
        preset_of(spelling)
