"""Builds the `StreamedModel` of a decoder: NNX modules outside, pure functions inside.

Modules are built once, without arrays; each pure function merges its stage's module with the
parameters it is given, inside the trace. Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from slidedp_jax.models import cached_layers
from slidedp_jax.models.attention import (
    IMPLEMENTATIONS,
    attend,
    device_target,
    resolve_attention,
    row_layout,
)
from slidedp_jax.models.compute_target import ComputeTarget
from slidedp_jax.models.config import LayerKind, ModelConfig
from slidedp_jax.models.layers import DecoderLayer, Embedding, Head
from slidedp_jax.models.loss import cross_entropy_sum, project_to_vocab
from slidedp_jax.models.product_forms import REQUESTS, Forms, resolve_forms
from slidedp_jax.models.rope import rotary_tables
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
    LayerFn,
    LayerOutput,
    Params,
    Stage,
    StreamedModel,
    VocabularyForm,
)
from slidedp_jax.models.token_blocks import Arrays, in_blocks
from slidedp_jax.models.token_loss import PLAIN, TokenLoss

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
    token_loss: TokenLoss = PLAIN,
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
      token_loss: label smoothing and z-loss, in training and evaluation alike.

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
    head_loss_for = partial(partial, _head_loss, head, token_loss)
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
        layer_fns_for=(
            None  # a router's choices cannot be made twice
            if config.num_experts
            else partial(_layer_fns_in_blocks, layers, config, attention, target)
        ),
        head_loss_fn=head_loss_for(LOSS_CHUNK_TOKENS),
        head_loss_for=head_loss_for,
        head_logits_fn=partial(_head_logits, head),
        tied=config.tie_word_embeddings,
        vocabulary=None if config.scale_embeddings else _vocabulary(config, head, token_loss),
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


def _vocabulary(
    config: ModelConfig, head: _Abstract[Head], token_loss: TokenLoss
) -> VocabularyForm:
    tied = config.tie_word_embeddings
    return VocabularyForm(
        projection="model.embed_tokens.weight" if tied else "lm_head.weight",
        hidden_fn=partial(_head_hidden, head),
        token_loss=token_loss,
    )


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


def _layer_fns_in_blocks(
    layers: Mapping[LayerKind, _Abstract[DecoderLayer]],
    config: ModelConfig,
    attention: str,
    target: ComputeTarget | None,
    block_tokens: int,
) -> tuple[LayerFn, ...]:
    made = {
        kind: partial(
            _apply_layer_in_blocks,
            layer,
            config.of_layer(kind),
            attention,
            target,
            kind.window,
            block_tokens,
        )
        for kind, layer in layers.items()
    }
    return tuple(made[kind] for kind in config.layer_kinds)


def _apply_layer_in_blocks(
    layer: _Abstract[DecoderLayer],
    config: ModelConfig,
    attention: str,
    target: ComputeTarget | None,
    window: int | None,
    block_tokens: int,
    params: Params,
    x: jax.Array,
    batch: Batch,
) -> jax.Array:
    """`_apply_layer`, in blocks of tokens but for attention itself."""
    kernel = _attention_kernel(config, attention, target, x, batch)
    before, after = _around_attention(params)

    def project(own: Params, arrays: Arrays, tables: Arrays) -> Arrays:
        module = layer.merge(_filled(layer.shapes, own))
        return module.self_attn.project(module.input_layernorm(arrays[0]), *tables)

    def finish(own: Params, arrays: Arrays, _: Arrays) -> Arrays:
        module = layer.merge(_filled(layer.shapes, own))
        residual, attended = arrays
        return (module.after_attention(residual, attended)[0],)

    tables = rotary_tables(config, batch["positions"], batch.get("segment_ids"))
    q, k, v = in_blocks(project, block_tokens, before, (x,), tables)
    attended = attend(q, k, v, batch, window=window, implementation=kernel)
    (y,) = in_blocks(finish, block_tokens, after, (x, attended))
    return y


def _around_attention(params: Params) -> tuple[Params, Params]:
    """Parameters read before attention and after it, None in place of the others."""

    def pick(wanted: bool) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if _is_after_attention(path) == wanted else None, params
        )

    return pick(False), pick(True)


def _is_after_attention(path: Sequence[Any]) -> bool:
    name = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return not name.startswith("input_layernorm.") and (
        name.startswith("self_attn.o_proj.") or not name.startswith("self_attn.")
    )


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
    token_loss: TokenLoss,
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
        token_loss=token_loss,
    )


def _head_hidden(head: _Abstract[Head], params: Params, x: jax.Array) -> jax.Array:
    """The final norm; the projection, which it does not read, may be None."""
    return head.merge(_filled(head.shapes, params)).normalise(x)


def _filled(shapes: Params, params: Params) -> Params:
    """Something in place of parameters that are None, which nobody reads."""
    return jax.tree.map(
        lambda _, own: jnp.zeros(()) if own is None else own,
        shapes,
        params,
        is_leaf=lambda leaf: leaf is None,
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
