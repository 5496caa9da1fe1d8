"""pydantic-ai: agents over chat completions and responses: texts, streams, tools, and ordinary classes as output.

Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    NativeOutput,
    ToolOutput,
    UsageLimitExceeded,
    UsageLimits,
    capture_run_messages,
)
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=URL + "/v1", api_key="none")
QUESTION = "Which city has the Eiffel tower?"


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


async def drive(model: Model) -> None:
    plain = Agent(model, model_settings={"max_tokens": 60, "temperature": 0})
    first = await plain.run("What is 2+2?")
    usage = first.usage() if callable(first.usage) else first.usage  # a method in older releases
    assert first.output
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0
    async with plain.run_stream("What is 2+2?") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == first.output
    followed = await plain.run("And 3+3?", message_history=first.all_messages())
    assert len(followed.all_messages()) == 4
    for output in (ToolOutput(City), NativeOutput(City)):
        agent = Agent(model, output_type=output, model_settings={"max_tokens": 200})
        assert isinstance((await agent.run(QUESTION)).output, City), output
    answers = await asyncio.gather(*(plain.run("What is 2+2?") for _ in range(8)))
    assert all(answer.output for answer in answers)


async def call_of_a_tool(model: Model) -> None:
    """An output type by tools makes the package ask for a call; a small model may go on calling, so it is stopped."""
    agent = Agent(model, tools=[weather], output_type=ToolOutput(City), model_settings={"max_tokens": 200})
    with capture_run_messages() as messages, contextlib.suppress(UsageLimitExceeded):
        await agent.run("How is the weather in Paris?", usage_limits=UsageLimits(request_limit=3))
    calls = [part for part in messages[1].parts if isinstance(part, ToolCallPart)]
    assert {call.tool_name for call in calls} <= {"weather", "final_result"}
    assert calls


async def status_of_error() -> int:
    try:
        await Agent(OpenAIChatModel("other", provider=PROVIDER)).run("Hi")
    except ModelHTTPError as error:
        return error.status_code
    return 200


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=PROVIDER)
        await drive(model)
        await call_of_a_tool(model)
    assert await status_of_error() == 404


asyncio.run(main())
