"""The openai package: parsed answers, the helper for streams, responses, vectors, errors. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
OPTIONS: dict[str, Any] = {
    "base_url": URL + "/v1",
    "api_key": "none",
    "max_retries": 0,
    "_strict_response_validation": True,
}
CLIENT = openai.OpenAI(**OPTIONS)
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 2+2?"}],
    "temperature": 0,
    "max_tokens": 60,
}


class Pet(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]


class Weather(BaseModel):
    """Look up the weather."""

    city: Literal["Oslo", "Rome"]


whole = CLIENT.chat.completions.create(**CHAT)
text = whole.choices[0].message.content
assert text
passed_over: dict[str, Any] = {"store": True, "verbosity": "low", "reasoning_effort": "low"}
assert CLIENT.chat.completions.create(**CHAT, **passed_over).choices[0].message.content == text
with CLIENT.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.content == text
    assert stream.get_final_completion().usage.completion_tokens == whole.usage.completion_tokens


async def asynchronous() -> str:
    async with openai.AsyncOpenAI(**OPTIONS) as client:
        chunks = await client.chat.completions.create(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


assert asyncio.run(asynchronous()) == text

parsed = CLIENT.chat.completions.parse(**CHAT, response_format=Pet)
assert isinstance(parsed.choices[0].message.parsed, Pet)
tool = openai.pydantic_function_tool(Weather)
called = CLIENT.chat.completions.parse(
    **CHAT, tools=[tool], tool_choice={"type": "function", "function": {"name": "Weather"}}
)
assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)

asked: dict[str, Any] = {"model": MODEL, "input": "What is 2+2?", "temperature": 0}
response = CLIENT.responses.create(**asked, max_output_tokens=20)
assert response.output_text
assert CLIENT.responses.parse(**asked, max_output_tokens=60, text_format=Pet).output_parsed.kind in ("cat", "dog")
with CLIENT.responses.stream(**asked, max_output_tokens=20) as events:
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")
followed = CLIENT.responses.create(**{**asked, "input": "And 3+3?"}, previous_response_id=response.id)
assert followed.usage.input_tokens > response.usage.input_tokens

# Not strict: by the client's own types a first token has a log-probability, and no vector comes in base64.
lenient = openai.OpenAI(**{**OPTIONS, "_strict_response_validation": False})
scored = lenient.completions.create(model=MODEL, prompt=["One two", "Three"], max_tokens=3, logprobs=2, echo=True)
assert [choice.logprobs.token_logprobs[0] for choice in scored.choices] == [None, None]
assert len(lenient.embeddings.create(model=MODEL, input=["Hi", "Ho"]).data) == 2
assert [model.id for model in CLIENT.models.list()] == [MODEL]
try:
    CLIENT.chat.completions.create(**{**CHAT, "max_tokens": 10**6})
except openai.BadRequestError as error:
    code = error.code
assert code == "context_length_exceeded"
