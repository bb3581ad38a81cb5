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
