"""The ollama package: chat, streams, tools, schemas, generated texts, models, and errors. Arguments: URL, model."""

from __future__ import annotations

import sys
from typing import Any

import ollama
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CLIENT = ollama.Client(host=URL)
OPTIONS = {"temperature": 0, "num_predict": 40, "num_ctx": 2048}
MESSAGES: Any = [{"role": "user", "content": "What is 2+2?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a + b


class City(BaseModel):
    name: str
    country: str


whole = CLIENT.chat(MODEL, MESSAGES, options=OPTIONS)
assert whole.message.content
assert whole.eval_count
parts = list(CLIENT.chat(f"{MODEL}:latest", MESSAGES, stream=True, options=OPTIONS))
assert "".join(part.message.content or "" for part in parts) == whole.message.content
assert parts[-1].done

CLIENT.chat(MODEL, MESSAGES, tools=[add], options=OPTIONS)
called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]}
result = {"role": "tool", "tool_name": "add", "content": "4"}
assert CLIENT.chat(MODEL, [*MESSAGES, called, result], tools=[add], options=OPTIONS).message.content

asked: Any = [{"role": "user", "content": "Which city has the Eiffel tower?"}]
options = {**OPTIONS, "num_predict": 200}
answered = CLIENT.chat(MODEL, asked, format=City.model_json_schema(), options=options)
City.model_validate_json(answered.message.content or "")

assert CLIENT.generate(MODEL, "Once upon a time", options=OPTIONS).response
assert CLIENT.generate(MODEL, "Once upon a time", raw=True, options=OPTIONS).response
assert MODEL in [model.model for model in CLIENT.list().models]
assert "completion" in (CLIENT.show(MODEL).capabilities or [])
assert CLIENT.ps().models
assert CLIENT.pull(MODEL).status == "success"
try:
    CLIENT.chat("no-such-model", MESSAGES)
except ollama.ResponseError as error:
    status = error.status_code
assert status == 404
