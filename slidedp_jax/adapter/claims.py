"""Which stage reads which parameters, read off the traced functions, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.adapter.paths import named_leaves
from slidedp_jax.adapter.randomness import IMPLEMENTATION
from slidedp_jax.adapter.source import Rows, Source
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import inputs_read
from slidedp_jax.models.streamed import Stage


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What one function reads and returns.

    Attributes:
      reads: names of the parameters whose values matter.
      draws: whether it draws random numbers.
      result: shape and dtype of what it returns.
    """

    reads: frozenset[str]
    draws: bool
    result: Any


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Every parameter's stage.

    Attributes:
      embed: the embedding's parameters by name, with shapes.
      head: the head's own.
      tied: the head reads the embedding's too.
      draws: whether embedding, each layer and head draw random numbers.
      x: shape and dtype of the hidden states that were traced, [1, T, D].
    """

    embed: dict[str, Any]
    head: dict[str, Any]
    tied: bool
    draws: tuple[bool, ...]
    x: Any


def claim(source: Source, batch: Rows, *, dropout: bool) -> Claims:
    """Trace every function once, on one row.

    Args:
      source: the model.
      batch: shapes of one row, from `example_batch`.
      dropout: whether random numbers may be drawn.

    Raises:
      UserError: a parameter is read by no stage or by two, or a function returns something else
        than it must.
    """
    leading = batch["input_ids"].shape
    embed = trace(source.embed, source.tree, (batch,), dropout)
    x = _hidden(embed.result, leading, "embed")
    traced: dict[Any, Traced] = {}
    layers = []
    for (path, tree), fn in zip(source.layers, source.layer_fns, strict=True):
        if fn not in traced:
            traced[fn] = trace(fn, tree, (x, batch), dropout)
            result = _without_aux(traced[fn].result, f"layer at {path}")
            found = _hidden(result, leading, f"layer at {path}")
            if found.shape != x.shape:
                raise UserError(
                    f"layer at {path} turned hidden states of shape {x.shape} into {found.shape}; "
                    "a layer must keep their shape"
                )
        layers.append(traced[fn])
    head = trace(source.head_loss, source.tree, (x, batch), dropout)
    _check_loss(head.result)
    names = named_leaves(source.tree)
    in_layers = {
        name
        for path, tree in source.layers
        for name in Stage(name=path, shapes=tree).parameter_names()
    }
    _check_claims(set(names), in_layers, embed.reads, head.reads)
    own = head.reads - embed.reads
    return Claims(
        embed={name: shape for name, shape in names.items() if name in embed.reads},
        head={name: shape for name, shape in names.items() if name in own},
        tied=bool(head.reads & embed.reads),
        draws=tuple(part.draws for part in (embed, *layers, head)),
        x=x,
    )


def example_batch(
    num_rows: int, tokens_per_row: int, *, packed: bool, token_arrays: Mapping[str, str]
) -> Rows:
    """Shapes of a batch as the model's functions see it."""
    names = ["input_ids", "targets", "positions", *(["segment_ids"] if packed else [])]
    ids = jax.ShapeDtypeStruct((num_rows, tokens_per_row), jnp.int32)
    batch = Rows(dict.fromkeys(names, ids))
    for name, dtype in token_arrays.items():
        batch[name] = jax.ShapeDtypeStruct(ids.shape, jnp.dtype(dtype))
    if packed:
        batch["document_starts"] = jax.ShapeDtypeStruct((num_rows, 2), jnp.int32)
        batch["document_lengths"] = jax.ShapeDtypeStruct((num_rows, 1), jnp.int32)
    return batch


def trace(fn: Callable[..., Any], tree: Any, arguments: tuple[Any, ...], dropout: bool) -> Traced:
    """What `fn(tree, *arguments, key)` reads and returns; nothing is computed."""
    names = list(named_leaves(tree))
    leaves, treedef = jax.tree.flatten(tree)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)

    def flat(key: jax.Array, leaves: Any, *arguments: Any) -> Any:
        wrapped = jax.random.wrap_key_data(key, impl=IMPLEMENTATION) if dropout else None
        *before, batch = arguments
        return fn(jax.tree.unflatten(treedef, leaves), *before, Rows(batch), wrapped)

    *before, batch = arguments
    closed, result = jax.make_jaxpr(flat, return_shape=True)(key, leaves, *before, dict(batch))
    used = inputs_read(closed)[: 1 + len(leaves)]
    reads = {name for name, read in zip(names, used[1:], strict=True) if read}
    return Traced(reads=frozenset(reads), draws=dropout and used[0], result=result)


def _without_aux(result: Any, what: str) -> Any:
    """The hidden states of what a layer returned, with or without an auxiliary loss."""
    if not isinstance(result, tuple) or len(result) != 2 or getattr(result[1], "shape", 0) != ():
        return result
    x, aux = result
    if aux.dtype != jnp.float32:
        raise UserError(
            f"the auxiliary loss of {what} is {aux.dtype}; it must be float32 whatever the dtype "
            "of the parameters: jnp.sum(..., dtype=jnp.float32)"
        )
    return x


def _hidden(result: Any, leading: tuple[int, int], what: str) -> Any:
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != leading:
        got = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", result)
        raise UserError(
            f"{what} returned {got} for rows of shape {list(leading)}; it must return one array, "
            "the hidden states [rows, tokens, hidden] (of a layer that returns a tuple, such as "
            "(cache, x), return x). Only a layer may return two: x and, as one float32 number, the "
            "sum over the rows of a loss of its own"
        )
    return result


def _check_loss(result: Any) -> None:
    shape = getattr(result, "shape", None)
    if shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
        raise UserError(
            f"head_loss returned {result}; it must return one float, the sum of the losses of all "
            "supervised tokens of the rows at hand (the runtime divides by their number)"
        )


def _check_claims(
    names: set[str], in_layers: set[str], by_embed: frozenset[str], by_head: frozenset[str]
) -> None:
    strangers = in_layers - names
    if strangers:
        raise UserError(
            f"layers= leads to {_some(strangers)}, which the model itself names otherwise (an "
            "alias or a property); give the path of the attribute that holds the layers"
        )
    for what, reads in (("embed", by_embed), ("head_loss", by_head)):
        both = reads & in_layers
        if both:
            raise UserError(
                f"{what} reads {_some(both)}, which a layer owns: a layer's parameters are on the "
                "device only while that layer runs. Let embed and head_loss read what lies outside "
                "the layers, or correct layers="
            )
    unread = names - in_layers - by_embed - by_head
    if unread:
        raise UserError(
            f"no stage reads {_some(unread)}: neither embed nor head_loss does, and no layer holds "
            "it. Use it where the model's own forward pass does, list its module among layers=, or "
            "leave it out of the model that is trained"
        )
    if not by_embed:
        raise UserError("embed reads no parameter; it must look the tokens up in the embedding")
    if not by_head - by_embed:
        raise UserError(
            "head_loss has no parameter of its own (only the embedding's); the runtime needs a "
            "head stage with at least one. Move the model's final norm into head_loss"
        )


def _some(names: Set[str]) -> str:
    listed = ", ".join(sorted(names)[:5])
    return listed if len(names) <= 5 else f"{listed} and {len(names) - 5} more"
