"""Rows -> token ids and which of them are supervised.

Chat rows are exactly what the template prints. Completions and documents end with one eos. A
prompt is tokenised as it will be when the model is used, so a token that would merge its end with
the beginning of the completion is not formed.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tokenizers

from slidedp_jax.data.chat_template import Span
from slidedp_jax.data.conversations import REASONING
from slidedp_jax.data.empty_reasoning import learnt_empty_reasoning
from slidedp_jax.data.example_settings import ExampleSettings
from slidedp_jax.data.examples import IGNORED
from slidedp_jax.data.records import RowError
from slidedp_jax.data.remarks import Remark
from slidedp_jax.data.rows import ChatRow, CompletionRow, Row, TextRow, TokenRow
from slidedp_jax.data.spans import Located, locate
from slidedp_jax.data.tokenizer import Tokenizer
from slidedp_jax.data.unprinted import unprinted
from slidedp_jax.errors import UserError

_NEVER_STOPS = (
    "the template's generation markers leave out the token that ends a turn: the model is not "
    "taught to stop ({} [row|rows])"
)
_TOKENISED_APART = (
    "a token would have joined the prompt's end with the completion; the two were tokenised apart "
    "({} [row|rows])"
)
_SHARED_TOKEN = (
    "{} [answer shares its|answers share their] first token with what stands before; the model "
    "does not learn it"
)

_EMPTY = "{} [answer is|answers are] empty: the model learns to end at once"


class NeedsTokenizer(UserError):
    """Rows of text came up, and the model's folder has no tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """One row as ids int32 [length] and supervised bool [length], before any cut, with remarks."""

    input_ids: np.ndarray
    supervised: np.ndarray
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    """A conversation's text, the spans that are learnt, and what to remark on it."""

    text: str
    learnt: list[Span]
    remarks: list[Remark]


class Encoder:
    """Turns rows into ids, many at once."""

    def __init__(self, tokenizer: Tokenizer | None, settings: ExampleSettings):
        self._given = tokenizer
        self._settings = settings

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given is None:
            raise NeedsTokenizer(
                "rows of text need a tokenizer; only `input_ids` rows go without one"
            )
        return self._given

    def encode(self, rows: Sequence[Row]) -> list[Encoded | RowError]:
        """Ids of each row, or what is wrong with it."""
        results: dict[int, Encoded | RowError] = {}
        chats: dict[int, _Rendered] = {}
        for index, row in enumerate(rows):
            try:
                if isinstance(row, ChatRow):
                    chats[index] = self._rendered(row)
                elif isinstance(row, TokenRow):
                    results[index] = _from_tokens(row)
            except RowError as error:
                results[index] = error
        if chats:
            encodings = self._tokenizer.encode_batch_with_spans([c.text for c in chats.values()])
            for (index, chat), encoding in zip(chats.items(), encodings, strict=True):
                results[index] = _encoded_chat(chat, encoding)
        self._encode_texts(rows, results)
        self._encode_completions(rows, results)
        return [results[index] for index in range(len(rows))]

    def _rendered(self, row: ChatRow) -> _Rendered:
        tokenizer, loss_on = self._tokenizer, self._settings.loss_on
        template = tokenizer.chat_template(row.tools)
        if loss_on == "all":
            wanted = replace(row, train=(False,) * len(row.messages))
        elif loss_on == "completion":
            said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
            wanted = replace(
                row, train=tuple(keep and i == said[-1] for i, keep in enumerate(row.train))
            )
        else:
            wanted = row
        located = locate(wanted, template, tokenizer.special_texts, self._settings.template_kwargs)
        _check_text(row, located.text)
        learnt = [(0, len(located.text))] if loss_on == "all" else located.learnt
        remarks = unprinted(row, located) if learnt else []
        if learnt:
            remarks.append(Remark(text=_EMPTY, count=_empty_answers(wanted, loss_on == "all")))
        remarks += learnt_empty_reasoning(row, located, learnt, template.source)
        if self._never_stops(wanted, located):
            remarks.append(Remark(text=_NEVER_STOPS))
        remarks += [
            Remark(
                text=f"{{}} [row gives|rows give] the chat template {name!r}, which it does not "
                "read"
            )
            for name in {**self._settings.template_kwargs, **row.template_kwargs}
            if name not in template.source
        ]
        return _Rendered(text=located.text, learnt=learnt, remarks=remarks)

    def _never_stops(self, row: ChatRow, located: Located) -> bool:
        """Whether a marked span ends before the token that ends its turn."""
        if not located.marked or not located.learnt:
            return False
        begin, end = located.learnt[-1]
        if located.text[begin:end].rstrip().endswith(self._tokenizer.special_texts):
            return False
        following = located.text[end:].lstrip()
        if row.train[-1]:  # what follows the last message closes it
            return bool(following)
        return following.startswith(self._tokenizer.special_texts)

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
            apart = whole[: len(prompt)] != prompt
            if apart:
                whole = prompt + self._tokenizer.encode(row.completion)
            given = 0 if self._settings.loss_on == "all" else len(prompt)
            remarks = [Remark(text=_TOKENISED_APART)] if apart else []
            if not row.completion.strip() and self._settings.append_eos:
                remarks.append(Remark(text=_EMPTY))
            results[index] = self._document(whole, given, tuple(remarks))

    def _document(self, ids: list[int], given: int, remarks: tuple[Remark, ...] = ()) -> Encoded:
        """A text between what the tokenizer puts around it, of which the first ids are given."""
        begun = self._tokenizer.begun(ids)
        # What the tokenizer puts before a text is never said, also where the text had it.
        given = max(given + len(begun) - len(ids), len(self._tokenizer.prefix_ids))
        whole = self._tokenizer.ended(begun) if self._settings.append_eos else begun
        return Encoded(
            input_ids=np.array(whole, np.int32),
            supervised=np.arange(len(whole)) >= given,
            remarks=remarks,
        )


def _empty_answers(row: ChatRow, all_learnt: bool) -> int:
    """Answers that are learnt and say nothing: no words, no call, no reasoning."""
    return sum(
        message["role"] == "assistant"
        and (all_learnt or learnt)
        and not message["content"].strip()
        and not any(message.get(name) for name in ("tool_calls", *REASONING))
        for message, learnt in zip(row.messages, row.train, strict=True)
    )


def _check_text(row: ChatRow, text: str) -> None:
    """Half of a surrogate pair, anywhere in what is rendered, is not text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise RowError(
            f"{row.source}: the conversation holds half of a surrogate pair after {near!r}, which "
            "is not text"
        ) from error


def _encoded_chat(chat: _Rendered, encoding: tokenizers.Encoding) -> Encoded:
    begins = token_begins(encoding.offsets)
    remarks = chat.remarks
    if shared := sum(_inside_a_token(begins, first) for first, last in chat.learnt if first < last):
        remarks = [*remarks, Remark(text=_SHARED_TOKEN, count=shared)]
    return Encoded(
        input_ids=np.array(encoding.ids, np.int32),
        supervised=begin_inside(begins, chat.learnt),
        remarks=tuple(remarks),
    )


def _inside_a_token(begins: np.ndarray, place: int) -> bool:
    """Whether no token begins at a place, which then lies in one that begins before it."""
    index = bisect.bisect_left(begins, place)
    return index == len(begins) or bool(begins[index] != place)


def token_begins(offsets: Sequence[Span]) -> np.ndarray:
    """Where tokens begin in a text, int64 [length], from their places as a tokenizer reports them.

    It may report a token without its leading white space; that begins where the token before ended.
    """
    places = np.array(offsets, np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(places[:, 1])
    begins: np.ndarray = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]])[: len(places)])
    return begins


def begin_inside(begins: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Tokens, bool [length], that begin inside one of the spans, which are in order.

    A token that begins before a span belongs to what the model is given, one that begins inside and
    ends after it to what the model says.
    """
    if not spans:
        return np.zeros(len(begins), bool)
    firsts, lasts = np.array(spans, np.int64).T
    span = np.searchsorted(firsts, begins, side="right") - 1  # the last that begins before or there
    inside: np.ndarray = (span >= 0) & (begins < lasts[span])
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
