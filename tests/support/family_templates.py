"""Chat templates that are built as the families' published ones, in fewer words.

Each has the marks of its model, the order in which the published template writes a chat, what it leaves out, what it
refuses and what it writes again at another place. The comment names the model whose template it follows.
"""

import dataclasses

from tiny_text import byte_tokenizer
from tokenizers import AddedToken
from tokenizers_by_kind import sentencepiece

# Qwen2.5-Instruct: a default system text; tools behind the system text; answers of tools as one turn of the user.
QWEN25 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are helpful.{% endif %}
    {{- '\n\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{ '\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Qwen3: the reasoning of answers before the last question of the user is left out; an empty one switches it off.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.looking and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}{% set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thoughts = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{ '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

# Llama 3.1 and 3.2: a system turn with dates; tools in the first question; one call in a message; texts are trimmed.
LLAMA3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{ "Environment: ipython\n" }}{% endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: " + date_string + "\n\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{ raise_exception("no first user message") }}{% endif %}
    {%- set first = messages[0].content | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function name, ' }}
    {{- '"parameters": dictionary of argument name and its value}.\n\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or m.tool_calls) %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Mistral 7B v0.3: the tools and the system text come before the last question, and so move with each turn.
MISTRAL = r"""
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set left = messages[1:] %}
{%- else %}{% set left = messages %}{% endif %}
{%- set users = left | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in left %}
    {%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate user/assistant/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in left %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}
        {%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}{{ out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', ' }}
        {%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}
"""

# Llama 2: a system text inside the first question; a blank around each text; roles in turn.
LLAMA2 = r"""
{%- if messages[0].role == 'system' %}{% set left = messages[1:] %}{% set system = messages[0].content %}
{%- else %}{% set left = messages %}{% set system = false %}{% endif %}
{%- for m in left %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system != false %}
        {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}
    {%- else %}{% set content = m.content %}{% endif %}
    {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}
"""

# Phi-3-mini: each turn has a line for its mark. It knows no tools.
PHI3 = r"""
{%- for m in messages %}
    {%- if m.role in ('system', 'user', 'assistant') %}
        {{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""

# Phi-4-mini: the tools are a field of the system message, and calls are not written.
PHI4 = r"""
{%- for m in messages %}
    {%- if m.role == 'system' and 'tools' in m and m.tools is not none %}
        {{- '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}
    {%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
"""

# Gemma 3: the system text is the beginning of the first question; roles in turn. It knows no tools.
GEMMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\n\n' %}{% set left = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set left = messages %}{% endif %}
{%- for m in left %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (prefix if loop.first else '') }}
    {%- if m.content is string %}{{ m.content | trim }}{% endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
GEMMA2 = GEMMA3.replace(
    "{%- if messages[0].role == 'system' %}",
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}",
)

# GLM-4-0414: tools in a system turn of their own; a call is the name and a line; tools answer as the observation.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools' }}
    {%- for tool in tools %}
        {{- '\n\n## ' + tool.function.name + '\n\n' }}{{ tool.function | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ '<|system|>\n' + m.content }}
    {%- elif m.role == 'user' %}{{ '<|user|>\n' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '<|assistant|>' + call.function.name + '\n' }}{{ call.function.arguments | tojson }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}
    {%- else %}{{ '<|observation|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""

# SmolLM3: a system turn with the mode of reasoning, in which the tools are; the reasoning is part of the content.
SMOLLM3 = r"""
{%- set thinks = enable_thinking if enable_thinking is defined else true %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set left = messages[1:] %}
{%- else %}{% set system = 'You are helpful.' %}{% set left = messages %}{% endif %}
{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: ' }}
{{- ('/think' if thinks else '/no_think') + '\n\n' + system + '\n' }}
{%- if xml_tools %}
    {{- '<tools>\n' }}{% for tool in xml_tools %}{{ tool | string }}{{ '\n' }}{% endfor %}
    {{- '</tools>\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\n' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in left %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + ('' if thinks else '<think>\n\n</think>\n') }}
        {{- content.lstrip('\n') + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('' if thinks else '<think>\n\n</think>\n') }}
{%- endif %}
"""

# GLM-Z1: the reasoning is opened in the prompt, and earlier reasoning is left out.
GLM_Z1 = GLM4.replace(
    "'<|assistant|>\\n' + m.content }}", "'<|assistant|>\\n' + m.content.split('</think>')[-1].strip() }}"
)
GLM_Z1 = GLM_Z1.replace("{{ '<|assistant|>\\n' }}", "{{ '<|assistant|>\\n<think>' }}")

# SmolLM2 and Qwen2: a default system text before the first turn. Yi has none.
SMOLLM2 = r"""
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
YI = SMOLLM2.replace("loop.first and m.role != 'system'", "false")

# Phi-4: a token between the role and the text.
PHI4_LARGE = r"""
{%- for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

# Llama 3: no system turn of its own; the first token comes with the first message; texts are trimmed.
LLAMA30 = r"""
{%- for m in messages %}
    {%- set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}
    {{- (bos_token if loop.index0 == 0 else '') + text }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

CHATML = "<|im_start|>", "<|im_end|>"
CALLS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's template, the marks that are tokens, and how its tokenizer treats blanks.

    Attributes:
        template: the chat template.
        marks: special tokens.
        plain_marks: added tokens that are not special.
        blank: as in `sentencepiece`. None: a tokenizer of bytes.
        tools: whether the template takes tools, and the chat of `turns`.
        system: whether it takes a system message.
    """

    template: str
    marks: tuple[str, ...] = ()
    plain_marks: tuple[str, ...] = ()
    blank: str | None = None
    tools: bool = True
    system: bool = True

    def tokenizer(self):
        made = byte_tokenizer() if self.blank is None else sentencepiece(self.blank)
        made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in self.marks], special_tokens=True)
        made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in self.plain_marks])
        if "<|begin_of_text|>" in self.marks:
            made.bos_token = "<|begin_of_text|>"
        made.chat_template = self.template.strip()
        return made


HEADERS = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"
INST = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
PHI4_MARKS = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"
GLM_MARKS = "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
GEMMA_MARKS = "<start_of_turn>", "<end_of_turn>"
FAMILIES = {
    "qwen2.5": Family(QWEN25, CHATML, CALLS[:2]),
    "qwen3": Family(QWEN3, CHATML, CALLS),
    "llama3.1": Family(LLAMA3, HEADERS),
    "mistral-v0.3": Family(MISTRAL, INST, blank="prepend"),
    "mistral-nemo": Family(MISTRAL, INST),
    "llama2": Family(LLAMA2, blank="prepend", tools=False),
    "mistral-v0.2": Family(LLAMA2, blank="first", tools=False),
    "phi3": Family(PHI3, blank="prepend", tools=False),
    "phi4-mini": Family(PHI4, PHI4_MARKS),
    "gemma2": Family(GEMMA2, GEMMA_MARKS, blank="never", tools=False, system=False),
    "gemma3": Family(GEMMA3, GEMMA_MARKS, blank="never", tools=False),
    "glm4": Family(GLM4, GLM_MARKS),
    "glm-z1": Family(GLM_Z1, GLM_MARKS, CALLS[-2:]),
    "qwen2": Family(SMOLLM2, CHATML, tools=False),
    "yi": Family(YI, CHATML, blank="never", tools=False),
    "phi4": Family(PHI4_LARGE, (*CHATML, "<|im_sep|>"), tools=False),
    "llama3": Family(LLAMA30, HEADERS, tools=False),
    "smollm3": Family(SMOLLM3, CHATML, CALLS),
}
