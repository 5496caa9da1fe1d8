"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many after them.

https://huggingface.co/NousResearch/Hermes-2-Pro-Mistral-7B (Prompt Format for Function Calling)
"""

from octavo.text.tool_calls.marked_json import marked_json

HERMES = marked_json(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    models="Hermes, Qwen 2.5, Qwen 3, Granite 4, ERNIE 4.5, SmolLM 3",
    signs=(("<tool_call>", "arguments"),),
    others=("<function=", "<arg_key>"),
    also=("granite4", "ernie45"),
    is_list=False,
    is_plain=True,
)
