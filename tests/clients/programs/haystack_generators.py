"""Haystack: chat and responses generators, streams, forced calls, a class, an agent, vectors. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ChatRole, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
KEY = Secret.from_token("none")
SERVER: dict[str, Any] = {"api_base_url": URL + "/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
QUESTION = [ChatMessage.from_user("How is the weather in Paris?")]


class City(BaseModel):
    name: str
    country: str


def weather(city: Annotated[str, "The name of the city"]) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def drive(kind: Any, limit: dict[str, int]) -> None:
    tool = create_tool_from_function(weather)
    generator = kind(**SERVER, generation_kwargs={**limit, "temperature": 0})
    (whole,) = generator.run(QUESTION)["replies"]
    assert whole.text
    chunks: list[StreamingChunk] = []
    (streamed,) = generator.run(QUESTION, streaming_callback=chunks.append)["replies"]
    assert "".join(chunk.content for chunk in chunks) == streamed.text == whole.text
    (called,) = generator.run(QUESTION, tools=[tool], generation_kwargs={"tool_choice": "required"})["replies"]
    assert called.tool_call.tool_name == "weather"
    assert tool.invoke(**called.tool_call.arguments).startswith("It is sunny")

    async def four() -> list[Any]:
        return await asyncio.gather(*(generator.run_async(QUESTION) for _ in range(4)))

    assert {answer["replies"][0].text for answer in asyncio.run(four())} == {whole.text}
    agent = Agent(chat_generator=generator, tools=[tool], max_agent_steps=2)
    assert agent.run(QUESTION)["messages"][-1].role in (ChatRole.ASSISTANT, ChatRole.TOOL)


drive(OpenAIChatGenerator, {"max_completion_tokens": 80})
drive(OpenAIResponsesChatGenerator, {"max_output_tokens": 80})
typed = OpenAIChatGenerator(**SERVER, generation_kwargs={"response_format": City, "max_completion_tokens": 200})
(answer,) = typed.run([ChatMessage.from_user("Which city has the Eiffel tower?")])["replies"]
City.model_validate_json(answer.text)
assert answer.meta["usage"]["completion_tokens"] > 0
assert len(OpenAITextEmbedder(**SERVER).run("Hi")["embedding"]) > 100
