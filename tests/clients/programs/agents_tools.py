"""openai-agents: agents with tools over chat completions and responses, a run in streaming, output types.

Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    RunResultStreaming,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: str
    country: str


@function_tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def agent(model: Model, **more: Any) -> Agent:
    settings = ModelSettings(max_tokens=400, **more.pop("settings", {}))
    return Agent(name="assistant", instructions="Be brief.", model=model, model_settings=settings, **more)


def check_call(result: RunResult | RunResultStreaming) -> None:
    """A call was made, ran, and its result went back to the model."""
    kinds = [type(item) for item in result.new_items]
    assert kinds.index(ToolCallItem) < kinds.index(ToolCallOutputItem)
    assert isinstance(result.final_output, str)


async def drive(model: Model) -> None:
    free = await Runner.run(agent(model, tools=[weather], settings={"store": True}), "What is 2+2?")
    assert isinstance(free.final_output, str)
    # The package asks for a call once, and leaves the choice to the model then.
    question = "How is the weather in Paris?"
    caller = agent(model, tools=[weather], settings={"tool_choice": "required", "parallel_tool_calls": False})
    check_call(await Runner.run(caller, question))
    streamed = Runner.run_streamed(caller, question)
    events = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in events
    check_call(streamed)
    followed = await Runner.run(caller, [*streamed.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    check_call(followed)
    found = await Runner.run(agent(model, output_type=City), "Which city has the Eiffel tower?")
    assert isinstance(found.final_output, City)


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await drive(kind(model=MODEL, openai_client=client))


asyncio.run(main())
