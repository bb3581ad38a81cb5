"""One decoder layer with single parts exchanged, to learn what each part costs on a device.

With no option set it computes what `models.layers.DecoderLayer` computes, over the same parameter
tree. The *prototype* layer has no query and key norms, no rotary embedding and one flat parameter
array with matrices [in, out]. Letters as in `models.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slidedp_jax.models.attention import attend
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.rope import rotary_tables, rotate
from slidedp_jax.models.streamed import Batch

VARIANTS: dict[str, dict[str, Any]] = {
    "same parts": {},
    "no attention": {"attention": "none"},
    "no RoPE": {"rope": False},
    "no q/k norm": {"qk_norm": False},
    "no RoPE, no q/k norm": {"rope": False, "qk_norm": False},
    "norms in compute dtype": {"wide_norm": False},
    "matrices [in, out]": {"in_out": True},
    "fused q k v": {"fuse_qkv": True},
    "fused gate up": {"fuse_gate_up": True},
    "fused q k v and gate up": {"fuse_qkv": True, "fuse_gate_up": True},
    "checkpointed inside vjp": {"checkpoint": True},
}


def layer_fn(
    config: ModelConfig,
    *,
    attention: str,
    rope: bool = True,
    qk_norm: bool = True,
    wide_norm: bool = True,
    in_out: bool = False,
    fuse_qkv: bool = False,
    fuse_gate_up: bool = False,
    checkpoint: bool = False,
) -> Callable[[Any, jax.Array, Batch], jax.Array]:
    """(params, x, batch) -> x; with `in_out` the matrices in `params` are transposed."""
    head_dim = config.head_dim
    num_queries = config.num_attention_heads * head_dim
    num_keys = config.num_key_value_heads * head_dim
    out_axis = 1 if in_out else 0

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x, weight, (((x.ndim - 1,), (1 - out_axis,)), ((), ())))

    def joined(x: jax.Array, weights: list[jax.Array], sizes: list[int]) -> list[jax.Array]:
        y = matmul(x, jnp.concatenate(weights, axis=out_axis))
        return jnp.split(y, [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)], axis=-1)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if wide_norm else x
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normalised = (wide * lax.rsqrt(variance + config.rms_norm_eps)).astype(x.dtype)
        weight = jnp.expand_dims(weight.astype(wide.dtype), tuple(range(x.ndim - 1)))
        return (normalised.astype(wide.dtype) * weight).astype(x.dtype)

    def body(params: Any, x: jax.Array, batch: Batch) -> jax.Array:
        attn, mlp = params["self_attn"], params["mlp"]
        h = norm(x, params["input_layernorm"]["weight"])
        weights = [attn[name]["weight"] for name in ("q_proj", "k_proj", "v_proj")]
        if fuse_qkv:
            q, k, v = joined(h, weights, [num_queries, num_keys, num_keys])
        else:
            q, k, v = (matmul(h, weight) for weight in weights)
        q, k, v = (y.reshape(*y.shape[:2], -1, head_dim) for y in (q, k, v))
        if qk_norm and config.qk_norm:
            q, k = norm(q, attn["q_norm"]["weight"]), norm(k, attn["k_norm"]["weight"])
        if rope:
            cos, sin = rotary_tables(config, batch["positions"], batch.get("segment_ids"))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if attention == "none":
            groups = q.reshape(*k.shape[:3], -1, head_dim)
            attended = (groups + (k + v)[:, :, :, None]).reshape(q.shape)
        else:
            attended = attend(q, k, v, batch, window=None, implementation=attention)
        x = x + matmul(attended.reshape(*x.shape[:2], -1), attn["o_proj"]["weight"])
        h = norm(x, params["post_attention_layernorm"]["weight"])
        gate_up = [mlp["gate_proj"]["weight"], mlp["up_proj"]["weight"]]
        if fuse_gate_up:
            gate, up = joined(h, gate_up, [config.intermediate_size] * 2)
        else:
            gate, up = (matmul(h, weight) for weight in gate_up)
        return x + matmul(jax.nn.silu(gate) * up, mlp["down_proj"]["weight"])

    return jax.checkpoint(body) if checkpoint else body


Pair = tuple[jax.Array, jax.Array]


def one_pass_log_sum_exp(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) over the last axis, maximum and sum in one reading of memory."""

    def join(left: Pair, right: Pair) -> Pair:
        (left_max, left_sum), (right_max, right_sum) = left, right
        high = jnp.maximum(left_max, right_max)
        return high, left_sum * jnp.exp(left_max - high) + right_sum * jnp.exp(right_max - high)

    lowest = jnp.float32(np.finfo(np.float32).min)
    start = (lowest, jnp.float32(0))
    pair: Pair = lax.reduce((logits, jnp.ones_like(logits)), start, join, (logits.ndim - 1,))
    high, total = pair
    return high + jnp.log(total)


def transposed(params: Any) -> Any:
    """The same parameters with matrices [in, out]."""
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, params)


def prototype_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of the prototype layer in the order in which they lie in its flat array."""
    hidden, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "gate": (hidden, ffn),
        "up": (hidden, ffn),
        "down": (ffn, hidden),
        "n1": (hidden,),
        "n2": (hidden,),
    }


def prototype_fn(config: ModelConfig, *, attention: str) -> Callable[..., jax.Array]:
    """(flat params, x, batch) -> x."""
    shapes = prototype_shapes(config)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * scale).astype(x.dtype) * weight[None, None]

    def body(flat: jax.Array, x: jax.Array, batch: Batch) -> jax.Array:
        p, offset = {}, 0
        for name, shape in shapes.items():
            p[name] = flat[offset : offset + math.prod(shape)].reshape(shape)
            offset += math.prod(shape)
        h = norm(x, p["n1"])
        heads = (*x.shape[:2], -1, config.head_dim)
        q, k, v = ((h @ p[name]).reshape(heads) for name in ("q", "k", "v"))
        attended = attend(q, k, v, {}, window=None, implementation=attention)
        x = x + attended.reshape(*x.shape[:2], -1) @ p["o"]
        h = norm(x, p["n2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    return body
