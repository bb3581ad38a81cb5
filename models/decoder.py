"""Builds the `StreamedModel` of a decoder: NNX modules outside, pure functions inside.

Modules are built once, without arrays; each pure function merges its stage's module with the
parameters it is given, inside the trace. Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from flax import nnx

from slidedp_jax.models import cached_layers
from slidedp_jax.models.attention import (
    IMPLEMENTATIONS,
    device_target,
    resolve_attention,
    row_layout,
)
from slidedp_jax.models.compute_target import ComputeTarget
from slidedp_jax.models.config import ModelConfig
from slidedp_jax.models.layers import DecoderLayer, Embedding, Head
from slidedp_jax.models.loss import cross_entropy_sum, project_to_vocab
from slidedp_jax.models.product_forms import REQUESTS, Forms, resolve_forms
from slidedp_jax.models.router_losses import (
    RouterLosses,
    counted_tokens,
    loss_of_sums,
    router_sums,
)
from slidedp_jax.models.streamed import (
    Batch,
    Cache,
    CachedForm,
    LayerOutput,
    Params,
    Stage,
    StreamedModel,
)

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at one time in the loss, where no strategy says."""

_M = TypeVar("_M", bound=nnx.Module)


def build(
    config: ModelConfig,
    *,
    attention: str = "auto",
    target: ComputeTarget | None = None,
    router_losses: RouterLosses | None = None,
    expert_products: str = "auto",
) -> StreamedModel:
    """A decoder as the runtime sees it.

    The functions compute in the dtype of the parameters that they are given, and contain no
    collective: they run per device, on that device's rows.

    Args:
      config: shapes and flags.
      attention: `auto`, `chunked` or `cudnn`; see `models.attention.resolve_attention`, which
        decides when a layer is traced.
      target: where the functions will run; None means like the first JAX device.
      router_losses: of a mixture of experts; None: what its configuration turns on.
      expert_products: `auto` or a form of `models.product_forms`, which decides when a layer is
        traced.

    Raises:
      ValueError: `attention` or `expert_products` is unknown, or, while tracing, cannot run; or a
        dense model is given router losses.
    """
    if attention not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention is {attention!r}; supported: {', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    if expert_products not in REQUESTS:
        raise ValueError(
            f"expert_products is {expert_products!r}; supported: {', '.join(map(repr, REQUESTS))}."
        )
    if router_losses is None:
        router_losses = RouterLosses(load_balance=config.router_aux_loss_coef)
    elif not config.num_experts:
        raise ValueError("The model has no experts, so there are no router losses; drop them.")
    embedding = _Abstract(lambda: Embedding(config))
    forms = partial(_resolve_forms, expert_products, target)
    layers = {
        kind: _Abstract(
            partial(
                DecoderLayer,
                config.of_layer(kind),
                sparse=kind.sparse,
                resolve_forms=forms,
            )
        )
        for kind in set(config.layer_kinds)
    }
    head = _Abstract(lambda: Head(config))
    head_loss_for = partial(partial, _head_loss, head)
    kinds = config.layer_kinds
    layer_fns, prefill_fns, decode_fns = {}, {}, {}
    for kind in set(kinds):
        layer = layers[kind]
        whole = (layer, config, attention, target, kind.window)
        layer_fns[kind] = partial(_apply_layer, *whole)
        prefill_fns[kind] = partial(_prefill_layer, *whole)
        decode_fns[kind] = partial(_decode_layer, layer, kind.window)
    return StreamedModel(
        embed=Stage(name="model.embed_tokens", shapes=embedding.shapes),
        layers=tuple(
            Stage(name=f"model.layers.{index}", shapes=layers[kind].shapes)
            for index, kind in enumerate(kinds)
        ),
        head=Stage(name="", shapes=head.shapes),
        embed_fn=partial(_embed, embedding, None),
        embed_for=partial(partial, _embed, embedding),
        layer_fns=tuple(layer_fns[kind] for kind in kinds),
        head_loss_fn=head_loss_for(LOSS_CHUNK_TOKENS),
        head_loss_for=head_loss_for,
        head_logits_fn=partial(_head_logits, head),
        tied=config.tie_word_embeddings,
        vocab_size=config.vocab_size,
        initial_value=partial(
            initial_value,
            initializer_range=config.initializer_range,
            norm_weight=0.0 if config.norms_add_one else 1.0,
        ),
        loss_of_sums=partial(loss_of_sums, router_losses) if config.num_experts else None,
        cached=CachedForm(
            prefill_fns=tuple(prefill_fns[kind] for kind in kinds),
            decode_fns=tuple(decode_fns[kind] for kind in kinds),
            init_cache=partial(cached_layers.init_cache, config),
            max_tokens=config.max_position_embeddings,
        ),
        configuration=dataclasses.asdict(config),
    )


def initial_value(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    initializer_range: float = 0.02,
    norm_weight: float = 1.0,
) -> np.ndarray:
    """Starting value of a parameter trained from scratch.

    Biases are 0, matrices normal with standard deviation `initializer_range`. The
    draw depends on name, shape and seed alone.

    Args:
      name: full Hugging Face name.
      shape: shape of the parameter.
      seed: any non-negative integer.
      initializer_range: standard deviation.
      norm_weight: of all norms.

    Returns:
      float32 array.
    """
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if name.endswith("norm.weight"):
        return np.full(shape, norm_weight, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(shape, np.float32)
    values *= np.float32(initializer_range)
    return values


class _Abstract(Generic[_M]):
    """A module's structure, apart from any arrays."""

    def __init__(self, make: Callable[[], _M]):
        graph, state = nnx.split(nnx.eval_shape(make))
        self._graph: nnx.GraphDef[_M] = graph
        self.shapes: Params = nnx.to_pure_dict(state)

    def merge(self, params: Params) -> _M:
        """The module around the given arrays; call it inside a trace."""
        module: _M = nnx.merge(self._graph, params)
        return module


def _embed(
    embedding: _Abstract[Embedding], scale_dtype: Any, params: Params, batch: Batch
) -> jax.Array:
    return embedding.merge(params)(batch["input_ids"], scale_dtype)


def _apply_layer(
    layer: _Abstract[DecoderLayer],
    config: ModelConfig,
    attention: str,
    target: ComputeTarget | None,
    window: int | None,
    params: Params,
    x: jax.Array,
    batch: Batch,
) -> jax.Array | LayerOutput:
    kernel = _attention_kernel(config, attention, target, x, batch)
    x, routing = layer.merge(params)(x, batch, window=window, attention=kernel)
    if routing is None:
        return x
    counted = counted_tokens(batch)
    sums = router_sums(routing.logits, routing.shares, routing.chosen, counted)
    return LayerOutput(x, sums=sums)


def _prefill_layer(
    layer: _Abstract[DecoderLayer],
    config: ModelConfig,
    attention: str,
    target: ComputeTarget | None,
    window: int | None,
    params: Params,
    x: jax.Array,
    batch: Batch,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    kernel = _attention_kernel(config, attention, target, x, batch)
    module = layer.merge(params)
    return cached_layers.prefill(module, x, batch, cache, window=window, attention=kernel)


def _decode_layer(
    layer: _Abstract[DecoderLayer],
    window: int | None,
    params: Params,
    x: jax.Array,
    batch: Batch,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    return cached_layers.decode(layer.merge(params), x, batch, cache, window=window)


def _attention_kernel(
    config: ModelConfig,
    attention: str,
    target: ComputeTarget | None,
    x: jax.Array,
    batch: Batch,
) -> str:
    return resolve_attention(
        attention,
        target=target or device_target(jax.devices()[0]),
        dtype=x.dtype,
        head_dim=config.head_dim,
        rows=row_layout(batch),
    ).name


def _resolve_forms(requested: str, target: ComputeTarget | None, **shape: Any) -> Forms:
    target = target or device_target(jax.devices()[0])
    return resolve_forms(requested, target=target, **shape)


def _head_loss(
    head: _Abstract[Head],
    loss_chunk_tokens: int,
    params: Params,
    embed_params: Params | None,
    x: jax.Array,
    batch: Batch,
) -> jax.Array:
    normalised = head.merge(params).normalise(x)
    return cross_entropy_sum(
        normalised.reshape(-1, x.shape[-1]),
        _output_projection(params, embed_params),
        batch["targets"].reshape(-1),
        chunk_tokens=loss_chunk_tokens,
    )


def _head_logits(
    head: _Abstract[Head], params: Params, embed_params: Params | None, x: jax.Array
) -> jax.Array:
    normalised = head.merge(params).normalise(x)
    return project_to_vocab(normalised, _output_projection(params, embed_params))


def _output_projection(params: Params, embed_params: Params | None) -> jax.Array:
    if "lm_head" in params:
        own: jax.Array = params["lm_head"]["weight"]
        return own
    if embed_params is None:
        raise ValueError("The head is tied to the embedding: pass the embedding's parameters too.")
    tied: jax.Array = embed_params["weight"]
    return tied
