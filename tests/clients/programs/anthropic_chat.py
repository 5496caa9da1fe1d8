"""The anthropic package: messages, streams, tools, counting, and errors. Arguments: URL, model."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True)
MESSAGES: Any = [{"role": "user", "content": "What is 2+2?"}]
# The package has no argument for it any more, and two answers are compared below.
GREEDY = {"temperature": 0}
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "extra_body": GREEDY}
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


class City(BaseModel):
    name: str
    country: str


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

about_paris: Any = [{"role": "user", "content": "Which city has the Eiffel tower?"}]
parsed = CLIENT.messages.parse(**{**ASKED, "messages": about_paris}, output_format=City)
assert isinstance(parsed.parsed_output, City)
thought = CLIENT.messages.create(**{**ASKED, "max_tokens": 2000}, thinking={"type": "enabled", "budget_tokens": 1024})
assert thought.content[-1].type == "text"
assert [(model.id, model.type) for model in CLIENT.models.list()] == [(MODEL, "model")]
assert CLIENT.models.retrieve(MODEL).display_name

assert CLIENT.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0
try:
    CLIENT.messages.create(**{**ASKED, "max_tokens": 0})
except anthropic.BadRequestError as error:
    body = error.body
assert body["error"]["type"] == "invalid_request_error"
