"""LiteLLM: chat under both of its names for such servers, streams, tools, completions, and its error classes.

Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class Pet(BaseModel):
    name: str = Field(max_length=8)


def options(provider: str) -> dict[str, Any]:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": URL + "/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 60,
        "num_retries": 0,
        "max_retries": 0,
    }


def chat(provider: str) -> None:
    asked = options(provider)
    whole = litellm.completion(messages=QUESTION, **asked)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **asked))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    called = litellm.completion(messages=QUESTION, tools=TOOLS, tool_choice="required", **asked)
    call = called.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    parsed = litellm.completion(messages=QUESTION, response_format=Pet, **asked)
    assert Pet.model_validate_json(parsed.choices[0].message.content)

    async def asynchronous() -> str:
        stream = await litellm.acompletion(messages=QUESTION, stream=True, **asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(asynchronous()) == text


def completions_and_vectors() -> None:
    asked = options("text-completion-openai")
    answer = litellm.text_completion(prompt="One two three", **asked)
    assert answer.choices[0].text
    embedded = litellm.embedding(f"hosted_vllm/{MODEL}", input=["Hi"], api_base=URL + "/v1", api_key="none")
    assert len(embedded.data[0]["embedding"]) > 100


def responses_and_messages() -> None:
    asked = {**options("openai"), "max_output_tokens": 20}
    del asked["max_tokens"]
    answer = litellm.responses(input="What is 2+2?", **asked)
    assert answer.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(input="What is 2+2?", stream=True, **asked)]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    anthropic = {**options("anthropic"), "api_base": URL}
    assert litellm.completion(messages=QUESTION, **anthropic).choices[0].message.content


def errors() -> None:
    asked = options("hosted_vllm")
    expect(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "long " * 20_000}], **asked)
    expect(litellm.NotFoundError, messages=QUESTION, **{**asked, "model": "hosted_vllm/other"})
    expect(litellm.BadRequestError, messages=QUESTION, **{**asked, "temperature": -5})


def expect(kind: type[Exception], **asked: Any) -> None:
    try:
        litellm.completion(**asked)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


for name in ("openai", "hosted_vllm"):
    chat(name)
completions_and_vectors()
responses_and_messages()
errors()
