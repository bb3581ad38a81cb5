"""Reading training files: bytes -> records.

A record is one JSON object (a line of a `.jsonl` file, an element of a JSON array, a row of a
parquet file, see `parquet`) or the whole of a `.txt` file. Records are read one by one and keep
nothing of each other: columns may change type or be null from row to row. Files are cut into blocks
of about a megabyte, each of which can be read by itself, by any process: a file of lines or parquet
is never in memory as a whole. A JSON array is.

A line ends at LF and nowhere else: U+2028, U+2029 or U+0085 within a JSON string are text. CRLF, a
byte order mark, blank lines and a missing last LF are tolerated.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from slidedp_jax.data.parquet import parquet_parts, parquet_rows
from slidedp_jax.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".parquet")

BLOCK_BYTES = 1 << 20
"""Of a file of lines: a second's work for a process, and little to wait for at the end."""

_VALUES_AT_ONCE = 1024

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of a file that can be read by itself.

    Attributes:
      path: the file.
      place: index of the file among those given.
      kind: what `begin` and `end` count: bytes of whole lines, rows of a group of a parquet file,
        or elements of a JSON array; a text file is one block.
      begin: where it begins.
      end: where it ends; of lines and rows that is after the last.
      first: number of its first line, row or element in the file, from 1.
      group: index of the parquet file's row group.
      values: the array's elements.
      share: of the file that it is, for progress.
      most_rows: records beyond these are not read; None: all.
    """

    path: Path
    place: int
    kind: Literal["lines", "rows", "values", "text"]
    begin: int = 0
    end: int = 0
    first: int = 1
    group: int = 0
    values: Sequence[Any] = ()
    share: float = 1.0
    most_rows: int | None = None


def read_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """Records of the files, in the order given.

    Existence, emptiness and file type of all files are checked before the first record is read.

    Args:
      paths: files named `.jsonl`/`.ndjson`, `.json` (lines or one array), `.txt` (the whole file is
        one document, CRLF read as LF) or `.parquet` (needs pyarrow).

    Raises:
      UserError: a file is missing, empty, of another type or not an array of objects.
    """
    blocks = blocks_of(paths)  # checks at once
    return (record for block in blocks for record in records_in(block))


def blocks_of(paths: Sequence[str | Path], max_rows: int | None = None) -> Iterator[Block]:
    """The files in blocks, in the order given; checks and errors as for `read_records`.

    Args:
      paths: as for `read_records`.
      max_rows: only so many records from the first on; None: all.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise UserError("no data file was given; name at least one .jsonl, .json, .txt or .parquet")
    for path in files:
        _check_file(path)
    return _first_rows(files, max_rows)


def _first_rows(files: list[Path], max_rows: int | None) -> Iterator[Block]:
    left = max_rows
    for place, path in enumerate(files):
        for block in _blocks_in(path, place):
            if left is None:
                yield block
                continue
            if left == 0:
                return
            yield replace(block, most_rows=left)
            left -= min(left, _num_records(block, left))


def _num_records(block: Block, most: int) -> int:
    if block.kind == "lines":
        lines = (line for line in _lines_in(block) if line[1])
        return sum(1 for _ in islice(lines, most))
    return 1 if block.kind == "text" else block.end - block.begin


def _blocks_in(path: Path, place: int) -> Iterator[Block]:
    if path.suffix == ".txt":
        yield Block(path=path, place=place, kind="text")
    elif path.suffix == ".parquet":
        for rows in parquet_parts(path):
            yield Block(path=path, place=place, kind="rows", **rows)
    elif _first_byte(path) == b"[":
        values = _array_values(path)
        for begin in range(0, len(values), _VALUES_AT_ONCE):
            part = values[begin : begin + _VALUES_AT_ONCE]
            yield Block(
                path=path,
                place=place,
                kind="values",
                begin=begin,
                end=begin + len(part),
                first=begin + 1,
                values=part,
                share=len(part) / len(values),
            )
    else:
        yield from _blocks_of_lines(path, place)


def _blocks_of_lines(path: Path, place: int) -> Iterator[Block]:
    size, begin, first = max(1, path.stat().st_size), 0, 1
    with path.open("rb") as file:  # a binary file's lines end at LF only
        # What is appended meanwhile is not read.
        while begin < size and (content := file.read(BLOCK_BYTES)):
            rest = b"" if content.endswith(b"\n") else file.readline()
            end = begin + len(content) + len(rest)
            share = (end - begin) / size
            yield Block(
                path=path, place=place, kind="lines", begin=begin, end=end, first=first, share=share
            )
            begin, first = end, first + content.count(b"\n") + rest.count(b"\n")


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


def records_in(block: Block) -> Iterator[Record]:
    """Records of one block.

    Raises:
      UserError: the file is not UTF-8 text, or cannot be read as parquet.
    """
    return islice(_all_records_in(block), block.most_rows)


def _all_records_in(block: Block) -> Iterator[Record]:
    path = block.path
    if block.kind == "text":
        yield _text_record(path)
    elif block.kind == "rows":
        rows = parquet_rows(path, block.group, block.begin, block.end)
        for number, fields in enumerate(rows, start=block.first):
            yield Record(source=f"{path}:row {number}", fields=fields, file=str(path))
    elif block.kind == "values":
        for number, value in enumerate(block.values, start=block.first):
            yield _object_record(path, f"{path}:row {number}", value)
    else:
        for number, content in _lines_in(block):
            if content:
                yield _parse_line(path, f"{path}:{number}", content)


def _lines_in(block: Block) -> Iterator[tuple[int, bytes]]:
    """Numbers of a block's lines and what they hold, without white space around it."""
    with block.path.open("rb") as file:
        file.seek(block.begin)
        lines = file.read(block.end - block.begin).split(b"\n")
    for number, line in enumerate(lines, start=block.first):
        yield number, (line.removeprefix(_BOM) if number == 1 else line).strip(b" \t\r\n")


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


def _array_values(path: Path) -> list[Any]:
    try:
        values: list[Any] = json.loads(path.read_bytes().removeprefix(_BOM).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: the file begins as a JSON array but is not valid JSON: "
            f"{_what(error)} at column {error.colno}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}; convert it to UTF-8") from error
    if not values:
        raise UserError(f"data file {path} holds an empty array: no rows")
    return values
