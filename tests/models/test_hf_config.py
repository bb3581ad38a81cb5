import json

import pytest
from folders import QWEN2

from slidedp_jax.models.config import ModelConfig, RopeParameters
from slidedp_jax.models.hf_config import parse_config, read_config

LLAMA = {
    **{k: v for k, v in QWEN2.items() if k not in ("rope_theta", "use_sliding_window")},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN3_MOE = {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN3_MOE |= EXPERTS
QWEN2_MOE = {**QWEN2, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
QWEN2_MOE |= EXPERTS | {"shared_expert_intermediate_size": 96}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
OLMOE = {**LLAMA, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
OLMOE |= {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def test_every_field_of_a_qwen2():
    assert parse_config(QWEN2) == ModelConfig(
        model_type="qwen2",
        vocab_size=272,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        attention_bias=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
    )


@pytest.mark.parametrize(
    ("raw", "head_dim"),
    [
        (QWEN3, 32),
        (without(QWEN3, "head_dim"), 128),
        (QWEN2, 16),
        (QWEN2 | {"head_dim": 24}, 24),
        (LLAMA | {"head_dim": None}, 16),
        (MISTRAL | {"head_dim": 8}, 8),
    ],
)
def test_head_dim_is_explicit_or_the_familys(raw, head_dim):
    assert parse_config(raw).head_dim == head_dim


@pytest.mark.parametrize(
    ("raw", "biases"),
    [
        (QWEN2, (True, False, False)),
        (QWEN2 | {"attention_bias": False}, (True, False, False)),
        (QWEN3, (False, False, False)),
        (QWEN3 | {"attention_bias": True}, (True, True, False)),
        (LLAMA, (False, False, False)),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        (MISTRAL | {"attention_bias": True}, (False, False, False)),
    ],
)
def test_biases_follow_the_family(raw, biases):
    config = parse_config(raw)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (raw["model_type"] == "qwen3")


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 4}, [None] * 4),
        (
            QWEN2 | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
            [None] * 4,
        ),
        (
            without(QWEN2 | {"use_sliding_window": 0}, "use_sliding_window")
            | {"sliding_window": 8, "max_window_layers": 1},
            [None] * 4,
        ),
        (QWEN2 | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, [None] * 4),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            [None, None, None, 8],
        ),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 8, None, 8],
        ),
        (MISTRAL | {"sliding_window": 8}, [8] * 4),
        (MISTRAL | {"sliding_window": None}, [None] * 4),
        (MISTRAL, [4096] * 4),
        (LLAMA | {"sliding_window": 8}, [None] * 4),
    ],
)
def test_windows_only_where_they_are_on(raw, windows):
    assert list(parse_config(raw).layer_windows) == windows


OLD = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    "layout",
    [
        OLD,
        OLD | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        NEW,
        OLD | NEW,
        NEW | {"rope_theta": 1e6},
    ],
    ids=["old", "old-rope_type", "new", "both", "new-with-theta"],
)
def test_all_rope_layouts_say_the_same(layout):
    expected = RopeParameters(rope_type="linear", rope_theta=1e6, factor=2.0)
    assert parse_config(without(QWEN2, "rope_theta") | layout).rope_parameters == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, RopeParameters(rope_theta=10_000.0)),
        ({"rope_scaling": None}, RopeParameters(rope_theta=10_000.0)),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeParameters(rope_theta=5e5),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            RopeParameters(
                rope_type="llama3",
                rope_theta=5e5,
                factor=8.0,
                original_max_position_embeddings=64,
            ),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            RopeParameters(rope_type="dynamic", factor=4.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},
            RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}},
            RopeParameters(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
        ),
    ],
)
def test_rope_kinds_and_their_defaults(rope, expected):
    assert parse_config(LLAMA | rope).rope_parameters == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            QWEN2 | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "'gpt2' with architectures .*Supported: Qwen2ForCausalLM .qwen2., Qwen3ForCausalLM",
        ),
        (QWEN2 | {"architectures": ["Qwen2ForTokenClassification"]}, "Supported: Qwen2For"),
        ({}, "model_type None"),
        (without(QWEN2, "hidden_size", "vocab_size"), "lacks vocab_size, hidden_size"),
        (without(QWEN2, "num_key_value_heads"), "lacks num_key_value_heads"),
        (QWEN2 | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (QWEN2 | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"auto_map": {"AutoModel": "own.py"}}, "auto_map"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout to 0.1"),
        (LLAMA | {"use_qk_norm": True}, "use_qk_norm to True"),
        (LLAMA | {"hidden_size": 66}, "66 is not a multiple of num_attention_heads 4"),
        (without(QWEN2, "rope_theta"), "no rope_theta"),
        (QWEN2 | NEW | {"rope_theta": 5.0}, "twice and differently.*rope_theta is 5.0 and 1000000"),
        (QWEN2 | {"rope_scaling": {"rope_type": "made-up"}}, "'made-up'; supported kinds: default"),
        (QWEN2 | {"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "'yarn' and rope_type"),
        (QWEN2 | {"rope_scaling": {"factor": 2.0}}, "names no rope_type"),
        (QWEN2 | {"rope_scaling": {"type": "linear"}}, "'linear' without factor"),
        (
            QWEN2 | {"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}},
            "RoPE keys twist",
        ),
        (
            QWEN2 | {"rope_scaling": without(LLAMA3_ROPE, "low_freq_factor")},
            "'llama3' without low_freq_factor",
        ),
        (
            QWEN2 | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "per kind of layer .full_attention",
        ),
        (QWEN2 | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (QWEN2 | {"use_sliding_window": True}, "no sliding_window"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1},
            "config.json has sliding_window 0; .* use_sliding_window to false",
        ),
        (MISTRAL | {"sliding_window": 0}, "config.json has sliding_window 0"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 8},
            "neither layer_types nor max_window_layers",
        ),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "supported kinds: full_attention"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "mixes"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(raw, message):
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (
            QWEN3_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "sparse_layers": (False, True, False, False),
                "qk_norm": True,
                "attention_bias": False,
            },
        ),
        (QWEN3_MOE | {"output_router_logits": True}, {"router_aux_loss_coef": 0.001}),
        (QWEN3_MOE | {"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.0}),
        (
            QWEN2_MOE,
            {
                "shared_expert_intermediate_size": 96,
                "norm_topk_prob": False,
                "attention_bias": True,
                "attention_output_bias": False,
            },
        ),
        (QWEN2_MOE | {"qkv_bias": False}, {"attention_bias": False}),
        (
            MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 0.02},
            {
                "moe_intermediate_size": 160,
                "norm_topk_prob": True,
                "router_aux_loss_coef": 0.02,
                "rms_norm_eps": 1e-6,
                "rope_parameters": RopeParameters(rope_theta=1e6),
            },
        ),
        (MIXTRAL | {"sliding_window": 8}, {"layer_windows": (8,) * 4}),
        (
            without(OLMOE, "num_key_value_heads", "rms_norm_eps"),
            {
                "clip_qkv": 8.0,
                "qk_norm_per_head": False,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-5,
                "norm_topk_prob": False,
                "rope_parameters": RopeParameters(),
            },
        ),
        (OLMOE | {"output_router_logits": True}, {"router_aux_loss_coef": 0.01}),
        (without(OLMOE, "num_experts") | {"num_local_experts": 4}, {"num_experts": 4}),
    ],
)
def test_what_experts_are_follows_the_family(raw, fields):
    config = parse_config(raw)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (QWEN3 | {"num_experts": 4}, "sets num_experts to 4"),
        (QWEN3 | {"clip_qkv": 4.0}, "sets clip_qkv to 4.0"),
        (QWEN3_MOE | {"clip_qkv": 4.0}, "sets clip_qkv to 4.0"),
        (without(QWEN3_MOE, "num_experts"), "lacks num_experts, which qwen3_moe"),
        (without(QWEN3_MOE, "moe_intermediate_size"), "lacks moe_intermediate_size"),
        (without(QWEN2_MOE, "shared_expert_intermediate_size"), "lacks shared_expert"),
        (QWEN3_MOE | {"num_local_experts": 4}, r"num_experts and num_local_experts of \[4, 8\]"),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise to 0.1"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (
            QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 8},
            "differ in which layers of a qwen2_moe",
        ),
    ],
)
def test_experts_that_are_not_supported_are_refused_by_name(raw, message):
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


# As published for google/gemma-3-1b-it, with other sizes.
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 16,
    "sliding_window_pattern": 6,
    "vocab_size": 272,
}
NEW_GEMMA = without(GEMMA, "rope_local_base_freq", "rope_theta", "sliding_window_pattern") | {
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    },
}


def test_every_field_of_a_gemma_in_both_layouts():
    assert parse_config(GEMMA) == ModelConfig(
        model_type="gemma3_text",
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        qk_norm=True,
        rope_parameters=RopeParameters(rope_theta=1e6),
        local_rope_parameters=RopeParameters(rope_theta=1e4),
        layer_windows=(16,) * 5 + (None, 16),
        hidden_act="gelu_pytorch_tanh",
        norms_add_one=True,
        norms_after=True,
        scale_embeddings=True,
        query_pre_attn_scalar=256.0,
    )
    assert parse_config(NEW_GEMMA) == parse_config(GEMMA)
    scaled = parse_config(GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope_parameters == RopeParameters(rope_type="linear", rope_theta=1e6, factor=8.0)
    assert scaled.local_rope_parameters == RopeParameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping to 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping to 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types"),
        ({"model_type": "gemma3", "architectures": None}, "'gemma3', which is not supported"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta for all layers; .* one set each"),
    ],
)
def test_other_gemmas_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        parse_config(GEMMA | change)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=r"config\.json does not exist.*model in .*export\."
    ):
        read_config(tmp_path)
    (tmp_path / "export" / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"config\.json does not exist.*tokenizer's files\.$"
    ):
        read_config(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"a checkpoint: `slidedp export .*step_00000002 F"):
        read_config(checkpoint)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_config(tmp_path) == parse_config(QWEN2)
