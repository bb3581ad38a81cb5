"""Training in memory with nothing but jnp and optax: what a streamed step must equal.

A Qwen3 decoder written out once more, over a flat dict of parameters by Hugging Face name, with the
full score matrix, all logits and, of experts, every one on every token. Imports nothing of the
project but the description of shapes.

Letters: B rows, T tokens, D hidden, N query heads, K key-value heads, H head dim, V vocabulary,
E experts, F their width.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slidedp_jax.models.config import ModelConfig

IGNORED = -100


def initial_parameters(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every parameter random and of a size that matters, norms around 1."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in config.parameter_shapes().items():
        draw = rng.standard_normal(shape)
        is_norm = name.endswith("norm.weight")
        values[name] = (1 + 0.2 * draw if is_norm else 0.1 * draw).astype(np.float32)
    return values


def random_batch(
    config: ModelConfig, num_rows: int, num_tokens: int, *, packed: bool, seed: int = 1
) -> dict[str, np.ndarray]:
    """Rows with a few unsupervised tokens; packed: two documents and padding in each."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (num_rows, num_tokens), dtype=np.int32)
    labels = np.where(rng.random(ids.shape) < 0.3, IGNORED, ids).astype(np.int32)
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        ends = np.sort(rng.integers(2, num_tokens + 1, (num_rows, 2)), axis=1)
        index = np.arange(num_tokens)[None]
        segments = np.where(index < ends[:, :1], 1, np.where(index < ends[:, 1:], 2, 0))
        batch["segment_ids"] = segments.astype(np.int32)
    return batch


def rms_norm(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotary(x, positions, theta):
    """Rotates [B, T, N, H]: the two halves of a head are the parts of complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-jnp.arange(half) / half)
    turn = jnp.exp(1j * angles)[:, :, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def attention(config, weights, x, positions, visible):
    rows, tokens, _ = x.shape
    heads, groups = config.num_attention_heads, config.num_key_value_heads

    def project(name, count):
        return (x @ weights[f"self_attn.{name}_proj.weight"].T).reshape(rows, tokens, count, -1)

    def turned(name, count):
        normed = rms_norm(
            project(name, count),
            weights[f"self_attn.{name}_norm.weight"],
            config.rms_norm_eps,
        )
        return rotary(normed, positions, config.rope_parameters.rope_theta)

    q, k, v = turned("q", heads), turned("k", groups), project("v", groups)
    k, v = jnp.repeat(k, heads // groups, axis=2), jnp.repeat(v, heads // groups, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / config.head_dim**0.5
    shares = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
    attended = jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(rows, tokens, -1)
    return attended @ weights["self_attn.o_proj.weight"].T


def feed_forward(weights, x, prefix="mlp"):
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    return (gate * jax.nn.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def mixture(config, weights, x):
    """The chosen experts' results by weight and the shared expert's; logits, visits of tokens."""
    logits = x @ weights["mlp.gate.weight"].T
    shares = jax.nn.softmax(logits, axis=-1)
    chosen = jax.lax.top_k(shares, config.num_experts_per_tok)[1]
    is_chosen = jax.nn.one_hot(chosen, config.num_experts).sum(axis=2)
    own = shares * is_chosen
    if config.norm_topk_prob:
        own = own / own.sum(axis=-1, keepdims=True)
    gate, up = jnp.split(
        jnp.einsum("btd,efd->btef", x, weights["mlp.experts.gate_up_proj"]), 2, axis=-1
    )
    results = jnp.einsum(
        "btef,edf->bted", gate * jax.nn.sigmoid(gate) * up, weights["mlp.experts.down_proj"]
    )
    mixed = jnp.sum(results * own[..., None], axis=2)
    if config.shared_expert_intermediate_size:
        opened = jax.nn.sigmoid(x @ weights["mlp.shared_expert_gate.weight"].T)
        mixed = mixed + opened * feed_forward(weights, x, "mlp.shared_expert")
    return mixed, logits, is_chosen


def router_loss(config, z, routers, counted):
    """Load balance as transformers has it, z-loss; over all tokens of all layers at once."""
    logits = jnp.stack([logits for logits, _ in routers])
    visits = jnp.stack([is_chosen for _, is_chosen in routers])
    num_tokens = len(routers) * counted.sum()

    def mean(values):  # [L, B, T, ...]
        is_counted = counted.reshape(1, *counted.shape, *(1,) * (values.ndim - 3))
        return jnp.sum(values * is_counted, axis=(0, 1, 2)) / num_tokens

    balance = jnp.sum(mean(visits) * mean(jax.nn.softmax(logits)))
    size = mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return config.router_aux_loss_coef * config.num_experts * balance + z * size


def mean_loss(config, params, input_ids, labels, segment_ids, z=0.0, smoothing=0.0, z_loss=0.0):
    """Cross-entropy of every supervised next token, divided by their number in the whole batch.

    With experts, the routers' loss as well. `smoothing` and `z_loss` are those of the tokens.
    """
    routers = []
    tokens = input_ids.shape[1]
    index = jnp.arange(tokens)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = same & (index[:, None] >= index[None, :])[None]
    # The number of earlier tokens of the same document, which are contiguous.
    positions = visible.sum(axis=-1) - 1
    x = params["model.embed_tokens.weight"][input_ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in params.items()
            if name.startswith(prefix)
        }
        eps = config.rms_norm_eps
        normed = rms_norm(x, weights["input_layernorm.weight"], eps)
        x = x + attention(config, weights, normed, positions, visible)
        normed = rms_norm(x, weights["post_attention_layernorm.weight"], eps)
        if "mlp.gate.weight" in weights:
            mixed, *router = mixture(config, weights, normed)
            routers.append(router)
            x = x + mixed
        else:
            x = x + feed_forward(weights, normed)
    x = rms_norm(x, params["model.norm.weight"], config.rms_norm_eps)
    output = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    logits = x[:, :-1] @ params[output].T
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    wanted = labels[:, 1:]
    counts = (wanted != IGNORED) & same[:, index[1:], index[:-1]] & (segment_ids[:, 1:] != 0)
    of_wanted = jnp.take_along_axis(
        log_probabilities, jnp.where(counts, wanted, 0)[..., None], axis=-1
    )[..., 0]
    of_wanted = (1 - smoothing) * of_wanted + smoothing * log_probabilities.mean(axis=-1)
    of_wanted -= z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    loss = -jnp.sum(of_wanted * counts) / jnp.sum(counts)
    return loss + router_loss(config, z, routers, segment_ids > 0) if routers else loss


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(config, params, input_ids, labels, segment_ids, *coefficients):
    return jax.value_and_grad(mean_loss, argnums=1)(
        config, params, input_ids, labels, segment_ids, *coefficients
    )


def train(
    config,
    params,
    optimizer: optax.GradientTransformation,
    batches,
    z=0.0,
    smoothing=0.0,
    z_loss=0.0,
):
    """One step per batch; returns losses, gradient norms, parameters and optimizer state."""
    params = {name: jnp.asarray(value) for name, value in params.items()}
    state = optimizer.init(params)

    @jax.jit
    def apply(params, gradients, state):
        updates, state = optimizer.update(gradients, state, params)
        norm = jnp.sqrt(sum(jnp.sum(part**2) for part in gradients.values()))
        return optax.apply_updates(params, updates), state, norm

    losses, norms = [], []
    for batch in batches:
        segments = batch.get("segment_ids", np.ones_like(batch["input_ids"]))
        with jax.numpy_rank_promotion("allow"):
            loss, gradients = loss_and_gradients(
                config,
                params,
                batch["input_ids"],
                batch["labels"],
                segments,
                z,
                smoothing,
                z_loss,
            )
        params, state, norm = apply(params, gradients, state)
        losses.append(float(loss))
        norms.append(float(norm))
    return losses, norms, {name: np.asarray(value) for name, value in params.items()}, state
