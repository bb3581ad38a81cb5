import subprocess
import sys

import jax
import pytest

from slidedp_jax.models.config import ModelConfig, RopeParameters, config_names, named_config
from slidedp_jax.models.decoder import build

# Counts stated on the public model cards or by the files' own sizes.
PUBLISHED_COUNTS = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-3-1b": 999_885_952,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_counts_equal_the_published_ones(name):
    assert named_config(name).num_parameters == PUBLISHED_COUNTS[name]


@pytest.mark.parametrize("name", config_names())
def test_shapes_equal_those_of_the_modules(name):
    config = named_config(name)
    model = build(config)
    of_modules = {
        full_name: leaf.shape
        for stage in model.stages()
        for full_name, leaf in zip(
            stage.parameter_names(), jax.tree.leaves(stage.shapes), strict=True
        )
    }
    assert of_modules == config.parameter_shapes()
    assert config.num_parameters == (
        config.num_embedding_parameters
        + config.num_hidden_layers * config.num_layer_parameters
        + config.num_head_parameters
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("olmoe-1b-7b", 1.3),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("qwen3-30b-a3b", 3.35),
        ("qwen3-235b-a22b", 22),
        ("mixtral-8x7b", 12.9),
    ],
)
def test_active_parameters_are_the_published_ones(name, billions):
    assert named_config(name).num_active_parameters == pytest.approx(billions * 1e9, rel=0.02)


def test_dense_models_are_active_as_a_whole():
    config = named_config("qwen3-4b")
    assert config.num_active_parameters == config.num_parameters


def test_layers_with_and_without_experts_count_apart():
    every = named_config("tiny-moe")
    other = ModelConfig(**(vars(every) | {"sparse_layers": (False, True) * 2}))
    assert other.num_layer_parameters == every.num_layer_parameters
    # Experts 6 x 3 x 44 x 64 and a router of 6 x 64, against 3 x 160 x 64.
    assert every.num_parameters - other.num_parameters == 2 * (50_688 + 384 - 30_720)
    dense, sparse = other.layer_shapes(0), other.layer_shapes(1)
    assert dense["mlp.gate_proj.weight"] == (160, 64)
    assert sparse["mlp.experts.gate_up_proj"] == (6, 88, 64)
    assert not {name for name in dense if "experts" in name}


def test_every_bias_flag_adds_its_parameters():
    plain = named_config("tiny")
    flags = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
    biased = ModelConfig(**(vars(plain) | flags))
    added = biased.layer_shapes().keys() - plain.layer_shapes().keys()
    assert added == {
        *(f"self_attn.{x}_proj.bias" for x in "qkvo"),
        *(f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")),
    }
    # q 128, k and v 64, o 64; gate and up 160, down 64.
    assert biased.num_layer_parameters - plain.num_layer_parameters == 128 + 3 * 64 + 320 + 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'gelu_pytorch_tanh'"),
        ({"layer_windows": (None, 8)}, "2 entries for 4 layers"),
        ({"layer_windows": (0,) * 4}, "a window is at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_experts_per_tok": 2}, "num_experts is 0, but num_experts_per_tok says otherwise"),
        ({"num_experts": 4, "moe_intermediate_size": 8}, "num_experts_per_tok is 0"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, "moe_intermediate_size is 0"),
        ({"sparse_layers": (True,)}, "1 entries for 4 layers"),
        ({"clip_qkv": -1.0}, "clip_qkv is -1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(vars(named_config("tiny")) | change))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "made-up"}, "supported kinds: default, linear, dynamic, llama3, yarn"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    ],
)
def test_rope_parameters_without_meaning_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        RopeParameters(**parameters)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qwen9'; known: .*qwen3-4b"):
        named_config("qwen9")


def test_config_imports_no_jax():
    code = "import sys, models.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
