"""Items as earlier versions wrote them: one database of TensorStore's each, read through Orbax."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from slidedp_jax.checkpoint.array_streams import Use
from slidedp_jax.checkpoint.crc import crc32
from slidedp_jax.checkpoint.stored_arrays import StoredArray
from slidedp_jax.jax_internals import read_arrays


def read_former_item(
    item: pathlib.Path,
    arrays: Sequence[StoredArray],
    expected: Mapping[str, Mapping[str, int]] | None,
    use: Use,
) -> None:
    """Read arrays of an item, compare them with their checksums and hand them on.

    Takes the memory of all of them.

    Raises:
      ValueError, KeyError, OSError, RuntimeError: some are not there, not whole, or others.
    """
    tree = read_arrays(item.absolute())
    for array in arrays:
        found = np.asarray(tree[array.name][array.key])
        if (found.shape, found.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"{array.key} of {array.name} is {found.dtype}{list(found.shape)}, not "
                f"{array.dtype}{list(array.shape)}"
            )
        flat = np.ascontiguousarray(found).reshape(-1)
        if (
            expected is not None
            and crc32(flat.view(np.uint8).data) != (expected[array.name][array.key])
        ):
            raise ValueError(f"{array.key} of {array.name} has other values than were saved")
        use(array, 0, flat)
