"""Rows of parquet files, with the keys that each row had.

Arrow gives every struct of a column the keys of all of them: where rows have different tools, a
row's `arguments` and schemas come back with null for each key of the others. Such keys are left
out, at any depth, and a struct that held nothing else is empty. A null in a list is an element and
stays, and so does one in JSON text. Maps, which have their own keys in every row, become objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slidedp_jax.errors import UserError

_ROWS_AT_ONCE = 1024

_Clean = Callable[[Any], Any]


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as objects; a column that is null stays, as null.

    Raises:
      UserError: the file cannot be read or has no rows.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error
    with file:
        if file.metadata.num_rows == 0:
            raise UserError(f"data file {path} has no rows")
        columns = {column.name: _cleaner(column.type) for column in file.schema_arrow}
        nested = {name: clean for name, clean in columns.items() if clean is not None}
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            for fields in batch.to_pylist():
                for name, clean in nested.items():
                    fields[name] = clean(fields[name])
                yield fields


def _cleaner(kind: Any) -> _Clean | None:
    """What makes Arrow's Python values of a type the row's; None for types without structs."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _cleaner(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _cleaner(kind.value_type)
    if types.is_struct(kind):
        return _struct_cleaner({field.name: _cleaner(field.type) for field in kind})
    if types.is_map(kind):
        return _map_cleaner(_cleaner(kind.item_type))
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # lists of every layout
        clean = _cleaner(kind.value_type)
        return None if clean is None else _list_cleaner(clean)
    return None


def _struct_cleaner(entries: dict[str, _Clean | None]) -> _Clean:
    def clean(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {
            name: entry if (inner := entries[name]) is None else inner(entry)
            for name, entry in value.items()
            if entry is not None
        }

    return clean


def _list_cleaner(clean_element: _Clean) -> _Clean:
    def clean(value: list[Any] | None) -> list[Any] | None:
        return None if value is None else [clean_element(element) for element in value]

    return clean


def _map_cleaner(clean_item: _Clean | None) -> _Clean:
    def clean(value: list[tuple[Any, Any]] | None) -> dict[Any, Any] | None:
        if value is None or clean_item is None:
            return None if value is None else dict(value)
        return {key: clean_item(item) for key, item in value}

    return clean
