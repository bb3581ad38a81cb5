"""Rows -> token ids and which of them are supervised.

Chat rows are exactly what the template prints. Completions and documents end with one eos. A
prompt is tokenised as it will be when the model is used, so a token that would merge its end with
the beginning of the completion is not formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tokenizers

from slidedp_jax.data.chat_template import Span
from slidedp_jax.data.example_settings import ExampleSettings
from slidedp_jax.data.examples import IGNORED
from slidedp_jax.data.records import RowError
from slidedp_jax.data.rows import ChatRow, CompletionRow, Row, TextRow, TokenRow
from slidedp_jax.data.spans import assistant_spans
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One row as ids int32 [length] and supervised bool [length], before any cut."""

    input_ids: np.ndarray
    supervised: np.ndarray


class Encoder:
    """Turns rows into ids, many at once."""

    def __init__(self, tokenizer: Tokenizer | None, settings: ExampleSettings, notes: Counter[str]):
        self._given = tokenizer
        self._settings = settings
        self._notes = notes

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given is None:
            raise UserError("rows of text need a tokenizer; only `input_ids` rows go without one")
        return self._given

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowError]:
        """Ids of each row, or what is wrong with it."""
        results: dict[int, Encoded | RowError] = {}
        chats: dict[int, tuple[str, list[Span]]] = {}
        for index, row in enumerate(rows):
            try:
                if isinstance(row, ChatRow):
                    chats[index] = self._rendered(row)
                elif isinstance(row, TokenRow):
                    results[index] = _from_tokens(row)
            except RowError as error:
                results[index] = error
        if chats:
            encodings = self._tokenizer.encode_batch_with_spans(
                [text for text, _ in chats.values()]
            )
            for (index, (_, spans)), encoding in zip(chats.items(), encodings, strict=True):
                results[index] = self._chat(encoding, spans)
        self._encode_texts(rows, results)
        self._encode_completions(rows, results)
        return [results[index] for index in range(len(rows))]

    def _rendered(self, row: ChatRow) -> tuple[str, list[Span]]:
        tokenizer, loss_on = self._tokenizer, self._settings.loss_on
        template = tokenizer.chat_template(row.tools)
        kwargs = self._settings.template_kwargs
        if loss_on == "all":
            text, _ = assistant_spans(
                replace(row, train=(False,) * len(row.messages)), template, (), kwargs
            )
            return text, [(0, len(text))]
        if loss_on == "completion":
            said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
            last = tuple(keep and i == said[-1] for i, keep in enumerate(row.train))
            row = replace(row, train=last)
        text, spans = assistant_spans(row, template, tokenizer.special_texts, kwargs)
        if template.has_generation_markers and spans:
            following = text[spans[-1][1] :].lstrip()
            if following.startswith(tokenizer.special_texts):
                self._note(
                    "the template's generation markers leave out the token that ends a turn: the "
                    "model is not taught to stop"
                )
        return text, spans

    def _chat(self, encoding: tokenizers.Encoding, spans: list[Span]) -> Encoded:
        return Encoded(
            input_ids=np.array(encoding.ids, np.int32),
            supervised=tokens_in_spans(encoding.offsets, spans),
        )

    def _encode_texts(self, rows: Sequence[Row], results: dict[int, Encoded | RowError]) -> None:
        texts = {i: row for i, row in enumerate(rows) if isinstance(row, TextRow)}
        if not texts:
            return
        if self._settings.loss_on in ("assistant", "completion"):
            source = next(iter(texts.values())).source
            raise UserError(
                f"{source}: a text has no {self._settings.loss_on} to learn; set loss_on to all or "
                "auto, or give `messages` or `prompt`/`completion` rows"
            )
        encoded = self._tokenizer.encode_batch([row.text for row in texts.values()])
        for index, ids in zip(texts, encoded, strict=True):
            results[index] = self._document(ids, 0)

    def _encode_completions(
        self, rows: Sequence[Row], results: dict[int, Encoded | RowError]
    ) -> None:
        pairs = {i: row for i, row in enumerate(rows) if isinstance(row, CompletionRow)}
        if not pairs:
            return
        prompts = self._tokenizer.encode_batch([row.prompt for row in pairs.values()])
        wholes = self._tokenizer.encode_batch([r.prompt + r.completion for r in pairs.values()])
        for (index, row), prompt, whole in zip(pairs.items(), prompts, wholes, strict=True):
            if whole[: len(prompt)] != prompt:
                self._note(
                    "a token would have joined the prompt's end with the completion; the two were "
                    "tokenised apart"
                )
                whole = prompt + self._tokenizer.encode(row.completion)
            given = 0 if self._settings.loss_on == "all" else len(prompt)
            results[index] = self._document(whole, given)

    def _document(self, ids: list[int], given: int) -> Encoded:
        """A text between what the tokenizer puts around it, of which the first ids are given."""
        begun = self._tokenizer.begun(ids)
        # What the tokenizer puts before a text is never said, also where the text had it.
        given = max(given + len(begun) - len(ids), len(self._tokenizer.prefix_ids))
        whole = self._tokenizer.ended(begun) if self._settings.append_eos else begun
        return Encoded(
            input_ids=np.array(whole, np.int32),
            supervised=np.arange(len(whole)) >= given,
        )

    def _note(self, text: str) -> None:
        self._notes[text] += 1


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Tokens, bool [length], that begin inside one of the spans.

    A token that begins before a span belongs to what the model is given, one that begins inside and
    ends after it to what the model says. Tokenizers may report a token without its leading white
    space; it begins where the token before it ended.
    """
    places = np.array(offsets, np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(places[:, 1])
    begins = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]])[: len(places)])
    inside = np.zeros(len(places), bool)
    for first, last in spans:
        inside |= (begins >= first) & (begins < last)
    return inside


def _from_tokens(row: TokenRow) -> Encoded:
    ids = np.array(row.input_ids, np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= 2**31))
    if len(wrong):
        raise RowError(
            f"{row.source}: input_ids[{wrong[0]}] is {ids[wrong[0]]}, which is not a token id"
        )
    if row.labels is None:
        return Encoded(input_ids=ids.astype(np.int32), supervised=np.ones(len(ids), bool))
    labels = np.array(row.labels, np.int64)
    wrong = np.flatnonzero((labels != IGNORED) & (labels != ids))
    if len(wrong):
        at = wrong[0]
        shifted = np.array_equal(labels[:-1], ids[1:])
        hint = "; they look shifted by one already, which happens here" if shifted else ""
        raise RowError(
            f"{row.source}: labels[{at}] is {labels[at]}, but input_ids[{at}] is {ids[at]}; a "
            f"label is the token at its own position or {IGNORED}{hint}"
        )
    return Encoded(input_ids=ids.astype(np.int32), supervised=labels != IGNORED)
