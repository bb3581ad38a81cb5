"""Which stage reads which parameters, read off the traced functions, and what they return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.adapter.hidden_states import HiddenStates
from slidedp_jax.adapter.paths import looks_stacked, named_leaves
from slidedp_jax.adapter.randomness import IMPLEMENTATION
from slidedp_jax.adapter.source import Rows, Source
from slidedp_jax.errors import UserError
from slidedp_jax.jax_internals import draws_from_constants, inputs_read
from slidedp_jax.models.streamed import Stage


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What one function reads and returns.

    Attributes:
      reads: names of the parameters whose values matter.
      batch_reads: names of the batch's arrays that matter.
      draws: whether it draws random numbers.
      result: shape and dtype of what it returns.
    """

    reads: frozenset[str]
    batch_reads: frozenset[str]
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
      indexed: whether a layer reads its own index.
      hidden: the form of the hidden states, of one row of T tokens.
      gives_sums: whether a layer gives sums for a loss over the whole step.
    """

    embed: dict[str, Any]
    head: dict[str, Any]
    tied: bool
    draws: tuple[bool, ...]
    indexed: bool
    hidden: HiddenStates
    gives_sums: bool


def claim(source: Source, batch: Rows, *, dropout: bool, unused: Set[str]) -> Claims:
    """Trace every function once, on one row.

    Args:
      source: the model.
      batch: shapes of one row, from `example_batch`.
      dropout: whether random numbers may be drawn.
      unused: names of parameters that no stage reads, and need not.

    Raises:
      UserError: a parameter is read by no stage or by two, or a function returns something else
        than it must.
    """
    leading = batch["input_ids"].shape
    of_layer = Rows(batch, layer_index=jax.ShapeDtypeStruct((), jnp.int32))
    with _noting("slidedp_jax called embed(model, batch)."):
        embed = trace("embed", source.embed, dict(source.shapes), (batch,), dropout)
    hidden, states = HiddenStates(embed.result, leading), embed.result
    traced: dict[Any, Traced] = {}
    layers: list[Traced] = []
    in_layers: dict[str, bool] = {}
    for (path, tree), fn in zip(source.layers, source.layer_fns, strict=True):
        what = f"layer at {path}"
        if fn not in traced:
            with _noting(_about_layers(source, path)):
                traced[fn] = trace(what, fn, tree, (states, of_layer), dropout)
            hidden.check(states_of(traced[fn].result, what), leading, what)
        layers.append(traced[fn])
        own = Stage(name=path, shapes=tree).parameter_names()
        in_layers |= {
            name: inner in traced[fn].reads
            for name, inner in zip(own, named_leaves(tree), strict=True)
        }
    with _noting("slidedp_jax called head_loss(model, x, batch)."):
        head = trace("head_loss", source.head_loss, dict(source.shapes), (states, batch), dropout)
    _check_loss(head.result)
    _check_claims(set(source.shapes), in_layers, embed.reads, head.reads, unused)
    own_of_head = head.reads - embed.reads
    return Claims(
        embed={name: shape for name, shape in source.shapes.items() if name in embed.reads},
        head={name: shape for name, shape in source.shapes.items() if name in own_of_head},
        tied=bool(head.reads & embed.reads),
        draws=tuple(part.draws for part in (embed, *layers, head)),
        indexed=any("layer_index" in part.batch_reads for part in layers),
        hidden=hidden,
        gives_sums=any(gives_sums(part.result) for part in layers),
    )


def example_batch(
    num_rows: int,
    tokens_per_row: int,
    *,
    packed: bool,
    token_arrays: Mapping[str, jax.ShapeDtypeStruct],
) -> Rows:
    """Shapes of a batch as the model's functions see it."""
    names = ["input_ids", "targets", "positions", *(["segment_ids"] if packed else [])]
    ids = jax.ShapeDtypeStruct((num_rows, tokens_per_row), jnp.int32)
    batch = Rows(dict.fromkeys(names, ids))
    for name, spec in token_arrays.items():
        batch[name] = jax.ShapeDtypeStruct((*ids.shape, *spec.shape), spec.dtype)
    if packed:
        batch["document_starts"] = jax.ShapeDtypeStruct((num_rows, 2), jnp.int32)
        batch["document_lengths"] = jax.ShapeDtypeStruct((num_rows, 1), jnp.int32)
    return batch


def trace(
    what: str, fn: Callable[..., Any], tree: Any, arguments: tuple[Any, ...], dropout: bool
) -> Traced:
    """What `fn(tree, *arguments, key)` reads and returns; nothing is computed.

    Raises:
      UserError: it draws random numbers that would be the same in each step.
    """
    names = list(named_leaves(tree))
    leaves, treedef = jax.tree.flatten(tree)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)

    def flat(key: jax.Array, leaves: Any, *arguments: Any) -> Any:
        wrapped = jax.random.wrap_key_data(key, impl=IMPLEMENTATION) if dropout else None
        *before, batch = arguments
        return fn(jax.tree.unflatten(treedef, leaves), *before, Rows(batch), wrapped)

    *before, batch = arguments
    closed, result = jax.make_jaxpr(flat, return_shape=True)(key, leaves, *before, dict(batch))
    used = inputs_read(closed)
    if draws_from_constants(closed, [number == 0 for number in range(len(used))]):
        raise UserError(
            f"{what} draws random numbers from a key that it makes itself, such as nnx.Rngs(0) or "
            "jax.random.key(0): they would be the same in every layer, row and step. With "
            "dropout=True draw from batch['key'] (nnx.Rngs(dropout=batch['key'])); numbers that "
            "shall always be the same are drawn outside the function"
        )
    reads = {name for name, read in zip(names, used[1:], strict=False) if read}
    of_batch = used[len(used) - len(batch) :]
    return Traced(
        reads=frozenset(reads),
        batch_reads=frozenset(n for n, read in zip(sorted(batch), of_batch, strict=True) if read),
        draws=dropout and used[0],
        result=result,
    )


@contextlib.contextmanager
def _noting(note: str) -> Iterator[None]:
    """What a user's function raises says as which stage it was called."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note(note)
        if type(error).__name__ == "InvalidRngError":  # Linen's
            error.add_note(
                "It draws random numbers: pass dropout=True to adapt(), and hand the module a key "
                "from the batch, rngs={'dropout': batch['key']}, in training (batch.get('key') is "
                "None in evaluation: deterministic=True then)."
            )
        raise


def _about_layers(source: Source, path: str) -> str:
    paths = [path for path, _ in source.layers]
    listed = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    note = (
        f"slidedp_jax called layer(layer, x, batch) for {path}; layers= gives {len(paths)} layers: "
        f"{listed}."
    )
    if not source.stacked and looks_stacked([tree for _, tree in source.layers]):
        note += (
            " All their arrays have the same first dimension: if that is the number of layers, "
            "these are parts of stacked layers. Pass layers=slidedp_jax.Stacked(path of them all)."
        )
    return note


def gives_sums(result: Any) -> bool:
    """Whether a layer returned (x, auxiliary loss or None, sums)."""
    return isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping)


def states_of(result: Any, what: str) -> Any:
    """The hidden states of what a layer returned, whatever it gives beside them."""
    if gives_sums(result):
        x, aux, sums = result
        odd = {str(leaf.dtype) for leaf in jax.tree.leaves(sums)} - {"float32"}
        if odd:
            raise UserError(
                f"the sums of {what} are of {', '.join(sorted(odd))}; they must be float32 "
                "whatever the dtype of the parameters: jnp.sum(..., dtype=jnp.float32)"
            )
        return x if aux is None else states_of((x, aux), what)
    if not isinstance(result, tuple) or len(result) != 2 or getattr(result[1], "shape", 0) != ():
        return result
    x, aux = result
    if aux.dtype != jnp.float32:
        raise UserError(
            f"the auxiliary loss of {what} is {aux.dtype}; it must be float32 whatever the dtype "
            "of the parameters: jnp.sum(..., dtype=jnp.float32)"
        )
    return x


def _check_loss(result: Any) -> None:
    shape = getattr(result, "shape", None)
    if shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
        raise UserError(
            f"head_loss returned {result}; it must return one float, the sum of the losses of all "
            "supervised tokens of the rows at hand (the runtime divides by their number)"
        )


def _check_claims(
    names: Set[str],
    in_layers: Mapping[str, bool],
    by_embed: Set[str],
    by_head: Set[str],
    unused: Set[str],
) -> None:
    """`in_layers`: whether the layer reads the parameter that it owns."""
    strangers = in_layers.keys() - names
    if strangers:
        raise UserError(
            f"layers= leads to {_some(strangers)}, which the model itself names otherwise (an "
            "alias or a property); give the path of the attribute that holds the layers"
        )
    for what, reads in (("embed", by_embed), ("head_loss", by_head)):
        both = reads & in_layers.keys()
        if both:
            raise UserError(
                f"{what} reads {_some(both)}, which a layer owns: a layer's parameters are on the "
                "device only while that layer runs. Let embed and head_loss read what lies outside "
                "the layers, or correct layers="
            )
    read = by_embed | by_head | {name for name, is_read in in_layers.items() if is_read}
    if read & unused:
        raise UserError(
            f"unused= names {_some(read & unused)}, which a stage reads; only what no stage reads "
            "can be left out of training (Trainer(frozen=...) keeps others as they are)"
        )
    unread = names - in_layers.keys() - read - unused
    if unread:
        raise UserError(
            f"no stage reads {_some(unread)}: neither embed nor head_loss does, and no layer holds "
            "it. Use it where the model's own forward pass does, list its module among layers=, or "
            "leave it out of the model that is trained; unused= names what the model's own forward "
            "pass does not read either"
        )
    idle = in_layers.keys() - read - unused
    if idle:
        raise UserError(
            f"layer holds {_some(idle)} but does not read it, so it would never be trained. Call "
            "the layer as the model's own forward pass does, with all its arguments; if that does "
            "not read it either, name it in unused= and it stays as it is"
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
