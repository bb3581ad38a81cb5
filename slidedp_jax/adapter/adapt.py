"""`slidedp_jax.adapt`: a user's own model, unchanged, as stages that the runtime streams.

The user says where the layers are and gives three small functions over the model's own parts.
Which other parameters belong to the embedding and which to the head is read off those functions,
and so is whether the two are tied. Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from slidedp_jax.adapter.claims import Claims, claim, example_batch
from slidedp_jax.adapter.loss_check import check_sum_over_rows
from slidedp_jax.adapter.nnx_source import from_nnx
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.adapter.randomness import row_by_row
from slidedp_jax.adapter.source import Rows, Source
from slidedp_jax.adapter.tree_source import from_tree
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Batch, LayerFn, LayerOutput, Params, Stage, StreamedModel

RESERVED = {
    *("input_ids", "labels", "targets", "positions", "segment_ids", "key"),
    *("document_starts", "document_lengths", "row_seeds", "layer_index"),
}
"""Names that arrays of a batch already have."""


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A user's model, ready for `slidedp_jax.Trainer`.

    Attributes:
      model: what the trainer takes. Without `parameters=` it starts from the user's own values.
      write_back: `trainer.parameters()` -> the user's model with the trained values, each in its
        own dtype and on its own devices. An NNX module is changed in place and returned, a pytree
        is returned anew.
    """

    model: StreamedModel
    write_back: Callable[[Mapping[str, np.ndarray]], Any]


def adapt(
    model: Any,
    *,
    layers: str | Sequence[str],
    embed: Callable[..., jax.Array],
    layer: Callable[..., Any] | Sequence[Callable[..., Any]],
    head_loss: Callable[..., jax.Array],
    vocab_size: int,
    dropout: bool = False,
    packed: bool = False,
    token_arrays: Mapping[str, str] | None = None,
    tokens_per_row: int = 16,
    check_loss: bool = True,
) -> Adapted:
    """A user's own model as stages of parameters and functions.

    The functions get the user's own objects: for a Flax NNX module the module (`layer`: one layer
    of it) around the parameters at hand, for a pytree of parameters, such as Flax Linen's
    `variables["params"]`, that pytree (`layer`: one layer's part of it). In `embed` and `head_loss`
    only the parameters that they read have values. `batch` holds the arrays of
    `models.streamed.Batch`: `input_ids`, `targets` and `positions`, all int32 [B, T], and
    `segment_ids` where the rows are packed. The functions run per device, in the dtype of the
    parameters unless the model casts them, and may change no state.

    Args:
      model: a Flax NNX module, or a pytree of arrays; only their shapes matter if the trainer is
        given the starting weights.
      layers: path of the list of layers in the model (`"layers"`, `"decoder.blocks"`), or one
        path per layer, bottom first.
      embed: (model, batch) -> hidden states [B, T, D].
      layer: (layer, x, batch) -> x, or one such function per layer. Layers that are equal but for
        the values of their parameters are compiled once; a layer's number kept as an attribute
        makes it another layer. A layer with a loss of its own returns (x, aux): aux is a float32
        scalar, the *sum* over the rows at hand with its coefficient, and is minimised beside the
        head's (`models.streamed.LayerOutput`).
      head_loss: (model, x, batch) -> float scalar: the *sum* of the losses of the supervised tokens
        (`batch["targets"]` is the token to predict, -100 where nothing counts).
      vocab_size: number of token ids that the embedding accepts, V.
      dropout: the model draws random numbers in training. It does so row by row, from keys that
        depend on seed, step, row and layer (`slidedp_jax.adapter.randomness`): an NNX module finds
        them in its own `nnx.Rngs`, functions over a pytree in `batch["key"]`. Evaluation draws
        nothing: modules run as `eval()` sets them, and there is no `batch["key"]`.
      packed: every batch has `segment_ids`.
      token_arrays: name -> dtype of further arrays [rows, tokens] that every batch will have, such
        as `{"loss_weights": "float32"}`. The functions find them in `batch` as they were given (not
        shifted, 0 in rows that fill up).
      tokens_per_row: T of the row on which the functions are traced here, for models that do not
        take any.
      check_loss: compute `head_loss`, and `layer` where it has a loss, once on made-up numbers, to
        see that they are sums over rows.

    Raises:
      UserError: the model does not fit, with what was found and what to change.
    """
    parts: dict[str, Any] = {
        "layers": layers,
        "embed": embed,
        "layer": layer,
        "head_loss": head_loss,
    }
    if isinstance(model, nnx.Module):
        source = from_nnx(model, **parts, dropout=dropout)
    else:
        source = from_tree(model, **parts)
    _check_dtypes(source)
    token_arrays = dict(token_arrays or {})
    _check_names(token_arrays)
    batch = example_batch(1, tokens_per_row, packed=packed, token_arrays=token_arrays)
    claims = claim(source, batch, dropout=dropout)
    streamed = _streamed(source, claims, vocab_size)
    streamed = replace(streamed, random=dropout, token_arrays=token_arrays)
    if check_loss:
        check_sum_over_rows(streamed, claims.x, vocab_size, packed=packed)
    return Adapted(model=streamed, write_back=source.write_back)


def _streamed(source: Source, claims: Claims, vocab_size: int) -> StreamedModel:
    num_layers = len(source.layers)
    names, treedef = list(named_leaves(source.tree)), jax.tree.structure(source.tree)
    shapes = dict(zip(names, jax.tree.leaves(source.tree), strict=True))

    def whole(*parts: Params | None) -> Any:
        """The user's tree around the parameters of some stages; the rest are shapes only."""
        values = dict(shapes)
        for part in parts:
            values |= part or {}
        return jax.tree.unflatten(treedef, [values[name] for name in names])

    run_embed = _with_keys(source.embed, claims.draws[0])
    run_head = _with_keys(source.head_loss, claims.draws[-1])
    made: dict[Any, LayerFn] = {}
    layer_fns = []
    for fn, draws in zip(source.layer_fns, claims.draws[1:-1], strict=True):
        if fn not in made:
            made[fn] = _layer_fn(_with_keys(fn, draws))
        layer_fns.append(made[fn])

    def embed_fn(params: Params, batch: Batch) -> jax.Array:
        return _joined(run_embed(whole(params), (), batch, 0), 3)

    def head_loss_fn(head: Params, embed: Params | None, x: jax.Array, batch: Batch) -> jax.Array:
        losses = run_head(whole(head, embed), (x,), batch, num_layers + 1)
        return jnp.sum(losses.astype(jnp.float32))

    def head_logits_fn(head: Params, embed: Params | None, x: jax.Array) -> jax.Array:
        raise UserError(
            "an adapted model gives losses, no logits: write its weights back and use its own "
            "generation"
        )

    return StreamedModel(
        embed=Stage(name="", shapes=claims.embed, item="embed"),
        layers=tuple(Stage(name=path, shapes=tree) for path, tree in source.layers),
        head=Stage(name="", shapes=claims.head, item="head"),
        embed_fn=embed_fn,
        layer_fns=tuple(layer_fns),
        head_loss_fn=head_loss_fn,
        head_logits_fn=head_logits_fn,
        tied=claims.tied,
        vocab_size=vocab_size,
        initial_value=_initial_value(source),
    )


def _layer_fn(run: Callable[..., Any]) -> LayerFn:
    def layer_fn(params: Params, x: jax.Array, batch: Batch) -> jax.Array | LayerOutput:
        index = batch["layer_index"][0] if "layer_index" in batch else 0
        result = run(params, (x,), batch, index + 1)
        if not isinstance(result, tuple):
            return _joined(result, 3)
        x, aux = result
        return LayerOutput(_joined(x, 3), jnp.sum(aux))  # [B] where rows ran one by one

    return layer_fn


def _with_keys(fn: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    """(tree, inputs, batch, stage) -> result; of a function that draws, one per row."""

    def run(tree: Any, inputs: tuple[jax.Array, ...], batch: Batch, stage: Any) -> Any:
        rows = Rows({k: v for k, v in batch.items() if k not in ("row_seeds", "layer_index")})
        if not draws or "row_seeds" not in batch:
            return fn(tree, *inputs, rows, None)

        def one(row: Any, key: jax.Array) -> Any:
            own_inputs, own_batch = row
            return fn(tree, *own_inputs, Rows(own_batch), key)

        return row_by_row(one, batch["row_seeds"], stage, (inputs, dict(rows)))

    return run


def _joined(x: jax.Array, ndim: int) -> jax.Array:
    """Rows that were computed as batches of one, [B, 1, T, D] -> [B, T, D]."""
    return x if x.ndim == ndim else x[:, 0]


def _initial_value(source: Source) -> Callable[[str, tuple[int, ...], int], np.ndarray]:
    def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        value = source.value(name)
        if isinstance(value, jax.ShapeDtypeStruct):
            raise UserError(
                f"the model holds the shape of {name} but no values; give the trainer the starting "
                "weights with parameters=, or build the model with values"
            )
        return np.asarray(value).astype(np.float32)

    return initial_value


def _check_names(token_arrays: Mapping[str, str]) -> None:
    taken = sorted(token_arrays.keys() & RESERVED)
    if taken:
        raise UserError(
            f"token_arrays names {taken}, which every batch has its own use for; rename"
        )


def _check_dtypes(source: Source) -> None:
    for name, leaf in named_leaves(source.tree).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"parameter {name} is {leaf.dtype}; parameters are trained and must be floats. "
                "Keep numbers that are not trained out of the parameters (in NNX any variable that "
                "is no nnx.Param, in a pytree a constant of the functions)"
            )
