"""AutoGen: its client for OpenAI's API, agents of autogen-agentchat with a tool and a class. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import StructuredMessage, TextMessage, ToolCallSummaryMessage
from autogen_core.models import CreateResult, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = [UserMessage(content="What is 2+2?", source="user")]


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def model() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL,
        base_url=URL + "/v1",
        api_key="none",
        max_retries=0,
        max_tokens=400,
        temperature=0,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        },
    )


async def main() -> None:
    client = model()
    whole = await client.create(QUESTION)
    assert whole.content
    assert whole.usage.completion_tokens > 0
    parts = [part async for part in client.create_stream(QUESTION)]
    assert isinstance(parts[-1], CreateResult)
    assert "".join(parts[:-1]) == parts[-1].content == whole.content
    about_paris = [UserMessage(content="Which city has the Eiffel tower?", source="user")]
    City.model_validate_json((await client.create(about_paris, json_output=City)).content)
    tool = FunctionTool(weather, description="Look up the weather of a city.")
    called = await client.create(QUESTION, tools=[tool], tool_choice="required")
    assert called.content[0].name == "weather"
    assert weather(**json.loads(called.content[0].arguments)).startswith("It is sunny")

    agent = AssistantAgent("assistant", model_client=client, tools=[weather])
    result = await agent.run(task="How is the weather in Paris?")
    assert isinstance(result, TaskResult)
    assert isinstance(result.messages[-1], TextMessage | ToolCallSummaryMessage)
    typed = AssistantAgent("typed", model_client=client, output_content_type=City)
    last = (await typed.run(task="Which city has the Eiffel tower?")).messages[-1]
    assert isinstance(last, StructuredMessage)
    assert isinstance(last.content, City)


asyncio.run(main())
