"""The script API in a dozen lines: a small Qwen3-shaped model learns one batch by heart.

python scripts/script_api_example.py
"""

import numpy as np
import optax

import slidedp_jax
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.decoder import build
from slidedp_jax.this_machine import plan_for

slidedp_jax.configure()  # before the first use of JAX; takes the GPUs if there are any
config = ModelConfig(
    model_type="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    qk_norm=True,
)
plan = plan_for(config, rows_per_step=8, tokens_per_row=64)
token_ids = np.random.default_rng(0).integers(0, config.vocab_size, (8, 64))

with slidedp_jax.Trainer(
    build(config), optax.adamw(3e-3), strategy=plan.strategy, max_grad_norm=1.0
) as trainer:
    for _ in range(20):
        metrics = trainer.step({"input_ids": token_ids, "labels": token_ids})
        print(f"step {metrics.step}: loss {metrics.loss:.3f}, grad norm {metrics.grad_norm:.3f}")
    weights = trainer.parameters()  # full name -> float32 array
print(f"{len(weights)} arrays, such as model.norm.weight {weights['model.norm.weight'].shape}")
