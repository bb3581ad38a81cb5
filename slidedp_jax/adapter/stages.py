"""A user's model as the stages of parameters and functions that the runtime streams."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slidedp_jax.adapter.claims import Claims, gives_sums
from slidedp_jax.adapter.hidden_states import HiddenStates
from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.adapter.randomness import row_by_row
from slidedp_jax.adapter.source import NamedTree, Rows, Source, Tree
from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Batch, LayerFn, LayerOutput, Params, Stage, StreamedModel


def streamed_model(
    source: Source, claims: Claims, *, vocab_size: int, unused: Set[str]
) -> StreamedModel:
    """Stages of a model whose functions have been traced.

    Args:
      source: the model.
      claims: which stage reads what.
      vocab_size: V.
      unused: names of parameters that are in no stage.
    """
    num_layers = len(source.layers)
    shapes, hidden = dict(source.shapes), claims.hidden
    run_embed = _with_keys(source.embed, claims.draws[0])
    run_head = _with_keys(source.head_loss, claims.draws[-1])
    made: dict[Any, LayerFn] = {}
    stages, layer_fns = [], []
    for (path, tree), fn, draws in zip(
        source.layers, source.layer_fns, claims.draws[1:-1], strict=True
    ):
        names = Stage(name=path, shapes=tree).parameter_names()
        own = zip(named_leaves(tree), names, strict=True)
        left_out = frozenset(inner for inner, name in own if name in unused)
        stages.append(Stage(name=path, shapes=_without(tree, left_out)))
        if (fn, left_out) not in made:
            run = _with_keys(_on_the_rest(fn, tree, left_out), draws)
            made[fn, left_out] = _layer_fn(run, hidden)
        layer_fns.append(made[fn, left_out])

    def embed_fn(params: Params, batch: Batch) -> jax.Array:
        return hidden.join(run_embed({**shapes, **params}, (), batch, 0))

    def head_loss_fn(head: Params, embed: Params | None, x: jax.Array, batch: Batch) -> jax.Array:
        values = {**shapes, **head, **(embed or {})}
        losses = run_head(values, (hidden.split(x),), batch, num_layers + 1)
        if losses.dtype != jnp.float32:
            raise UserError(
                f"head_loss returns {losses.dtype} for hidden states in {x.dtype}; a sum of many "
                "tokens' losses keeps three digits then. Compute it in float32 whatever the "
                "compute dtype: logits.astype(jnp.float32), jnp.sum(..., dtype=jnp.float32)"
            )
        return jnp.sum(losses)

    def head_logits_fn(head: Params, embed: Params | None, x: jax.Array) -> jax.Array:
        raise UserError(
            "an adapted model gives losses, no logits: write its weights back and use its own "
            "generation"
        )

    return StreamedModel(
        embed=Stage(name="", shapes=claims.embed, item="embed"),
        layers=tuple(stages),
        head=Stage(name="", shapes=claims.head, item="head"),
        embed_fn=embed_fn,
        layer_fns=tuple(layer_fns),
        head_loss_fn=head_loss_fn,
        head_logits_fn=head_logits_fn,
        tied=claims.tied,
        vocab_size=vocab_size,
        initial_value=_initial_value(source),
        indexed=claims.indexed,
    )


def _layer_fn(run: Callable[..., Any], hidden: HiddenStates) -> LayerFn:
    def layer_fn(params: Params, x: jax.Array, batch: Batch) -> jax.Array | LayerOutput:
        index = batch["layer_index"][0] if "layer_index" in batch else 0
        result = run(params, (hidden.split(x),), batch, index + 1)
        if not isinstance(result, tuple):
            return hidden.join(result, x.dtype)
        states, aux, *sums = result  # aux [B] where rows ran one by one
        own = None if aux is None else jnp.sum(aux)
        return LayerOutput(hidden.join(states, x.dtype), own, *sums)

    return layer_fn


def _with_keys(fn: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    """(tree, inputs, batch, stage) -> result; of a function that draws, one per row.

    What such a function gives of each row is put together again, but for scalars, which are [B].
    """

    def run(tree: Any, inputs: tuple[Any, ...], batch: Batch, stage: Any) -> Any:
        own = {k: v for k, v in batch.items() if k not in ("row_seeds", "layer_index")}
        index = {"layer_index": stage - 1} if "layer_index" in batch else {}
        if not draws or "row_seeds" not in batch:
            return fn(tree, *inputs, Rows(own | index), None)

        def one(row: Any, key: jax.Array) -> Any:
            own_inputs, own_batch = row
            return fn(tree, *own_inputs, Rows(own_batch | index), key)

        result = row_by_row(one, batch["row_seeds"], stage, (inputs, own))
        if gives_sums(result):
            *result, sums = result
            added = jax.tree.map(lambda part: jnp.sum(part, axis=0), sums)
            return (*_rows_together(result), added)
        return _rows_together(result)

    return run


def _rows_together(result: Any) -> Any:
    """[B, 1, T, D] -> [B, T, D]; scalars of rows are [B]."""
    return jax.tree.map(lambda part: part if part.ndim == 1 else part[:, 0], result)


def _without(tree: Tree, left_out: Set[str]) -> Tree:
    """A layer's parameters but for some, by name."""
    if not left_out:
        return tree
    return {name: leaf for name, leaf in named_leaves(tree).items() if name not in left_out}


def _on_the_rest(fn: Callable[..., Any], tree: Tree, left_out: Set[str]) -> Callable[..., Any]:
    """A layer's function of `_without(tree, left_out)`; what is left out has a shape alone."""
    if not left_out:
        return fn
    named = NamedTree(tree)
    return lambda values, *rest: fn(named.tree({**named.leaves, **values}), *rest)


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
