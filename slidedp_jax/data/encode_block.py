"""One block of a file -> examples, and the count of what was dropped or cut.

An example's first token has nothing before it that could predict it and is never supervised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np

from slidedp_jax.data.encode import Encoded, Encoder
from slidedp_jax.data.example_settings import ExampleSettings, OverLong
from slidedp_jax.data.examples import ExamplesBuilder, Part
from slidedp_jax.data.records import Block, Record, RowError, records_in
from slidedp_jax.data.report import BAD_ROWS_SHOWN, Tally
from slidedp_jax.data.rows import ChatRow, CompletionRow, Row, TextRow, parse_row
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.errors import UserError

_ROWS_AT_ONCE = 128  # enough to occupy the tokenizer's threads; their encodings are short-lived


@final
@dataclass(frozen=True, kw_only=True)
class BlockEncoder:
    """Reads and tokenises blocks; may be sent to another process.

    Attributes:
      tokenizer: may be None when all rows are pre-tokenised.
      settings: how rows become examples.
      vocab_size: number of ids that the model's embedding has; larger ids are an error.
    """

    tokenizer: Tokenizer | None
    settings: ExampleSettings
    vocab_size: int | None

    def encode(self, block: Block) -> tuple[Part, Tally]:
        """Examples of a block's rows, numbered from 0, and what became of the rows.

        Raises:
          RowError: a malformed row, unless `skip_bad_rows`.
          UserError: an id beyond the vocabulary, or an over-long row under `raise`.
        """
        tally, builder, settings = Tally(), ExamplesBuilder(), self.settings
        encoder = Encoder(self.tokenizer, settings)
        for chunk in _chunks(enumerate(records_in(block)), _ROWS_AT_ONCE):
            rows = []
            for row_id, record in chunk:
                tally.rows_in += 1
                row = _parsed(record, settings, tally)
                if row is not None:
                    rows.append((row_id, record.file, row))
            for (row_id, file, row), encoded in zip(
                rows, encoder.encode([row for *_, row in rows]), strict=True
            ):
                if isinstance(encoded, RowError):
                    _bad_row(encoded, settings, tally)
                    continue
                _check_ids(encoded, row.source, self.vocab_size, self.tokenizer)
                tally.remarks.add(file, (*row.remarks, *encoded.remarks))
                _keep_row(encoded, row, row_id, settings, tally, builder)
        return builder.part(), tally


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _parsed(record: Record, settings: ExampleSettings, tally: Tally) -> Row | None:
    try:
        return parse_row(record, settings.columns)
    except RowError as error:
        _bad_row(error, settings, tally)
        return None


def _bad_row(error: RowError, settings: ExampleSettings, tally: Tally) -> None:
    if not settings.skip_bad_rows:
        raise RowError(f"{error}. (`skip_bad_rows` would count and skip such rows.)") from error
    tally.drop("bad")
    if len(tally.bad_rows) < BAD_ROWS_SHOWN:
        tally.bad_rows.append(str(error))


def _check_ids(
    encoded: Encoded, source: str, vocab_size: int | None, tokenizer: Tokenizer | None
) -> None:
    if vocab_size is None or len(encoded.input_ids) == 0:
        return
    position = int(np.argmax(encoded.input_ids))
    token = int(encoded.input_ids[position])
    if token >= vocab_size:
        known = ""
        if tokenizer is not None:
            text = tokenizer.backend.id_to_token(token)
            known = f" ({text!r})" if text else ""
        raise UserError(
            f"{source}: token {position} has the id {token}{known}, but the model's vocabulary has "
            f"{vocab_size} ids; the tokenizer or the token ids belong to another model"
        )


def _keep_row(
    encoded: Encoded,
    row: Row,
    row_id: int,
    settings: ExampleSettings,
    tally: Tally,
    builder: ExamplesBuilder,
) -> None:
    """Apply the length policy and add what is left, or count why nothing is."""
    length, limit = len(encoded.input_ids), settings.max_seq_length
    tally.saw_length(length, row.source)
    encoded.supervised[:1] = False
    if not encoded.supervised.any():
        tally.drop(_why_nothing(row, length), length)
        return
    windows = [slice(0, length)]
    if length > limit:
        policy = _policy(row, length, settings)
        if policy == "drop":
            tally.drop("over_long", length)
            return
        if policy == "split":
            windows = [slice(start, start + limit) for start in range(0, length, limit)]
        else:
            windows = [
                slice(0, limit) if settings.keep == "start" else slice(length - limit, length)
            ]
    kept = 0
    for window in windows:
        supervised = encoded.supervised[window].copy()
        supervised[:1] = False
        if supervised.any():
            builder.append(encoded.input_ids[window], supervised, row_id)
            kept += len(supervised)
    if not kept:
        tally.drop("supervised_tokens_cut_off", length)
        return
    tally.rows_kept += 1
    tally.tokens_lost += length - kept
    tally.split += len(windows) > 1
    tally.truncated += length > limit and len(windows) == 1


def _why_nothing(row: Row, length: int) -> str:
    """Why no token of a row is learnt."""
    if not length:
        return "empty"
    if isinstance(row, ChatRow) and all(m["role"] != "assistant" for m in row.messages):
        return "no_assistant_message"
    return "no_supervised_tokens"


def _policy(row: Row, length: int, settings: ExampleSettings) -> OverLong:
    if isinstance(row, TextRow) and row.whole_file:
        return "split"
    policy = settings.over_long
    if policy == "raise" or (policy == "split" and isinstance(row, ChatRow | CompletionRow)):
        why = "over_long is raise" if policy == "raise" else "only documents can be split"
        raise UserError(
            f"{row.source}: the row has {length:,} tokens, max_seq_length is "
            f"{settings.max_seq_length:,}, and {why}; raise max_seq_length or set over_long to "
            "truncate or drop"
        )
    return policy
