"""Logits, gradients and files against transformers (PyTorch, eager attention, float32)."""

import json

import jax
import numpy as np
import plain_model
import pytest
from lanes import mostly_thorough
from safetensors.numpy import load_file

from slidedp_jax.models.decoder import build
from slidedp_jax.models.hf_config import parse_config, read_config
from slidedp_jax.models.hf_export import export
from slidedp_jax.models.hf_load import load_parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

NUM_TOKENS = 40
SHAPES = {
    "vocab_size": 271,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | parameters}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
EXPERTS |= rope("default")

CASES = {
    "qwen2": ("Qwen2", rope("default", rope_theta=1e6)),
    "qwen2-tied-yarn": (
        "Qwen2",
        {"tie_word_embeddings": True}
        | rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1} | rope("default"),
    ),
    "qwen2-window-off": (
        "Qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "num_hidden_layers": 1}
        | rope("default"),
    ),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True} | rope("default")),
    "qwen3-bias-linear": (
        "Qwen3",
        {"head_dim": 32, "attention_bias": True} | rope("linear", factor=2.0),
    ),
    "llama-llama3": (
        "Llama",
        {"rms_norm_eps": 1e-5}
        | rope(
            "llama3",
            rope_theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-bias-dynamic": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 16}
        | rope("dynamic", factor=2.0),
    ),
    "llama-mha-yarn": (
        "Llama",
        {"num_key_value_heads": 4}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=0.5,
            mscale=0.7,
            mscale_all_dim=0.9,
            truncate=False,
        ),
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 24} | rope("default")),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "num_experts_per_tok": 3},
    ),
    "qwen3_moe-dense-among-them": (
        "Qwen3Moe",
        EXPERTS
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"attention_bias": True},
    ),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9} | rope("default")),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            }
        },
    ),
    "olmoe-clipped": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.5} | rope("default"),
    ),
}


def reference_model(family, changes):
    """A random torch model, with the parameters that start out trivial made random too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPES | changes))
    config._attn_implementation = "eager"
    name = family.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0.0 if family == "Gemma3Text" else 1.0, 0.2)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.1)
    return model


def torch_logits_and_gradients(model, ids):
    ids = torch.tensor(ids, dtype=torch.long)
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), gradients


def our_logits_and_gradients(folder, ids):
    config = read_config(folder)
    model = plain_model.built(config, loss_chunk_tokens=32)
    values = {}
    load_parameters(
        folder, config.parameter_shapes(), lambda name, value: values.update({name: value})
    )

    def loss_and_logits(trees, batch):
        x = plain_model.hidden_states(model, trees, batch)
        embed = trees["embed"] if model.tied else None
        loss = model.head_loss_fn(trees["head"], embed, x, batch)
        return loss, model.head_logits_fn(trees["head"], embed, x)

    trees = plain_model.model_arrays(model, values)
    (loss, logits), gradients = plain_model.quick_jit(
        jax.value_and_grad(loss_and_logits, has_aux=True)
    )(trees, plain_model.rows_batch(ids))
    return np.asarray(logits), float(loss), plain_model.flat_names(model, gradients)


@pytest.mark.parametrize(
    "case",
    mostly_thorough(CASES, ("qwen2-windows", "qwen3-tied", "llama-llama3", "llama-mha-yarn")),
)
def test_logits_and_every_gradient_equal_transformers(tmp_path, case):
    model = reference_model(*CASES[case])
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    ids = np.random.default_rng(1).integers(0, SHAPES["vocab_size"], (2, NUM_TOKENS))
    expected_logits, expected_loss, expected_gradients = torch_logits_and_gradients(model, ids)
    logits, loss, gradients = our_logits_and_gradients(tmp_path, ids)
    assert np.abs(logits - expected_logits).max() <= 1e-4 * np.abs(expected_logits).max()
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        error = np.linalg.norm(gradients[name] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected), name


@pytest.mark.parametrize(
    "case", ["qwen2", "qwen3-tied", "llama-bias-dynamic", "qwen2_moe", "mixtral", "gemma3"]
)
def test_round_trip_loads_in_transformers_bit_for_bit(tmp_path, case):
    model = reference_model(*CASES[case])
    model.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    shapes = read_config(tmp_path / "in").parameter_shapes()
    values = {}
    load_parameters(tmp_path / "in", shapes, lambda name, value: values.update({name: value}))
    export(
        tmp_path / "out",
        tmp_path / "in",
        shapes,
        values.__getitem__,
        dtype="float32",
        max_shard_bytes=100_000,
    )
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    expected = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    tensors = [
        {
            k: v.tobytes()
            for file in (tmp_path / d).glob("*.safetensors")
            for k, v in load_file(file).items()
        }
        for d in ("in", "out")
    ]
    assert tensors[0] == tensors[1]


@pytest.mark.parametrize(
    ("case", "masked"),
    [
        ("mixtral", True),
        *(
            pytest.param(*which, marks=pytest.mark.thorough)
            for which in (
                ("mixtral", False),
                ("olmoe-clipped", True),
                ("qwen3_moe-dense-among-them", True),
                ("qwen3_moe-dense-among-them", False),
            )
        ),
    ],
)
def test_the_loss_with_load_balance_and_its_gradients_equal_transformers(tmp_path, case, masked):
    family, changes = CASES[case]
    model = reference_model(
        family, changes | {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    )
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, SHAPES["vocab_size"], (2, NUM_TOKENS))
    mask, labels = np.ones_like(ids), ids.copy()
    if masked:
        mask[0, 30:], labels[0, 30:] = 0, -100
    got = model(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    got.loss.backward()
    assert got.aux_loss > 0.5
    config = read_config(tmp_path)
    ours, values = build(config), {}
    load_parameters(
        tmp_path, config.parameter_shapes(), lambda name, value: values.update({name: value})
    )
    targets = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    batch = plain_model.rows_batch(ids, targets)

    def whole_loss(trees):
        x, sums = plain_model.hidden_states_and_sums(ours, trees, batch)
        embed = trees["embed"] if ours.tied else None
        of_tokens = ours.head_loss_fn(trees["head"], embed, x, batch) / (targets != -100).sum()
        of_routers, figures = ours.loss_of_sums(sums)
        return of_tokens + of_routers, figures["load_balance_loss"]

    (loss, balance), gradients = plain_model.quick_jit(
        jax.value_and_grad(whole_loss, has_aux=True)
    )(plain_model.model_arrays(ours, values))
    assert float(balance) == pytest.approx(got.aux_loss.item(), rel=1e-5)
    assert float(loss) == pytest.approx(got.loss.item(), rel=1e-5)
    gradients = plain_model.flat_names(ours, gradients)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.numpy()
        error = np.linalg.norm(gradients[name] - expected)
        assert error <= 1e-4 * np.linalg.norm(expected), name


OLD_LAYOUTS = {
    "qwen2": {"rope_theta": 1e6},
    "qwen2-tied-yarn": {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3-bias-linear": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama-bias-dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}


@pytest.mark.parametrize("case", OLD_LAYOUTS)
def test_the_older_layout_reads_like_the_one_transformers_writes(tmp_path, case):
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SHAPES | changes))
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    assert parse_config(old | OLD_LAYOUTS[case]) == parse_config(new)
