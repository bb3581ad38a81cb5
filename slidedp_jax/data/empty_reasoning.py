"""Answers without reasoning before which the chat template prints an empty block of it.

Templates of models that reason may do so (Qwen3's before the last answer, unless `enable_thinking`
is false). Where the block belongs to what is learnt, the model learns to reason about nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slidedp_jax.data.chat_template import Span
from slidedp_jax.data.remarks import Remark
from slidedp_jax.data.rows import ChatRow
from slidedp_jax.data.spans import Located

_EMPTY_BLOCK = re.compile(
    r"<(think|thinking|thought|reasoning|seed:think)>\s*</\1>|\[THINK\]\s*\[/THINK\]"
)

_LEARNT = (
    "{} [answer is|answers are] learnt with an empty reasoning block that the chat template puts "
    "before the words: the model learns to answer without reasoning"
)
_SWITCH = (
    ' (with chat_template_kwargs {"enable_thinking": false} the block is part of the prompt, as it '
    "is when a model is asked not to reason)"
)


def learnt_empty_reasoning(
    row: ChatRow, located: Located, learnt: Sequence[Span], template_source: str
) -> list[Remark]:
    """How many learnt answers begin with an empty block that the row does not have.

    Args:
      row: the conversation.
      located: its text and messages.
      learnt: spans of the text that are learnt.
      template_source: the template, which may have a switch for it.
    """
    said = [message["content"] for message in row.messages if message["role"] == "assistant"]
    if not learnt or not said:
        return []
    text = located.text
    if located.said is None:  # which block is whose is not known
        printed = sum(len(_EMPTY_BLOCK.findall(text, *span)) for span in learnt)
        count = max(0, printed - sum(len(_EMPTY_BLOCK.findall(words)) for words in said))
    else:
        words_at = dict(zip(located.said, said, strict=True))
        count = sum(
            bool(_EMPTY_BLOCK.search(text, *span) and not _EMPTY_BLOCK.search(words_at[span]))
            for span in learnt
        )
    remark = _LEARNT + (_SWITCH if "enable_thinking" in template_source else "")
    return [Remark(text=remark, count=count, of=len(said))]
