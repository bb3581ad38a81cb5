"""Files -> tokenised examples: block by block, in as many processes as there are cores, once.

What comes of given files, tokenizer and settings is kept on the disk if a folder is given for it,
and is memory-mapped from there, so that it needs no memory of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from slidedp_jax.data.encode_block import BlockEncoder
from slidedp_jax.data.example_settings import ExampleSettings
from slidedp_jax.data.examples import Examples, ExamplesBuilder, Part
from slidedp_jax.data.records import Block, blocks_of
from slidedp_jax.data.report import DataReport, Tally
from slidedp_jax.data.token_cache import Entry, TokenCache, cache_key, files_as_they_are
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.data.workers import encoded_in_processes
from slidedp_jax.errors import UserError
from slidedp_jax.wording import counted

_BYTES_PER_PROCESS = 4 << 20
"""Of the files, from which on a further process saves more time than its start takes."""

_MOST_PROCESSES = 32
"""Where their number is not said: each takes a tenth of a GiB."""

Progress = Callable[[int, float], None]
"""Takes the number of rows read so far, and the share of the files that they are."""


def load_examples(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer | None,
    settings: ExampleSettings,
    *,
    vocab_size: int | None = None,
    num_proc: int | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Examples, DataReport]:
    """Read and tokenise files; the result does not depend on the number of processes.

    Args:
      paths: see `read_records`.
      tokenizer: may be None when all rows are pre-tokenised.
      settings: how rows become examples.
      vocab_size: number of ids that the model's embedding has; larger ids are an error.
      num_proc: processes; None: one for each core, of large files. 1: this one.
      cache: folder for tokenised rows, which are taken from there the next time; None: they are
        held in memory.
      progress: told how far it is, block by block.
      say: takes a sentence on the cache.

    Returns:
      The examples in the order of the rows, and the report.

    Raises:
      RowError: a malformed row, unless `skip_bad_rows`.
      UserError: an unusable file, an id beyond the vocabulary, an over-long row under `raise`,
        nothing left to train on, a cache that cannot be written, or a process that was ended.
    """
    if num_proc is not None and num_proc < 1:
        raise UserError(f"num_proc is {num_proc}; it must be at least 1, or null for all cores")
    blocks = blocks_of(paths, settings.max_rows)  # checks the files
    work = BlockEncoder(tokenizer=tokenizer, settings=settings, vocab_size=vocab_size)
    files = [Path(path) for path in paths]
    processes = _num_processes(files, settings) if num_proc is None else num_proc
    done = _told(_encoded(work, blocks, processes), files, settings, progress)
    before = files_as_they_are(files)  # before they are digested: all of it is of one content
    key = None if cache is None else cache_key(files, tokenizer, settings, vocab_size)
    if cache is None or key is None:
        builder = ExamplesBuilder()
        tally, file_rows = _gather(done, builder, len(files))
        examples = builder.finish(file_rows)
        return examples, _report(tally, examples, paths, settings)
    kept = TokenCache(Path(cache), say or (lambda text: None))
    if (found := kept.read(key, [str(path) for path in paths])) is not None:
        done.close()
        return found

    def fill(entry: Entry) -> tuple[Examples, DataReport]:
        tally, file_rows = _gather(done, entry, len(files))
        # A file system's clock is too coarse to tell all changes; the contents are compared too.
        unchanged = files_as_they_are(files) == before
        if not unchanged or cache_key(files, tokenizer, settings, vocab_size) != key:
            raise UserError(
                f"{', '.join(map(str, paths))}: changed while being read; start again when nothing "
                "writes there any more"
            )
        examples = entry.finish(file_rows)
        return examples, _report(tally, examples, paths, settings)

    return kept.write(key, [str(path) for path in paths], fill)


def _num_processes(files: Sequence[Path], settings: ExampleSettings) -> int:
    """For short files or few rows a process takes longer to begin than to do its part."""
    size = sum(path.stat().st_size for path in files)
    if settings.max_rows is not None:
        size = min(size, settings.max_rows * 1024)
    cores = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    return max(1, min(cores, size // _BYTES_PER_PROCESS))


_Encoded = Iterator[tuple[Block, Part, Tally]]


def _encoded(work: BlockEncoder, blocks: Iterator[Block], num_proc: int) -> _Encoded:
    if num_proc > 1:
        return encoded_in_processes(work, blocks, num_proc)
    return ((block, *work.encode(block)) for block in blocks)


def _told(
    done: _Encoded, files: Sequence[Path], settings: ExampleSettings, progress: Progress | None
) -> Generator[tuple[Block, Part, Tally], None, None]:
    """The same, with word of how far it is."""
    sizes = [path.stat().st_size for path in files]
    rows, size = 0, 0.0
    for block, part, tally in done:
        rows += tally.rows_in
        size += block.share * sizes[block.place]
        yield block, part, tally
        if progress is not None:
            share = size / max(1, sum(sizes))
            progress(rows, max(share, rows / settings.max_rows) if settings.max_rows else share)


def _gather(
    done: Generator[tuple[Block, Part, Tally], None, None],
    into: ExamplesBuilder | Entry,
    num_files: int,
) -> tuple[Tally, list[int]]:
    """Put all parts one after the other; the sum of what became of them, and rows of each file."""
    whole, file_rows = Tally(), [0] * num_files
    with contextlib.closing(done):
        for block, part, tally in done:
            into.extend(part, whole.rows_in)
            file_rows[block.place] += tally.rows_in
            whole.add(tally)
    return whole, file_rows


def _report(
    tally: Tally, examples: Examples, paths: Sequence[str | Path], settings: ExampleSettings
) -> DataReport:
    report = tally.report(
        files=[str(path) for path in paths],
        max_seq_length=settings.max_seq_length,
        num_examples=len(examples),
        num_tokens=examples.num_tokens,
        num_supervised_tokens=examples.num_supervised_tokens,
    )
    if len(examples) == 0:
        raise _nothing_left(report)
    return report


_WAYS_OUT = {
    "bad": "mend the rows",
    "empty": "check the files",
    "over_long": "raise max_seq_length, or set over_long to truncate",
    "no_assistant_message": "give what the assistant answers, or set loss_on to all to learn every "
    "token",
    "no_supervised_tokens": "check loss_on, and what the rows say is not to be learnt (`train`, "
    "`weight`, `labels`, masks)",
    "supervised_tokens_cut_off": "raise max_seq_length, or keep the other side of long rows "
    "(truncation_keep; `keep` of ExampleSettings)",
}


def _nothing_left(report: DataReport) -> UserError:
    ways_out = "; ".join(_WAYS_OUT[reason] for reason in sorted(report.dropped))
    first = f". The first malformed one: {report.bad_rows[0]}" if report.bad_rows else ""
    return UserError(
        f"none of the {counted(report.rows_in, 'row')} of {', '.join(report.files)} can be trained "
        f"on: {report.drops} (max_seq_length is {report.max_seq_length:,}, the longest row has "
        f"{counted(report.longest_row, 'token')}); {ways_out}{first}"
    )
