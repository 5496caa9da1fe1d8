"""magentic: functions whose bodies are prompts. Arguments: URL, model."""

import sys

from magentic import FunctionCall, OpenaiChatModel, StreamedStr, prompt
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
MODELS = [OpenaiChatModel(MODEL, base_url=URL + "/v1", api_key="none", max_tokens=limit) for limit in (80, 300)]


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


for model in MODELS:

    @prompt("What is 2+2?", model=model)
    def answer() -> str: ...

    @prompt("What is 2+2?", model=model)
    def streamed() -> StreamedStr: ...

    @prompt("Which city has the Eiffel tower?", model=model)
    def city() -> City: ...

    @prompt("How is the weather in Paris?", functions=[weather], model=model)
    def call() -> FunctionCall[str]: ...

    assert answer()
    assert "".join(streamed())
    assert isinstance(city(), City)
    assert call()().startswith("It is sunny")
