"""Chat templates of the forms that families of models were trained on, each with the devices its published one uses."""

from __future__ import annotations

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% else %}
    {%- set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools_in_user_message and not tools is none %}
            {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{% endfor %}
        {%- endif %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("Only one call at once!") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{% endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{% set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{% endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{% endif %}
            {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{% else %}
                {{- tool_call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{% set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{% endif %}
                    {%- if not loop.last %}{{- ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}{{- ", " }}{% else %}{{- "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" }}
        {%- else %}{{- "[INST] " }}{% endif %}{{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("Only user, assistant and tool roles are supported!") }}{% endif %}
{%- endfor %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] | trim "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content']|string + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
OLMO2 = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'user' %}{{ '<|user|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% generation %}{% if not loop.last %}{{ '<|assistant|>
' ~ message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
' ~ message['content'] + eos_token }}{% endif %}{% endgeneration %}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}"""
DEEPSEEK = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_last_user=false, system_prompt='') -%}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system_prompt = ns.system_prompt + ('' if loop.first else '\\n\\n') + message.content %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% set ns.is_last_user = true %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- if ns.is_last_user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.is_last_user = false %}
        {%- set content = message['content'] or '' %}
        {%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
        {{- content }}
        {%- for tool in message['tool_calls'] or [] %}
            {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['arguments'] | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{ eos_token }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user %}
    {{- '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}
{%- endif %}"""
GLM4 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
{% for tool in tools %}
## {{ tool.function.name }}

{{ tool.function | tojson(indent=4) }}
{% endfor %}
{%- endif -%}
{%- for m in messages %}
<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ m.content if m.content is not none else '' }}
{%- endfor %}
{%- for doc in documents or [] %}
[{{ loop.index }}] {{ doc.title | default('untitled', true) }}: {{ doc['text'] }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
GPT_OSS = """{%- macro kind(spec) -%}
    {%- if spec.type == "array" -%}{{ kind(spec['items']) }}[]
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- else -%}{{ spec.type | default("any") }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Knowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") }}
{{- "\\n\\nReasoning: " + (reasoning_effort | default("medium")) + "<|end|>" }}
{%- if tools %}{{- "<|start|>developer<|message|>namespace functions {\\n" }}
{%- for tool in tools %}{% set tool = tool.function %}
{{- "// " + (tool.description | default("")) + "\\ntype " + tool.name + " = (_: {\\n" }}
{%- for name, spec in (tool.parameters.properties | default({})).items() %}
    {{- name + ("" if name in (tool.parameters.required or []) else "?") + ": " }}{{- kind(spec) }}{{- ",\\n" }}
{%- endfor %}{{- "}) => any;\\n" }}{% endfor %}{{- "}<|end|>" }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception("Either content or thinking!") }}{% endif %}
        {%- if message.reasoning_content %}{{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- message.reasoning_content + "<|end|>" }}{% endif %}
        {{- "<|start|>assistant to=functions." + message.tool_calls[0].function.name }}
        {{- "<|channel|>commentary json<|message|>" + message.tool_calls[0].function.arguments|tojson + "<|call|>" }}
    {%- elif message.role == 'assistant' and message.thinking %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" + message.content }}
    {%- elif message.role == 'tool' %}{{- "<|start|>functions<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + (message.content or "") + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

FAMILIES = {
    "llama 3": LLAMA3,
    "qwen 3": QWEN3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi 3": PHI3,
    "olmo 2": OLMO2,
    "deepseek": DEEPSEEK,
    "glm 4": GLM4,
    "gpt-oss": GPT_OSS,
}
