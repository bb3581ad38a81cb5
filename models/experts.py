"""Mixtures of experts: a router chooses k experts for each token, whose results add up by weight.

The choice and its weights are `decided`: backward is given those of forward. The weights are
multiplied to what goes into the last product, which is linear, and not to its result as in Hugging
Face's code: so no gradient needs that product's result, and backward does not compute it again.

Letters: B rows, T tokens, D hidden, F width of an expert, E experts, k experts per token, P rows
of visits (`models.expert_groups`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.dense import MLP, Linear, activation
from slidedp_jax.models.expert_groups import (
    block_rows,
    collect,
    dispatch,
    group_visits,
    of_rows,
)
from slidedp_jax.models.grouped_products import grouped_product
from slidedp_jax.models.named_results import PRODUCTS, decided
from slidedp_jax.models.product_forms import PORTABLE, Forms

ResolveForms = Callable[..., Forms]
"""(dtype, rows, experts, columns) -> forms, as `models.product_forms.resolve_forms` takes them."""


def always_portable(**_: object) -> Forms:
    """The realisation that runs everywhere."""
    return PORTABLE


class Routing(NamedTuple):
    """What a router says of some tokens.

    Attributes:
      logits: float32 [B, T, E].
      shares: float32 [B, T, E], softmax over all experts.
      chosen: int32 [B, T, k], the experts with the largest shares; of equal ones the first.
      weights: float32 [B, T, k], of each chosen expert's result.
    """

    logits: jax.Array
    shares: jax.Array
    chosen: jax.Array
    weights: jax.Array


class Experts(nnx.Module):
    """The routed experts of a layer: gate above up [E, 2F, D], and down [E, D, F]."""

    def __init__(self, config: ModelConfig):
        experts, ffn = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nnx.Param(
            jnp.zeros((experts, 2 * ffn, config.hidden_size), jnp.float32)
        )
        self.down_proj = nnx.Param(jnp.zeros((experts, config.hidden_size, ffn), jnp.float32))
        self.hidden_act = config.hidden_act

    def __call__(self, x: jax.Array, routing: Routing, resolve: ResolveForms) -> jax.Array:
        """Sums of the chosen experts' results by weight, [B, T, D] -> [B, T, D].

        Args:
          x: [B, T, D].
          routing: of its tokens.
          resolve: says which realisations the products have.
        """
        experts, num_chosen = self.down_proj.shape[0], routing.chosen.shape[-1]
        chosen = routing.chosen.reshape(-1, num_chosen)
        first, last = (
            resolve(dtype=x.dtype.name, rows=chosen.size, experts=experts, columns=w.shape[1:])
            for w in (self.gate_up_proj, self.down_proj)
        )
        in_blocks = "portable" in (*first, *last)
        block = block_rows(chosen.size, experts) if in_blocks else 1
        groups = group_visits(chosen, experts, block)
        weights = of_rows(routing.weights.reshape(-1, num_chosen), groups)

        product = partial(grouped_product, sizes=groups.sizes, block=block)
        rows = dispatch(x.reshape(-1, x.shape[-1]), groups)
        gate_up = checkpoint_name(product(rows, self.gate_up_proj[...], forms=first), PRODUCTS)
        gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
        inner = activation(self.hidden_act, gate) * up * weights[:, None]
        y = collect(product(inner.astype(x.dtype), self.down_proj[...], forms=last), groups)
        # One row per token is kept where a result has to be, not one per visit.
        named: jax.Array = checkpoint_name(y.reshape(x.shape), PRODUCTS)
        return named


class SparseMLP(nnx.Module):
    """Router, routed experts, and where the family has it an expert that every token visits."""

    def __init__(self, config: ModelConfig):
        hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.gate = Linear(hidden, config.num_experts, has_bias=False)
        self.experts = Experts(config)
        self.shared_expert = MLP(config, shared) if shared else None
        self.shared_expert_gate = Linear(hidden, 1, has_bias=False) if shared else None
        self.config = config

    def __call__(
        self, x: jax.Array, resolve: ResolveForms = always_portable
    ) -> tuple[jax.Array, Routing]:
        """[B, T, D] -> [B, T, D], and how its tokens were routed."""
        routing = self.route(x)
        y = self.experts(x, routing, resolve)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y, routing

    def route(self, x: jax.Array) -> Routing:
        """Chooses each token's experts, [B, T, D]; in float32 whatever the dtype of `x`."""
        logits = lax.dot_general(
            x,
            self.gate.weight[...],
            (((x.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        shares = jax.nn.softmax(logits, axis=-1)
        best = lax.top_k(lax.stop_gradient(shares), self.config.num_experts_per_tok)[1]
        chosen = decided(best)
        weights = _at(shares, chosen)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(logits, shares, chosen, decided(weights))


def _at(shares: jax.Array, chosen: jax.Array) -> jax.Array:
    """Shares [B, T, E] of the chosen experts, [B, T, k].

    By comparison, for the derivative's sake: that of an indexed read would be a scatter.
    """
    is_own = chosen[..., None] == lax.broadcasted_iota(chosen.dtype, (1, 1, 1, shares.shape[-1]), 3)
    return jnp.sum(jnp.where(is_own, shares[..., None, :], 0.0), axis=-1)
