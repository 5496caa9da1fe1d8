"""Mirascope: calls, streams, classes in each of its modes, tools, over two APIs. Arguments: URL, model."""

from __future__ import annotations

import sys

from mirascope import llm
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class City(BaseModel):
    name: str
    country: str


@llm.tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def drive(name: str) -> None:
    options = {"max_tokens": 200}

    @llm.call(name, **options)
    def answer() -> str:
        return "What is 2+2?"

    @llm.call(name, tools=[weather], **options)
    def ask() -> str:
        return "How is the weather in Paris?"

    whole = answer()
    assert whole.text()
    assert whole.usage.output_tokens > 0
    stream = answer.stream()
    assert "".join(stream.text_stream())
    assert whole.resume("And 3+3?").text() is not None
    for mode in ("strict", "tool"):

        @llm.call(name, format=llm.format(City, mode=mode), **options)
        def city() -> str:
            return "Which city has the Eiffel tower?"

        assert isinstance(city().parse(), City), mode
    asked = ask()
    if asked.tool_calls:
        assert asked.resume(asked.execute_tools()) is not None


llm.register_provider("openai", scope="openai/", base_url=URL + "/v1", api_key="none")
for api in ("completions", "responses"):
    drive(f"openai/{MODEL}:{api}")
