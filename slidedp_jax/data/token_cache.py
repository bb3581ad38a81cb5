"""Tokenised rows on disk: a folder for each set of files, tokenizer, templates and settings.

An entry is known by contents: of the files (wherever they lie), of the tokenizer and its templates,
of the settings, and of the code that made it. It is there whole or not at all; what a run wrote
that did not come to its end has another name and is removed by a later one. Of two runs that make
the same entry at once, the one that is done first leaves it, and both read that. An entry's arrays
are checked when it is read (which also gives the fingerprint that runs compare), and a damaged one
is made anew.

Files of an entry: `coded.bin` (int32), `lengths.bin` and `row_ids.bin` (int64), little-endian, and
`entry.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from slidedp_jax.data.example_settings import ExampleSettings
from slidedp_jax.data.examples import Examples, Part
from slidedp_jax.data.report import DataReport, report_as_json, report_of_json
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.errors import UserError
from slidedp_jax.whole_files import UNFINISHED, remove_whole

_FORMAT = 1
_ARRAYS = {"coded": "<i4", "lengths": "<i8", "row_ids": "<i8"}
_OLD_S = 3600.0
"""Age from which on an unfinished entry that nobody holds is taken for a leftover."""

_WAY_OUT = "give another folder (data_cache), or null for none"

Loaded = tuple[Examples, DataReport]


def cache_key(
    files: Sequence[Path],
    tokenizer: Tokenizer | None,
    settings: ExampleSettings,
    vocab_size: int | None,
) -> str | None:
    """What the tokenised rows depend on, as 32 hexadecimal digits.

    None where they depend on the time at which they are rendered.
    """
    templates = {} if tokenizer is None else tokenizer.chat_templates
    clocks = {name: template.clock for name, template in templates.items()}
    if None in clocks.values():
        return None
    content = {
        "format": _FORMAT,
        "code": _code(),
        "files": [[path.suffix, _digest_of(path)] for path in files],
        "settings": dataclasses.asdict(settings),
        "vocab_size": vocab_size,
        "tokenizer": None
        if tokenizer is None
        else {
            "backend": hashlib.blake2b(tokenizer.backend.to_str().encode()).hexdigest(),
            "eos_id": tokenizer.eos_id,
            "prefix_ids": tokenizer.prefix_ids,
            "suffix_ids": tokenizer.suffix_ids,
            "special_texts": tokenizer.special_texts,
            "special_tokens": dict(tokenizer.special_tokens),
            "templates": {name: template.source for name, template in templates.items()},
            "clocks": clocks,
        },
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def files_as_they_are(files: Sequence[Path]) -> list[tuple[int, int, int, int]]:
    """Device, inode, size and time of the last change of each file."""
    stats = (path.stat() for path in files)
    return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _code() -> list[str]:
    """Of this package and of the libraries that decide what comes out."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    names = ("slidedp_jax", "tokenizers", "jinja2", "pyarrow")
    return [digest.hexdigest(), *map(_version, names)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@final
class Entry:
    """An entry that is being written, in a folder that is not its last."""

    def __init__(self, folder: Path, unusable: Callable[[OSError], UserError]):
        self._folder = folder
        self._unusable = unusable
        with _said_by(unusable):
            self._files = {name: (folder / f"{name}.bin").open("wb") for name in _ARRAYS}

    def extend(self, part: Part, first_row: int) -> None:
        """Add the examples of a part whose first row has that number."""
        arrays = {
            "coded": part.coded,
            "lengths": part.lengths,
            "row_ids": part.row_ids + first_row,
        }
        with _said_by(self._unusable):
            for name, array in arrays.items():
                self._files[name].write(np.ascontiguousarray(array, _ARRAYS[name]).data)

    def close(self) -> None:
        """Write what is not written yet."""
        with _said_by(self._unusable), contextlib.ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def finish(self, file_rows: Sequence[int]) -> Examples:
        """The examples as they will be read; their arrays are mapped."""
        self.close()
        with _said_by(self._unusable):
            return _examples(self._folder, file_rows)


@final
class TokenCache:
    """A folder of entries.

    Args:
      folder: made if it is not there.
      say: takes a sentence for the user.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._folder = folder
        self._say = say

    def read(self, key: str, files: Sequence[str]) -> Loaded | None:
        """What was kept; None where nothing was, or where it is damaged, which is said.

        Args:
          key: what `cache_key` gave.
          files: names that the files have now.
        """
        folder = self._folder / key
        if not folder.is_dir():
            return None
        try:
            entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
            examples = _examples(folder, entry["file_rows"])
            if _digests(examples) != entry["digests"]:
                raise ValueError("its bytes are not those that were written")
            found = examples, report_of_json(entry["report"], files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._say(f"the tokenised rows in {folder} are damaged ({error}): they are made anew")
            remove_whole(folder)
            return None
        self._say(f"tokenised rows are read from {folder} (--data_cache null makes them anew)")
        return found

    def write(self, key: str, files: Sequence[str], fill: Callable[[Entry], Loaded]) -> Loaded:
        """Make an entry and read it.

        Args:
          key: what `cache_key` gave.
          files: names of the files.
          fill: writes the examples and gives them with their report.

        Raises:
          UserError: the folder cannot be written; what `fill` raises.
        """
        with self._unfinished(key) as folder:
            with contextlib.closing(Entry(folder, self._unusable)) as entry:
                examples, report = fill(entry)  # what it cannot read is not the cache's fault
            with _said_by(self._unusable):
                description = {
                    "digests": _digests(examples),
                    "file_rows": examples.file_rows,
                    "report": report_as_json(report),
                }
                (folder / "entry.json").write_text(json.dumps(description), encoding="utf-8")
            for _ in range(2):
                try:
                    folder.rename(self._folder / key)
                except OSError:  # another run was first
                    if (found := self.read(key, files)) is not None:
                        return found
                    continue
                size = sum(path.stat().st_size for path in (self._folder / key).iterdir())
                self._say(
                    f"tokenised rows are kept in {self._folder / key} ({size / 1e6:,.1f} MB) for "
                    "the next start (--data_cache null keeps none; the folder may be deleted)"
                )
                break
        return examples, report  # mapped files may be renamed and removed

    @contextlib.contextmanager
    def _unfinished(self, key: str) -> Iterator[Path]:
        """A folder to write in, which is locked, and removed unless it gets another name."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            folder = tempfile.mkdtemp(prefix=f".{key}.", suffix=UNFINISHED, dir=self._folder)
        except OSError as error:
            raise self._unusable(error) from error
        with _locked(Path(folder)):
            try:
                yield Path(folder)
            finally:
                if os.path.isdir(folder):
                    remove_whole(Path(folder))

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f".*{UNFINISHED}"):
            with contextlib.suppress(OSError):  # another run may be doing the same
                if time.time() - path.stat().st_mtime > _OLD_S:
                    with _locked(path):
                        remove_whole(path)

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"tokenised rows cannot be kept in {self._folder} ({error.strerror or error}); "
            f"{_WAY_OUT}"
        )


@contextlib.contextmanager
def _said_by(unusable: Callable[[OSError], UserError]) -> Iterator[None]:
    """Where the cache is written: its errors are the user's to mend."""
    try:
        yield
    except OSError as error:
        raise unusable(error) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder.

    Raises:
      BlockingIOError: another process does.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def _examples(folder: Path, file_rows: Sequence[int]) -> Examples:
    """An entry's arrays, mapped.

    Raises:
      ValueError: they do not fit together.
      OSError: one is not there.
    """
    arrays = {name: _mapped(folder / f"{name}.bin", dtype) for name, dtype in _ARRAYS.items()}
    lengths = arrays["lengths"]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if len(lengths) != len(arrays["row_ids"]) or offsets[-1] != len(arrays["coded"]):
        raise ValueError("its files do not belong together")
    return Examples(
        coded=arrays["coded"],
        offsets=offsets,
        row_ids=arrays["row_ids"],
        file_rows=tuple(int(rows) for rows in file_rows),
    )


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _digests(examples: Examples) -> dict[str, Any]:
    rows = np.ascontiguousarray(examples.row_ids, "<i8").data
    row_ids = hashlib.blake2b(rows, digest_size=16).hexdigest()
    return {"examples": examples.fingerprint, "row_ids": row_ids}
