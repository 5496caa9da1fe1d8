"""The chat template of Mistral's instruct models, whose folders with a ``tekken.json`` have none.

https://docs.mistral.ai/guides/tokenization/ and the sources of mistral-common
"""

from __future__ import annotations

MEDIA = {"image": ("[IMG]",), "audio": ("[BEGIN_AUDIO]", "[AUDIO]")}
PART = "{{%- elif part.type == '{kind}' %}}{{{{- '{text}' }}}}"
TEMPLATE = """\
{%- set version = VERSION %}
{%- macro written(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type == 'text' %}{{- part.text }}OTHER_PARTS{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro arguments_of(call) %}
    {%- if call.function.arguments is string %}{{- call.function.arguments }}
    {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{%- endmacro %}
{%- set places = namespace(first=-1, last=-1, system='') %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set places.last = loop.index0 %}
        {%- if places.first < 0 %}{%- set places.first = loop.index0 %}{%- endif %}
    {%- elif message.role == 'system' and version < 7 %}
        {%- set places.system = places.system + message.content + '\\n\\n' %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if version >= 7 %}
            {{- '[SYSTEM_PROMPT]' }}{{- written(message.content) }}{{- '[/SYSTEM_PROMPT]' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {%- if tools and loop.index0 == (places.first if version >= 13 else places.last) %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {%- if loop.index0 == places.last %}{{- places.system }}{%- endif %}
        {{- written(message.content) }}{{- '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- written(message.content) }}
        {%- if message.tool_calls and version < 11 %}
            {{- '[TOOL_CALLS][' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}{{- arguments_of(call) }}
                {{- ', "id": ' + (call.id | tojson) + '}' }}{{- ', ' if not loop.last }}
            {%- endfor %}
            {{- ']' }}
        {%- else %}
            {%- for call in message.tool_calls or [] %}
                {{- '[TOOL_CALLS]' + call.function.name }}
                {%- if version < 13 %}{{- '[CALL_ID]' + call.id }}{%- endif %}{{- '[ARGS]' }}
                {{- arguments_of(call) }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' }}
        {%- if version < 7 %}
            {{- '{"content": ' + (written(message.content) | tojson) }}
            {{- ', "call_id": ' + (message.tool_call_id | tojson) + '}' }}
        {%- elif version < 13 %}
            {{- message.tool_call_id + '[TOOL_CONTENT]' }}{{- written(message.content) }}
        {%- else %}
            {{- written(message.content) }}
        {%- endif %}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


def chat_template(version: int, special_tokens: set[str]) -> str:
    """The template for a version of the tokenizer.

    What differs by version: where the system prompt is (3: before the last question), where tools are (before the last
    question; from 13 on before the first), and how calls and their results are written.
    """
    media = {kind: text for kind, text in MEDIA.items() if text[-1] in special_tokens}
    parts = "".join(PART.format(kind=kind, text="".join(text)) for kind, text in media.items())
    return TEMPLATE.replace("VERSION", str(version)).replace("OTHER_PARTS", parts)
