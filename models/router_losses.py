"""What a mixture's routers have to answer for: load balance, size of logits, and figures.

All of it is a function of sums over the tokens of a whole step, which layers give
(`models.streamed.LayerOutput.sums`); so it means the same for any microbatches and devices.

- Load balance, as Hugging Face's `load_balancing_loss_func` has it (Switch Transformer,
  arXiv:2101.03961, equations 4 to 6, over all layers at once): E sum_e (v_e / R) (p_e / R), with
  the visits v_e and the softmax's shares p_e of expert e, and R tokens, all summed over the layers.
  Visits are counts and have no derivative. transformers takes it of each call's rows and averages
  over calls; here it is that of the whole step, which is the same where a step is one call.
- z-loss (ST-MoE, arXiv:2202.08906, equation 5): the mean over tokens and layers of the square of
  the logits' logsumexp.

Which tokens count: with `segment_ids`, all but padding. Without, padding on a row's right is known
by its missing supervision: a token counts if a supervised target lies at its predecessor or later.

Letters: B rows, T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from slidedp_jax.models.batch_arrays import IGNORED


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Coefficients of the losses, 0 for none.

    Attributes:
      load_balance: Hugging Face's `router_aux_loss_coef`.
      z: of the z-loss.
    """

    load_balance: float = 0.0
    z: float = 0.0


class RouterSums(NamedTuple):
    """One layer's sums over tokens that count, float32.

    Attributes:
      tokens: [], their number.
      visits: [E], how many visit each expert.
      shares: [E], of the softmax over experts.
      squares: [], of the logits' logsumexp.
      entropy: [], of the softmax, in nats.
    """

    tokens: jax.Array
    visits: jax.Array
    shares: jax.Array
    squares: jax.Array
    entropy: jax.Array


def counted_tokens(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Which tokens are no padding, bool [B, T]."""
    if "segment_ids" in batch:
        return batch["segment_ids"] > 0
    supervised = batch["targets"] != IGNORED
    at_or_after = (
        jnp.flip(lax.cummax(jnp.flip(supervised, axis=1).astype(jnp.int32), axis=1), 1) > 0
    )
    return jnp.concatenate([at_or_after[:, :1], at_or_after[:, :-1]], axis=1)


def router_sums(
    logits: jax.Array, shares: jax.Array, chosen: jax.Array, counted: jax.Array
) -> RouterSums:
    """A layer's sums.

    Args:
      logits: float32 [B, T, E].
      shares: float32 [B, T, E], their softmax.
      chosen: int32 [B, T, k].
      counted: bool [B, T].
    """
    experts = lax.broadcasted_iota(chosen.dtype, (1, 1, 1, shares.shape[-1]), 3)
    weight = counted.astype(jnp.float32)
    visits = jnp.sum(chosen[..., None] == experts, axis=2, dtype=jnp.float32)
    size = jax.nn.logsumexp(logits, axis=-1)
    entropy = size - jnp.sum(shares * logits, axis=-1)
    return RouterSums(
        tokens=jnp.sum(weight),
        visits=lax.stop_gradient(jnp.sum(visits * weight[..., None], axis=(0, 1))),
        shares=jnp.sum(shares * weight[..., None], axis=(0, 1)),
        squares=jnp.sum(jnp.square(size) * weight),
        entropy=lax.stop_gradient(jnp.sum(entropy * weight)),
    )


def loss_of_sums(
    losses: RouterLosses, layers: tuple[RouterSums, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The routers' loss over a step, and what is reported.

    Returns:
      The loss with its coefficients, and by name, without coefficients: `load_balance_loss`,
      `router_z_loss`; `busiest_expert_share`, the largest share of visits that one expert of any
      layer has (1 / E where all are alike, 1 / k at most); `router_entropy`, the mean over tokens
      and layers (log E where all experts have equal shares).
    """
    total = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *layers)
    tokens, num_experts = jnp.maximum(total.tokens, 1.0), total.visits.shape[0]
    balance = num_experts * jnp.sum(total.visits * total.shares) / jnp.square(tokens)
    size = total.squares / tokens
    of_layers = jnp.stack([layer.visits for layer in layers])
    busiest = of_layers / jnp.maximum(jnp.sum(of_layers, axis=1, keepdims=True), 1.0)
    figures = {
        "load_balance_loss": balance,
        "router_z_loss": size,
        "busiest_expert_share": jnp.max(busiest),
        "router_entropy": total.entropy / tokens,
    }
    return losses.load_balance * balance + losses.z * size, figures
