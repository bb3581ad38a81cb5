"""Chat templates built as published ones are, each reduced to what makes it hard."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = CHATML.split("{% if add", 1)[0]
# The head changes with every message, so no rendering is the beginning of another.
COUNTS_MESSAGES = "{{ messages | length }} messages\n" + CHATML
REPEATS_CONTENT = "{% for m in messages %}{{ m.content }}{% endfor %}|" + CHATML
# No generation prompt; the system text goes before the last question.
INSTRUCTION = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}"
    "{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.index0 >= turns | length - 2 else '') }}"
    "{{ m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)
# Reasoning stays in answers after the last question only, where an empty one is added.
DROPS_OLD_REASONING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set thought = '' %}{%- set said = m.content %}"
    "{%- if '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{- said + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
# Every answer begins with an empty reasoning block, and a finished conversation ends with eos.
EOS_AT_THE_END = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + ('<think></think>' if m.role == 'assistant' else '') }}"
    "{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
# The generation prompt opens a reasoning block that rendered answers do not have.
PREFILLS_REASONING = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{% else %}{{ '<Assistant>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
# Tool calls as Qwen2.5 prints them, arguments by `tojson`.
CALLS_AS_JSON = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek does: arguments are taken for JSON text.
CALLS_AS_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.type + '<sep>' + c.function.name + '\n' + c.function.arguments + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral-7B-Instruct-v0.3 does: the system text stands before the last message if that is the
# user's, so a finished conversation lacks it, but every prompt has it. Roles alternate, calls and
# results aside.
SYSTEM_IN_PROMPTS_ONLY = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns | rejectattr('role', 'equalto', 'tool')"
    " | rejectattr('tool_calls', 'defined') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for m in turns %}"
    "{% if m.role == 'user' %}"
    "{{ '[INST]' + (system + '\n\n' if loop.last and system is defined else '') }}"
    "{{ m.content + '[/INST]' }}"
    "{% elif m.tool_calls is defined %}"
    "{{ '[TOOL_CALLS][' + (m.tool_calls[0].function | tojson) + ']' + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)
# The system text is put after the last question.
SYSTEM_AFTER_QUESTION = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content }}"
    "{% if messages[0].role == 'system' and loop.index0 >= messages | length - 3 %}"
    "{{ '\n\n' + messages[0].content }}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
