"""llama-index: completions, chat, streams, a class, a call, and an agent with a tool. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
QUESTION = [ChatMessage(role="user", content="What is 2+2?")]


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def model(is_chat: bool = True, max_tokens: int = 60) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=URL + "/v1",
        api_key="none",
        max_tokens=max_tokens,
        temperature=0,
        max_retries=0,
        is_chat_model=is_chat,
        is_function_calling_model=is_chat,
        should_use_structured_outputs=is_chat,
        context_window=2048,
    )


async def agent() -> AgentOutput:
    worker = FunctionAgent(tools=[weather], llm=model(), system_prompt="Be brief.")
    return await worker.run("How is the weather in Paris?")


chat = model()
text = chat.chat(QUESTION).message.content
assert text
assert "".join(part.delta or "" for part in chat.stream_chat(QUESTION)) == text
assert asyncio.run(chat.achat(QUESTION)).message.content == text
plain = model(is_chat=False)
completed = plain.complete("Once upon a time").text
assert completed
assert "".join(part.delta or "" for part in plain.stream_complete("Once upon a time")) == completed

tool = FunctionTool.from_defaults(weather)
answer = chat.chat_with_tools([tool], user_msg="How is the weather in Paris?", tool_required=True)
(call,) = chat.get_tool_calls_from_response(answer)
assert call.tool_name == "weather"
assert weather(**call.tool_kwargs).startswith("It is sunny")
structured = model(max_tokens=200).as_structured_llm(City)
assert isinstance(structured.chat([ChatMessage(role="user", content="Which city has the Eiffel tower?")]).raw, City)
assert isinstance(asyncio.run(agent()), AgentOutput)
