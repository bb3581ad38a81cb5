"""The fields of one record: looked up under our names, refused with their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, final

from slidedp_jax.data.records import Record, RowError
from slidedp_jax.data.remarks import Remark
from slidedp_jax.errors import UserError

FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    "completion_mask",
    "assistant_masks",
    "loss_mask",
    "tools",
    "chat_template_kwargs",
)
"""Fields that mean something; `columns` may map each to another name in the files."""

_NAMES = frozenset(FIELDS)
_ABSENT = object()


@final
class Fields:
    """Fields of one record under our names, and the remarks that reading them gave.

    Attributes:
      source: the record's place.
      remarks: what `remark` was told.
    """

    def __init__(self, record: Record, columns: Mapping[str, str]):
        """Take a record that could be parsed.

        Raises:
          UserError: `columns` maps what is not a field.
        """
        assert record.fields is not None
        if unknown := sorted(columns.keys() - _NAMES):
            raise UserError(f"columns maps {unknown}, which are not fields; fields are {FIELDS}")
        self.source = record.source
        self.remarks: list[Remark] = []
        self._fields = record.fields
        self._columns = columns

    def column(self, name: str) -> str:
        """The name in the file."""
        return self._columns.get(name, name)

    def get(self, name: str) -> Any:
        """The value; None where it is null or absent."""
        return self._fields.get(self.column(name))

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self.get(name) is not None

    def given(self) -> list[str]:
        """Our names of the fields that mean something and say something."""
        names = FIELDS if self._columns else [name for name in self._fields if name in _NAMES]
        return [name for name in names if self.get(name) not in (None, "", [], {})]

    def text(self, name: str) -> str:
        """The value, which must be text."""
        value = self._fields.get(self.column(name), _ABSENT)
        if value is _ABSENT:
            raise self.error(self.column(name), "is missing")
        return self.checked_text(value, self.column(name))

    def optional_text(self, name: str) -> str:
        """The value, which must be text if it is there; else the empty text."""
        return self.text(name) if self.has(name) else ""

    def checked_text(self, value: Any, key: str) -> str:
        """A value at any place, which must be text."""
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {describe(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(key, "holds half of a surrogate pair, which is not text") from error
        return value

    def from_json(self, value: Any, key: str) -> Any:
        """What a value says that may be written as JSON text; blank text is None."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise self.error(key, f"is a string but not JSON: {error}") from error
        except RecursionError:
            raise self.error(key, "is JSON nested too deeply") from None

    def remark(self, text: str, count: int = 1, of: int | None = None) -> None:
        """Keep a `Remark` on the row."""
        self.remarks.append(Remark(text=text, count=count, of=of))

    def error(self, key: str, what: str) -> RowError:
        """The error that names the place and the key."""
        return RowError(f"{self.source}: `{key}` {what}")


def describe(value: Any) -> str:
    """A value's kind, for messages."""
    return "null" if value is None else type(value).__name__
