"""Chat templates after the rules of published families, with `{% generation %}` where they speak.

Written for these tests. `plain` takes the marks out again: then it has to be found out what the
marks say.
"""

from __future__ import annotations

import re

CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}<|im_end|>{% endgeneration -%}
{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM2 = (
    "{%- if messages[0].role != 'system' -%}"
    "<|im_start|>system\nYou are a helpful assistant of the SmolLM kind<|im_end|>{{ '\\n' }}"
    "{%- endif %}" + CHATML
)

_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}
{%- else %}{{- DEFAULT_SYSTEM }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nSay <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{- DEFAULT_TURN }}{%- endif %}
"""
_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
"""
_CALLS = """\
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
"""
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"

QWEN25 = (
    _TOOLS.replace("DEFAULT_SYSTEM", "'You are a kind assistant.\\n\\n'").replace(
        "DEFAULT_TURN", "'<|im_start|>system\\nYou are a kind assistant.<|im_end|>\\n'"
    )
    + """\
{%- for m in messages %}
{%- set said = m.content %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}{{- said }}"""
    + _CALLS
    + """\
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif m.role == 'tool' %}
"""
    + _RESULTS
    + "{%- endif %}{%- endfor %}"
    + _PROMPT
    + "{%- endif %}"
)

QWEN3 = (
    _TOOLS.replace("DEFAULT_SYSTEM", "''").replace("DEFAULT_TURN", "''")
    + """\
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said, thought = m.content, m.reasoning_content or '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- set block = '' %}
{%- if loop.index0 > ns.question and (loop.last or thought) %}
{%- set block = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' %}
{%- set said = said.lstrip('\\n') %}{% endif %}
{%- if enable_thinking is defined and not enable_thinking and not thought %}
{{- block }}{% set block = '' %}{% endif %}
{%- generation %}{{- block + said }}"""
    + _CALLS
    + """\
{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- elif m.role == 'tool' %}
"""
    + _RESULTS
    + "{%- endif %}{%- endfor %}"
    + _PROMPT
    + """\
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{%- endif %}"""
)

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- set system, turns = '', messages %}
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content.strip(), messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system }}
{{- '<|eot_id|>' }}
{%- for m in turns %}
{%- if m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- generation %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}
{{- 'Answer with a call of these:\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{%- set system, turns = '', messages %}
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content + '\\n\\n', messages[1:] %}{% endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and m == questions[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system if loop.last or m == questions[-1] else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{%- generation %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- call.function | tojson }}{{- ', ' if not loop.last }}
{%- endfor %}
{{- ']</s>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- else %}
{%- generation %}{{- ' ' + m.content | trim + '</s>' }}{% endgeneration %}
{%- endif %}
{%- endfor %}"""

SPECIALS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
"""Beside those of ChatML."""


def plain(marked: str) -> str:
    """Without the marks; what they do to white space stays."""
    mark = r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}"
    return re.sub(mark, r"{%\1 if true \2%}{% endif %}", marked)
