"""The anthropic package: messages, streams, tools, counting, and errors. Arguments: URL, model."""

from __future__ import annotations

import sys
from typing import Any

import anthropic

URL, MODEL = sys.argv[1:]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True)
MESSAGES: Any = [{"role": "user", "content": "What is 2+2?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60}
TOOLS: Any = [
    {
        "name": "weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]

whole = CLIENT.messages.create(**ASKED)
assert whole.content[0].text
with CLIENT.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens

called = CLIENT.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
assert called.stop_reason == "tool_use"
(use,) = called.content
assert use.input["city"] in ("Oslo", "Rome")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."}
history = [*MESSAGES, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert CLIENT.messages.create(**{**ASKED, "messages": history}, tools=TOOLS).content

assert CLIENT.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0
try:
    CLIENT.messages.create(**{**ASKED, "max_tokens": 0})
except anthropic.BadRequestError as error:
    body = error.body
assert body["error"]["type"] == "invalid_request_error"
