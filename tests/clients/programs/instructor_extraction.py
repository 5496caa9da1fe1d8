"""instructor: an ordinary class out of a schema, of tools, and of responses, at once and asynchronously.

Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
OPTIONS: dict[str, Any] = {"base_url": URL + "/v1", "api_key": "none", "max_retries": 0}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Bob is 31 years old. Extract."}],
    "max_retries": 0,
}
MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT)


class Person(BaseModel):
    name: str
    age: int


async def asynchronous(mode: instructor.Mode) -> Person:
    client = instructor.from_openai(openai.AsyncOpenAI(**OPTIONS), mode=mode)
    return await client.chat.completions.create(response_model=Person, max_tokens=100, **ASKED)


for mode in MODES:
    client = instructor.from_openai(openai.OpenAI(**OPTIONS), mode=mode)
    assert isinstance(client.chat.completions.create(response_model=Person, max_tokens=100, **ASKED), Person)
    assert isinstance(asyncio.run(asynchronous(mode)), Person)
client = instructor.from_openai(openai.OpenAI(**OPTIONS), mode=instructor.Mode.RESPONSES_TOOLS)
question = ASKED["messages"][0]["content"]
found = client.responses.create(response_model=Person, input=question, model=MODEL, max_retries=0)
assert isinstance(found, Person)
