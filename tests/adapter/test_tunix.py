"""google-tunix's Qwen3 and Qwen2, unmodified: streamed training is training in memory.

The reference calls the whole module, as its author meant it, under jax.grad and plain optax.
"""

import functools
import importlib.util
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_steps import next_token_loss, token_batches
from plain_steps import train as train_plainly
from safetensors.numpy import save_file
from streamed_steps import adamw, assert_equal_training, train

import slidedp_jax
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.models.loss import cross_entropy_sum

if importlib.util.find_spec("tunix") is None:
    pytest.skip("google-tunix is not installed; scripts/test.sh does it", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tunix's own code

VOCAB, ROWS, TOKENS, STEPS = 61, 6, 10, 5
SIZES = {
    "num_layers": 3,
    "vocab_size": VOCAB,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-6,
}


@functools.cache
def tunix(name: str):
    """One of its modules; every worker collects this file, and only one needs them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports are deprecated ones
        return importlib.import_module(f"tunix.{name}")


def build(family: str, tied: bool, **settings) -> nnx.Module:
    module = tunix(f"models.{family}.model")
    config = module.ModelConfig(**SIZES, use_tied_embedding=tied, **settings)
    return getattr(module, family.capitalize())(config, rngs=nnx.Rngs(5))


def causal_mask(tokens: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, tokens, tokens), bool))


def adapt(model: nnx.Module) -> slidedp_jax.Adapted:
    config = model.config

    def qwen3_layer(module, x, batch):
        return module(x, batch["positions"], None, causal_mask(x.shape[1]))[1]

    def qwen2_layer(module, x, batch):
        sin, cos = tunix("models.qwen2.model")._generate_pos_embeddings(
            batch["positions"], config.head_dim, config.rope_theta
        )
        return module(x, None, causal_mask(x.shape[1]), sin, cos)[1]

    def head_loss(module, x, batch):
        if module.config.use_tied_embedding:
            output = module.embedder.input_embedding[...]
        else:
            output = module.lm_head.w[...].T
        x = module.final_norm(x).reshape(-1, x.shape[-1])
        return cross_entropy_sum(x, output, batch["targets"].reshape(-1), chunk_tokens=16)

    with jax.numpy_rank_promotion("allow"):
        return slidedp_jax.adapt(
            model,
            layers="layers",
            embed=lambda module, batch: module.embedder.encode(batch["input_ids"]),
            layer={"Qwen3": qwen3_layer, "Qwen2": qwen2_layer}[type(model).__name__],
            head_loss=head_loss,
            vocab_size=VOCAB,
        )


def plainly(model: nnx.Module, batches):
    graph, parameters = nnx.split(model)
    positions = jnp.tile(jnp.arange(TOKENS), (ROWS, 1))

    def loss(parameters, batch, number):
        module = nnx.merge(graph, parameters)
        logits, _ = module(batch["input_ids"], positions, None, causal_mask(TOKENS))
        return next_token_loss(logits, batch["labels"])

    with jax.numpy_rank_promotion("allow"):
        losses, parameters = train_plainly(loss, parameters, adamw(), batches)
    return losses, named_leaves(nnx.to_pure_dict(parameters))


@pytest.fixture(scope="module")
def reference():
    runs = {}

    def run(family: str, tied: bool):
        if (family, tied) not in runs:
            batches = token_batches(VOCAB, ROWS, TOKENS, STEPS)
            runs[family, tied] = plainly(build(family, tied), batches)
        return runs[family, tied]

    return run


@pytest.mark.parametrize(
    ("family", "tied", "devices", "layers"),
    [
        pytest.param("qwen3", True, 1, 1, marks=pytest.mark.thorough),
        pytest.param("qwen3", True, 3, 1, marks=pytest.mark.thorough),
        ("qwen3", False, 3, 2),
        pytest.param("qwen2", False, 1, 1, marks=pytest.mark.thorough),
        pytest.param("qwen2", False, 3, 2, marks=pytest.mark.thorough),
    ],
)
def test_streamed_training_equals_training_of_the_module(family, tied, devices, layers, reference):
    model = build(family, tied)
    adapted = adapt(model)
    assert adapted.model.tied == tied
    assert len(set(adapted.model.layer_fns)) == 1
    batches = token_batches(VOCAB, ROWS, TOKENS, STEPS)
    losses, parameters = train(adapted, batches, devices=devices, layers=layers)
    assert_equal_training(losses, parameters, *reference(family, tied))
    assert adapted.write_back(parameters) is model
    held = named_leaves(nnx.to_pure_dict(nnx.state(model)))
    assert held.keys() == parameters.keys()
    for name, values in parameters.items():
        np.testing.assert_array_equal(held[name], values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "remat"),
    [
        ("qwen3", "BLOCK"),
        pytest.param("qwen3", "DECODER", marks=pytest.mark.thorough),
        pytest.param("qwen2", "BLOCK", marks=pytest.mark.thorough),
    ],
)
def test_its_own_setting_to_recompute(family, remat, reference):
    """Its layers then call nnx.remat."""
    remat_config = tunix(f"models.{family}.model").RematConfig[remat]
    adapted = adapt(build(family, True, remat_config=remat_config))
    batches = token_batches(VOCAB, ROWS, TOKENS, STEPS)
    losses, parameters = train(adapted, batches, devices=2, layers=2)
    assert_equal_training(losses, parameters, *reference(family, True))


def write_hf_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """A Qwen3 model of random weights as Hugging Face lays it out: matrices [out, in]."""
    rng = np.random.default_rng(0)
    d, f, h = SIZES["embed_dim"], SIZES["hidden_dim"], SIZES["head_dim"]
    n, k = SIZES["num_heads"], SIZES["num_kv_heads"]
    shapes = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    for index in range(SIZES["num_layers"]):
        layer = {
            "self_attn.q_proj": (n * h, d),
            "self_attn.k_proj": (k * h, d),
            "self_attn.v_proj": (k * h, d),
            "self_attn.o_proj": (d, n * h),
            "self_attn.q_norm": (h,),
            "self_attn.k_norm": (h,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    tensors = {
        name: (rng.standard_normal(shape) * 0.1).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.thorough
def test_its_own_loading_and_saving_go_on_working(tmp_path):
    tensors = write_hf_folder(tmp_path)
    config = tunix("models.qwen3.model").ModelConfig(**SIZES, use_tied_embedding=True)
    model = tunix("models.qwen3.params").create_model_from_safe_tensors(str(tmp_path), config)
    np.testing.assert_array_equal(
        model.layers[1].mlp.up_proj.kernel[...], tensors["model.layers.1.mlp.up_proj.weight"].T
    )
    adapted = adapt(model)
    losses, parameters = train(adapted, token_batches(VOCAB, ROWS, TOKENS, 2), devices=2)
    assert losses[1] != losses[0]
    adapted.write_back(parameters)
    checkpoints = tunix("sft.checkpoint_manager").CheckpointManager
    manager = checkpoints(str(tmp_path / "saved"))
    assert manager.save(1, model, force=True)
    manager.close()
    restored = build("qwen3", tied=True)
    step, _ = checkpoints(str(tmp_path / "saved")).maybe_restore(restored)
    assert step == 1
    for name, values in named_leaves(nnx.to_pure_dict(nnx.state(restored))).items():
        np.testing.assert_array_equal(values, parameters[name], err_msg=name)
