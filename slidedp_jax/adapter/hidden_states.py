"""What a user's layers hand on, as the one array that the runtime hands on.

Mostly that is an array [B, T, D]. Layers that hand more to the layers above (keys and values that
upper layers share, inputs of every layer) hand on a dict of arrays [B, T, ...]; side by side these
are one array [B, T, C], whose memory and traffic the runtime then counts as that of hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from slidedp_jax.errors import UserError


class HiddenStates:
    """The form of a model's hidden states.

    Args:
      example: shapes of what `embed` returned, an array or a dict of them.
      leading: rows and tokens of the batch that it was given.

    Attributes:
      joined: shape and dtype of the one array.

    Raises:
      UserError: it is neither.
    """

    def __init__(self, example: Any, leading: tuple[int, int]):
        self._keys = sorted(example) if isinstance(example, Mapping) else None
        parts = [example] if self._keys is None else [example[key] for key in self._keys]
        if not parts or any(not _is_hidden(part, leading) for part in parts):
            raise UserError(self._complaint("embed", example, leading))
        if self._keys is None:
            if len(example.shape) != 3:
                raise UserError(self._complaint("embed", example, leading))
            self.joined = jax.ShapeDtypeStruct(example.shape, example.dtype)
        else:
            width = sum(math.prod(part.shape[2:]) for part in parts)
            dtype = jnp.result_type(*(part.dtype for part in parts))
            self.joined = jax.ShapeDtypeStruct((*leading, width), dtype)
        self._trailing = [tuple(part.shape[2:]) for part in parts]

    def check(self, result: Any, leading: tuple[int, int], what: str) -> None:
        """See that a layer returned what it was given.

        Raises:
          UserError: it did not.
        """
        is_dict = isinstance(result, Mapping)
        if is_dict != (self._keys is not None) or (is_dict and sorted(result) != self._keys):
            raise UserError(self._complaint(what, result, leading))
        parts = [result[key] for key in self._keys] if self._keys is not None else [result]
        for part, trailing in zip(parts, self._trailing, strict=True):
            if not _is_hidden(part, leading):
                raise UserError(self._complaint(what, result, leading))
            if tuple(part.shape[2:]) != trailing:
                raise UserError(
                    f"{what} turned hidden states of shape {(*leading, *trailing)} into "
                    f"{part.shape}; a layer must keep their shape"
                )

    def join(self, states: Any, dtype: Any = None) -> jax.Array:
        """The user's hidden states as one array, [B, T, C]; parts of a dict take one dtype."""
        if self._keys is None:
            array: jax.Array = states
            return array
        parts = [states[key] for key in self._keys]
        dtype = jnp.result_type(*parts) if dtype is None else dtype
        flat = [part.reshape(*part.shape[:2], -1).astype(dtype) for part in parts]
        return jnp.concatenate(flat, axis=-1)

    def split(self, x: Any) -> Any:
        """What `join` joined."""
        if self._keys is None:
            return x
        states, start = {}, 0
        for key, trailing in zip(self._keys, self._trailing, strict=True):
            stop = start + math.prod(trailing)
            states[key] = x[..., start:stop].reshape(*x.shape[:2], *trailing)
            start = stop
        return states

    def _complaint(self, what: str, result: Any, leading: tuple[int, int]) -> str:
        got = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", result)
        wanted = (
            "one array, the hidden states [rows, tokens, hidden] (of a layer that returns a tuple, "
            "such as (cache, x), return x)"
            if self._keys is None
            else f"what it is given, a dict of the floats {self._keys}, each [rows, tokens, ...]"
        )
        return (
            f"{what} returned {got} for rows of shape {list(leading)}; it must return {wanted}. "
            "Only a layer may return two: x and, as one float32 number, the sum over the rows of a "
            "loss of its own (and third a dict of float32 sums for loss_of_sums). What lower "
            "layers hand to upper ones beside x goes into a dict of arrays [rows, tokens, ...], "
            "which embed begins"
        )


def _is_hidden(part: Any, leading: tuple[int, int]) -> bool:
    shape = getattr(part, "shape", None)
    if shape is None or len(shape) < 3 or tuple(shape[:2]) != tuple(leading):
        return False
    return bool(jnp.issubdtype(part.dtype, jnp.floating))
