"""Arrays out of and into the training state, in pieces."""

from __future__ import annotations

import math

import numpy as np

from slidedp_jax.checkpoint.array_streams import Fill, Use
from slidedp_jax.checkpoint.stored_arrays import StoredArray
from slidedp_jax.update.state_gate import StateReader, StateWriter


def from_state(reader: StateReader) -> Fill:
    """What `ArrayWriter` asks for values of the state that is read."""
    whole: dict[StoredArray, np.ndarray] = {}  # while one thread takes its pieces

    def fill(array: StoredArray, start: int, out: np.ndarray) -> None:
        if array.number is None:
            reader.read_into(array.name, start, out)
        elif not array.whole:
            reader.read_state_into(array.name, array.number, start, out)
        else:
            if array not in whole:
                whole[array] = reader.read_state(array.name, array.number).reshape(-1)
            out[:] = whole[array][start : start + len(out)]
            if start + len(out) == len(whole[array]):
                del whole[array]

    return fill


def into_state(writer: StateWriter) -> Use:
    """What takes the values that `ArrayReader` reads into the state."""
    whole: dict[StoredArray, np.ndarray] = {}

    def use(array: StoredArray, start: int, values: np.ndarray) -> None:
        if array.number is None:
            writer.write_at(array.name, start, values)
        elif not array.whole:
            writer.write_state_at(array.name, array.number, start, values)
        else:
            size = math.prod(array.shape)
            gathered = whole.setdefault(array, np.empty(size, array.dtype))
            gathered[start : start + len(values)] = values
            if start + len(values) == size:
                writer.write_state(array.name, array.number, whole.pop(array).reshape(array.shape))

    return use
