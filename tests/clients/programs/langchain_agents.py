"""LangChain's ``create_agent``: tools, and ordinary classes by both strategies, over OpenAI's API and Anthropic's.

Arguments: URL, model.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def ask(agent: Any, question: str) -> dict[str, Any]:
    return agent.invoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 12})


def drive(model: BaseChatModel) -> None:
    free = ask(create_agent(model, tools=[weather]), "How is the weather in Paris?")
    assert free["messages"][-1].type == "ai"
    for strategy in (ToolStrategy, ProviderStrategy):
        answer = ask(create_agent(model, response_format=strategy(City)), "Which city has the Eiffel tower?")
        assert isinstance(answer["structured_response"], City), strategy


for limit in (80, 400):
    chat = ChatOpenAI(base_url=URL + "/v1", api_key="none", model=MODEL, max_tokens=limit, max_retries=0)
    drive(chat)
    drive(ChatOpenAI(base_url=URL + "/v1", api_key="none", model=MODEL, max_tokens=limit, use_responses_api=True))
    drive(ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=limit, max_retries=0))
