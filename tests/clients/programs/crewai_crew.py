"""CrewAI: its LLM class, a crew, a crew with a tool, and a class as output. Arguments: URL, model."""

from __future__ import annotations

import sys
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: str
    country: str


@tool("weather")
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def model(**more: Any) -> LLM:
    return LLM(model=f"openai/{MODEL}", base_url=URL + "/v1", api_key="none", max_tokens=100, temperature=0, **more)


def run(tools: list[Any], description: str, **more: Any) -> Any:
    agent = Agent(role="assistant", goal="Answer.", backstory="Brief.", llm=model(), tools=tools, max_iter=2)
    task = Task(description=description, expected_output="One sentence.", agent=agent, **more)
    return Crew(agents=[agent], tasks=[task]).kickoff()


text = model().call("What is 2+2?")
assert text
assert model(stream=True).call("What is 2+2?") == text
assert isinstance(model(response_format=City).call("Which city has the Eiffel tower?"), City)
crew = run([], "What is 2+2?")
assert crew.raw
assert crew.token_usage.completion_tokens > 0
assert run([weather], "How is the weather in Paris?").raw
