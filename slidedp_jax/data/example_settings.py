"""How rows become examples.

What is supervised (`loss_on`):

  auto        assistant messages of conversations, completions, all of texts
  assistant   assistant messages; the same as completion for prompt/completion rows
  completion  the last assistant message; the completion
  all         every token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from slidedp_jax.errors import UserError

LossOn = Literal["auto", "assistant", "completion", "all"]
OverLong = Literal["truncate", "drop", "raise", "split"]
Keep = Literal["start", "end"]


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """How rows become examples.

    Attributes:
      max_seq_length: most tokens of an example.
      loss_on: what is supervised; see the module's text. Pre-tokenised rows bring their labels.
      over_long: what happens to a longer row: `truncate`, `drop` and `raise` say so; `split` cuts
        documents into consecutive windows of `max_seq_length` and refuses over-long conversations.
        A `.txt` file is one document and always split.
      keep: which side of a truncated row stays, `start` or `end`.
      append_eos: end completions and documents with one eos. Chat rows follow their template.
      skip_bad_rows: count malformed rows instead of stopping at the first.
      max_rows: use the first so many rows only.
      columns: our field name -> name in the files.
      template_kwargs: variables for the chat template (`{"enable_thinking": False}`).
    """

    max_seq_length: int
    loss_on: LossOn = "auto"
    over_long: OverLong = "truncate"
    keep: Keep = "start"
    append_eos: bool = True
    skip_bad_rows: bool = False
    max_rows: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (("loss_on", LossOn), ("over_long", OverLong), ("keep", Keep)):
            if getattr(self, name) not in get_args(allowed):
                raise UserError(
                    f"{name} is {getattr(self, name)!r}; it can be {', '.join(get_args(allowed))}"
                )
        if self.max_seq_length < 2:
            raise UserError(f"max_seq_length is {self.max_seq_length}; it must be at least 2")
        if self.max_rows is not None and self.max_rows < 1:
            raise UserError(f"max_rows is {self.max_rows}; it must be at least 1, or null for all")
