"""Reading training files: bytes -> records.

A record is one JSON object (a line of a `.jsonl` file, an element of a JSON array, a row of a
parquet file, see `parquet`) or the whole of a `.txt` file. Records are read one by one and keep
nothing of each other: columns may change type or be null from row to row.

A line ends at LF and nowhere else: U+2028, U+2029 or U+0085 within a JSON string are text. CRLF, a
byte order mark, blank lines and a missing last LF are tolerated.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidedp_jax.data.parquet import parquet_rows
from slidedp_jax.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".parquet")

_BOM = b"\xef\xbb\xbf"


class RowError(UserError):
    """One row cannot be used; the message begins with its place (`file:line`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record as read.

    Attributes:
      source: place for messages, `file:line` (or `file:row` for arrays and parquet).
      fields: the JSON object; None when the record could not be parsed.
      error: the parser's message in that case.
      whole_file: `fields["text"]` is a whole text file.
      file: the file that it was read from.
    """

    source: str
    fields: Mapping[str, Any] | None
    error: str = ""
    whole_file: bool = False
    file: str = ""


def read_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """Records of the files, in the order given.

    Existence, emptiness and file type of all files are checked before the first record is read.

    Args:
      paths: files named `.jsonl`/`.ndjson`, `.json` (lines or one array), `.txt` (the whole file is
        one document, CRLF read as LF) or `.parquet` (needs pyarrow).

    Raises:
      UserError: a file is missing, empty, of another type or not an array of objects.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise UserError("no data file was given; name at least one .jsonl, .json, .txt or .parquet")
    for path in files:
        _check_file(path)
    return _records_of(files)


def _check_file(path: Path) -> None:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in SUFFIXES)
        raise UserError(f"{path} is a folder; name the files in it: {inside[:10]}")
    if not path.exists():
        near = []
        if path.parent.is_dir():
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()])
        hint = f"; {path.parent} has {near}" if near else ""
        raise UserError(f"data file {path} does not exist{hint}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown type {path.suffix!r}; known are {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                f"{path}: reading parquet needs the package pyarrow, which is not installed; "
                "`pip install pyarrow`, or convert the file to .jsonl"
            )
    elif not _has_content(path):
        raise UserError(f"data file {path} is empty")


def _has_content(path: Path) -> bool:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            if block.removeprefix(_BOM).strip():
                return True
    return False


def _records_of(files: list[Path]) -> Iterator[Record]:
    for path in files:
        if path.suffix == ".txt":
            yield _text_record(path)
        elif path.suffix == ".parquet":
            for number, fields in enumerate(parquet_rows(path), start=1):
                yield Record(source=f"{path}:row {number}", fields=fields, file=str(path))
        elif _first_byte(path) == b"[":
            yield from _array_records(path)
        else:
            yield from _line_records(path)


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        while block := file.read(4096):
            if block := block.removeprefix(_BOM).lstrip():
                return block[:1]
    return b""


def _text_record(path: Path) -> Record:
    try:
        text = path.read_bytes().removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}; convert it to UTF-8") from error
    text = text.replace("\r\n", "\n")
    return Record(source=str(path), fields={"text": text}, whole_file=True, file=str(path))


def _line_records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:  # a binary file's lines end at LF only
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n")
            if content:
                yield _parse_line(path, f"{path}:{number}", content)


def _parse_line(path: Path, source: str, content: bytes) -> Record:
    def failed(error: str) -> Record:
        return Record(source=source, fields=None, error=error, file=str(path))

    try:
        value = json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        hint = ""
        if content in (b"{", b"["):
            hint = "; the file looks like one JSON value over several lines: write one row per line"
        return failed(f"not valid JSON: {_what(error)} at column {error.colno}{hint}")
    except UnicodeDecodeError as error:
        return failed(f"not UTF-8: {error.reason}")
    except RecursionError:
        return failed("JSON nested too deeply")
    return _object_record(path, source, value)


def _what(error: json.JSONDecodeError) -> str:
    """The parser's message, some of which end in the "at" that the column follows."""
    return error.msg.removesuffix(" at")


def _object_record(path: Path, source: str, value: Any) -> Record:
    fields, error = value, ""
    if not isinstance(value, dict):
        fields, error = None, f"a row must be a JSON object {{...}}, got {type(value).__name__}"
    return Record(source=source, fields=fields, error=error, file=str(path))


def _array_records(path: Path) -> Iterator[Record]:
    try:
        values = json.loads(path.read_bytes().removeprefix(_BOM).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: the file begins as a JSON array but is not valid JSON: "
            f"{_what(error)} at column {error.colno}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}; convert it to UTF-8") from error
    if not values:
        raise UserError(f"data file {path} holds an empty array: no rows")
    for number, value in enumerate(values, start=1):
        yield _object_record(path, f"{path}:row {number}", value)
