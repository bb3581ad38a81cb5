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
_LEAST_ROWS, _MOST_PARTS = 4096, 8
"""A row group is read in so many parts at the most, since each of them has to begin at its top."""

_Clean = Callable[[Any], Any]


def parquet_parts(path: Path) -> Iterator[dict[str, Any]]:
    """Parts of a file that can be read by themselves, in order.

    Returns:
      `group`, and `begin` and `end` as `parquet_rows` takes them; `first`, the number of the first
      row in the file, from 1; `share` of the file's rows.

    Raises:
      UserError: the file cannot be read or has no rows.
    """
    with _opened(path) as file:
        total, first = file.metadata.num_rows, 1
        if total == 0:
            raise UserError(f"data file {path} has no rows")
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            step = max(_LEAST_ROWS, -(-rows // _MOST_PARTS))
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                share = (end - begin) / total
                yield {"group": group, "begin": begin, "end": end, "first": first, "share": share}
                first += end - begin


def parquet_rows(path: Path, group: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Rows of a row group as objects; a column that is null stays, as null.

    Args:
      path: the file.
      group: index of the row group.
      begin: index of the first row within the group.
      end: index after the last.

    Raises:
      UserError: the file cannot be read.
    """
    with _opened(path) as file:
        columns = {column.name: _cleaner(column.type) for column in file.schema_arrow}
        nested = {name: clean for name, clean in columns.items() if clean is not None}
        place = 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group]):
            skipped = min(max(0, begin - place), batch.num_rows)
            wanted = batch.slice(skipped, min(end - place, batch.num_rows) - skipped)
            place += batch.num_rows
            for fields in wanted.to_pylist():
                for name, clean in nested.items():
                    fields[name] = clean(fields[name])
                yield fields
            if place >= end:
                return


def _opened(path: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


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
