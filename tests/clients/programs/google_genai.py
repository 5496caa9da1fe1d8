"""The google-genai package: contents, streams, chats, tools, schemas, counting, models, and errors. Arguments: URL,
model."""

from __future__ import annotations

import asyncio
import base64
import itertools
import sys
from typing import Any

from google import genai
from google.genai import errors, types
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
CLIENT = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=URL))
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 60}
QUESTION = "What is 2+2?"


class City(BaseModel):
    name: str
    country: str


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


whole = CLIENT.models.generate_content(model=MODEL, contents=QUESTION, config={**GREEDY, "top_k": 40, "seed": 1})
assert whole.text
usage = whole.usage_metadata
assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
parts = list(CLIENT.models.generate_content_stream(model=MODEL, contents=QUESTION, config=GREEDY))
assert "".join(part.text or "" for part in parts) == whole.text
assert parts[-1].candidates[0].finish_reason == whole.candidates[0].finish_reason
assert parts[-1].usage_metadata.candidates_token_count == usage.candidates_token_count
several = CLIENT.models.generate_content(
    model=MODEL,
    contents=[types.Content(role="user", parts=[types.Part(text=QUESTION)])],
    config={"candidate_count": 2, "max_output_tokens": 5, "response_logprobs": True, "logprobs": 2},
)
assert [candidate.index or 0 for candidate in several.candidates] == [0, 1]
assert len(several.candidates[0].logprobs_result.chosen_candidates) == 5

chat = CLIENT.chats.create(model=MODEL, config={**GREEDY, "system_instruction": "Be brief."})
for question in (QUESTION, "And 3+3?"):
    assert "".join(part.text or "" for part in chat.send_message_stream(question))
curated = chat.get_history(curated=True)
assert sum(content.role == "user" for content in curated) == 2, "a turn was not taken for an answer"
before = CLIENT.models.count_tokens(model=MODEL, contents=curated).total_tokens
joined = [
    types.Content(role=role, parts=[types.Part(text="".join(content.parts[0].text for content in contents))])
    for role, contents in itertools.groupby(curated, key=lambda content: content.role)
]
assert CLIENT.models.count_tokens(model=MODEL, contents=joined).total_tokens == before

forced: dict[str, Any] = {
    "tools": [add],
    "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["add"]}},
    "automatic_function_calling": {"disable": True},
}
called = CLIENT.models.generate_content(model=MODEL, contents=QUESTION, config={**GREEDY, **forced})
(call,) = called.function_calls[:1]
assert call.name == "add"
assert isinstance(call.args["a"], int)
history = [
    types.Content(role="user", parts=[types.Part(text=QUESTION)]),
    called.candidates[0].content,
    types.Content(
        role="user",
        parts=[
            types.Part(function_response=types.FunctionResponse(id=each.id, name=each.name, response={"result": 4}))
            for each in called.function_calls
        ],
    ),
]
offered = {**GREEDY, "tools": [add]}
assert CLIENT.models.generate_content(model=MODEL, contents=history, config=offered).candidates[0].content.parts

for schema in ({"response_schema": City}, {"response_json_schema": City.model_json_schema()}):
    config = {**GREEDY, "max_output_tokens": 200, "response_mime_type": "application/json", **schema}
    parsed = CLIENT.models.generate_content(model=MODEL, contents="Which city has the Eiffel tower?", config=config)
    City.model_validate_json(parsed.text)
choice = {"type": "STRING", "enum": ["yes", "no"]}
chosen: dict[str, Any] = {**GREEDY, "response_mime_type": "text/x.enum", "response_schema": choice}
assert CLIENT.models.generate_content(model=MODEL, contents=QUESTION, config=chosen).text in ("yes", "no")

assert CLIENT.models.count_tokens(model=MODEL, contents=QUESTION).total_tokens > 0
assert [model.name for model in CLIENT.models.list()] == [f"models/{MODEL}"]
assert "generateContent" in CLIENT.models.get(model=MODEL).supported_actions
for version in ("v1", "v1beta"):
    options = types.HttpOptions(base_url=URL, api_version=version)
    client = genai.Client(api_key="none", http_options=options)
    assert client.models.get(model=MODEL).name == f"models/{MODEL}"
    assert client.models.generate_content(model=MODEL, contents=QUESTION, config=GREEDY).text == whole.text


async def read() -> str:
    stream = await CLIENT.aio.models.generate_content_stream(model=MODEL, contents=QUESTION, config=GREEDY)
    return "".join([part.text or "" async for part in stream])


assert asyncio.run(read()) == whole.text

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")
statuses = []
for model, contents in (
    ("no-such-model", [QUESTION]),
    (MODEL, [types.Part.from_bytes(data=PIXEL, mime_type="image/png"), QUESTION]),  # it reads text only
):
    try:
        CLIENT.models.generate_content(model=model, contents=contents)
    except errors.ClientError as error:
        statuses.append((error.code, error.status))
assert statuses == [(404, "NOT_FOUND"), (400, "INVALID_ARGUMENT")], statuses
