"""What every kind of user's model is brought to before it becomes stages.

Functions take the tree that they may read, then what the runtime hands on. `key` is a PRNG key
while a model that draws random numbers is trained, else None. Letters: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from slidedp_jax.errors import UserError
from slidedp_jax.models.streamed import Batch

Tree = Any
Key = jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model as one tree of parameters and functions over it.

    Attributes:
      tree: shapes of all parameters, `jax.ShapeDtypeStruct`.
      value: name -> what the user's model holds now, an array or its shape.
      layers: dotted path and shapes of the parameters of each layer, bottom first; no mapping,
        whose keys JAX's functions over trees sort as text.
      embed: (tree, batch, key) -> x [B, T, D].
      layer_fns: per layer (layer tree, x, batch, key) -> x or (x, aux); equal layers share one
        object.
      head_loss: (tree, x, batch, key) -> scalar.
      write_back: masters by name -> the user's model with them.
    """

    tree: Tree
    value: Callable[[str], Any]
    layers: tuple[tuple[str, Tree], ...]
    embed: Callable[[Tree, Batch, Key], jax.Array]
    layer_fns: tuple[Callable[[Tree, jax.Array, Batch, Key], Any], ...]
    head_loss: Callable[[Tree, jax.Array, Batch, Key], jax.Array]
    write_back: Callable[[Mapping[str, np.ndarray]], Any]


class Rows(dict[str, Any]):
    """The arrays of the rows at hand; what is not there is asked for in vain, but helpfully."""

    def __missing__(self, name: str) -> Any:
        hint = {
            "segment_ids": "rows are packed or padded only where the batches have segment_ids; "
            "read batch.get('segment_ids'), or pass packed=True to adapt() if all have them",
            "key": "random numbers are drawn only in training and with dropout=True; read "
            "batch.get('key')",
            "labels": "read batch['targets']: the labels, already shifted by one",
        }
        raise UserError(
            f"a model function asked for batch[{name!r}]; the batch has {sorted(self)}. "
            + hint.get(name, "Name further arrays of your batches in adapt(token_arrays=...)")
        )


def one_per_layer(
    layer: Callable[..., Any] | Sequence[Callable[..., Any]], num_layers: int
) -> list[Callable[..., Any]]:
    """The user's layer functions, bottom first."""
    fns = list(layer) if isinstance(layer, Sequence) else [layer] * num_layers
    if len(fns) != num_layers:
        raise UserError(f"layer= has {len(fns)} functions for {num_layers} layers; give one each")
    return fns


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf without its values."""
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)


def like(value: np.ndarray, old: Any) -> Any:
    """A master as the kind of array that the user had: its dtype and its devices."""
    value = np.asarray(value).astype(old.dtype)
    if isinstance(old, np.ndarray):
        return value
    if isinstance(old, jax.Array):
        return jax.device_put(value, old.sharding)
    return jax.numpy.asarray(value)


def check_names(parameters: Mapping[str, np.ndarray], names: Mapping[str, Any]) -> None:
    """Masters and model have the same parameters.

    Raises:
      UserError: some are missing or unknown.
    """
    missing, unknown = names.keys() - parameters.keys(), parameters.keys() - names.keys()
    if missing or unknown:
        raise UserError(
            f"write_back got {len(parameters)} parameters for a model of {len(names)}: "
            f"{len(missing)} are missing (such as {min(missing, default='none')}), {len(unknown)} "
            f"unknown (such as {min(unknown, default='none')}); pass trainer.parameters() of this "
            "very model"
        )
