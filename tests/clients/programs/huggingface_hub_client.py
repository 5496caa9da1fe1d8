"""huggingface_hub: InferenceClient's chat, streams, a schema, tools, generated texts. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient

URL, MODEL = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "What is 2+2?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASKED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}

client = InferenceClient(base_url=URL, api_key="none")
whole = client.chat.completions.create(model=MODEL, **ASKED)
text = whole.choices[0].message.content
assert text
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
chunks = client.chat_completion(model=MODEL, stream=True, **ASKED)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


async def asynchronous() -> str:
    answer = await AsyncInferenceClient(base_url=URL, api_key="none").chat_completion(model=MODEL, **ASKED)
    return answer.choices[0].message.content


assert asyncio.run(asynchronous()) == text
schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS, "strict": True}}
shaped = client.chat_completion(model=MODEL, response_format=schema, **ASKED)
assert set(json.loads(shaped.choices[0].message.content)) == {"city"}
called = client.chat_completion(model=MODEL, tools=TOOLS, tool_choice="required", **ASKED)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "weather"
assert set(json.loads(call.function.arguments)) == {"city"}

# A client of an address speaks the API of TGI.
tgi = InferenceClient(URL)
generated = tgi.text_generation("Once upon a time", max_new_tokens=8, details=True)
assert generated.details.generated_tokens == 8
assert "".join(tgi.text_generation("Once upon a time", max_new_tokens=8, stream=True)) == generated.generated_text
