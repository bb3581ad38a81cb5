"""A message's content as a list of parts (OpenAI's form) -> text.

Chat templates that take such lists print the texts one after the other, so this joins them with
nothing between. What is not text cannot be trained on here and is refused by its type.
"""

from __future__ import annotations

from typing import Any

from slidedp_jax.data.fields import Fields, describe

_TEXT_TYPES = ("text", "input_text", "output_text")


def text_of_parts(fields: Fields, parts: list[Any], key: str) -> str:
    """The text of a content whose parts are all text.

    Args:
      fields: of the row.
      parts: `{"type": "text", "text": ...}` each; other keys, such as what Arrow or a cache adds,
        say nothing.
      key: the content's place.

    Raises:
      RowError: there is no part, or one that is not text.
    """
    if not parts:
        raise fields.error(key, "is an empty list; a message needs a string or parts of text")
    return "".join(_text(fields, part, f"{key}[{index}]") for index, part in enumerate(parts))


def _text(fields: Fields, part: Any, key: str) -> str:
    if not isinstance(part, dict):
        raise fields.error(key, f"must be an object with type and text, got {describe(part)}")
    kind = part.get("type")
    if kind not in _TEXT_TYPES:
        raise fields.error(
            f"{key}.type",
            f"is {kind!r}; of a content in parts only text can be trained on "
            f"({', '.join(_TEXT_TYPES)}), reasoning belongs in `reasoning_content`",
        )
    return fields.checked_text(part.get("text"), f"{key}.text")
