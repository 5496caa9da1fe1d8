"""The unmodified openai client: parsed answers, tools made of models, the streaming helper, and a loop of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.server.openai.test_client import options
from tests.server.openai.test_tools import CALL, TEMPLATE, TEXT, TOOLS
from tests.server.writing_engine import writing_engine

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class Pet(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    age: int | None = Field(ge=0, le=30)


class Owner(BaseModel):
    pets: list[Pet] = Field(max_length=2)
    is_happy: bool


class Weather(BaseModel):
    """Look up the weather."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def writer() -> Iterator[openai.OpenAI]:
    tokenizer = byte_tokenizer(TEMPLATE)
    served = Served(writing_engine(tokenizer), tokenizer, {"tool_call_parser": "hermes"})
    with openai.OpenAI(**options(served)) as client:
        yield client
    served.stop()


def seeds_that_end(client: openai.OpenAI, **asked: Any) -> Iterator[int]:
    """Seeds with which the random model comes to an end in time; the client refuses answers that do not."""
    found = 0
    for seed in range(40):
        answer = client.chat.completions.create(model="test", messages=MESSAGES, seed=seed, max_tokens=400, **asked)
        if answer.choices[0].finish_reason != "length":
            yield seed
            found += 1
        if found == 3:
            return
    pytest.fail("the model never ends")


def schema_of(model: type[BaseModel]) -> Any:
    return openai.lib._parsing._completions.type_to_response_format_param(model)


def test_answers_are_parsed(writer: openai.OpenAI) -> None:
    for seed in seeds_that_end(writer, response_format=schema_of(Owner)):
        answer = writer.chat.completions.parse(
            model="test", messages=MESSAGES, seed=seed, max_tokens=400, response_format=Owner
        )
        assert isinstance(answer.choices[0].message.parsed, Owner)


def test_parsed_answers_are_streamed(writer: openai.OpenAI) -> None:
    for seed in seeds_that_end(writer, response_format=schema_of(Pet)):
        asked: Any = {"model": "test", "messages": MESSAGES, "seed": seed, "max_tokens": 400}
        with writer.chat.completions.stream(**asked, response_format=Pet) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Pet)
        assert {"chunk", "content.delta", "content.done"} <= kinds


def test_calls_are_parsed(writer: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    for seed in seeds_that_end(writer, tools=[tool], tool_choice="required"):
        answer = writer.chat.completions.parse(
            model="test", messages=MESSAGES, seed=seed, max_tokens=400, tools=[tool], tool_choice="required"
        )
        for call in answer.choices[0].message.tool_calls or []:
            assert isinstance(call.function.parsed_arguments, Weather)
        assert answer.choices[0].message.tool_calls


def test_calls_are_streamed(writer: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    for seed in seeds_that_end(writer, tools=[tool], tool_choice="required"):
        asked: Any = {"model": "test", "messages": MESSAGES, "seed": seed, "max_tokens": 400, "tools": [tool]}
        with writer.chat.completions.stream(**asked, tool_choice="required") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or []
        assert calls
        assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
        assert kinds.count("tool_calls.function.arguments.done") == len(calls)


def test_an_answer_cut_short_is_an_error_of_its_own(writer: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        writer.chat.completions.parse(model="test", messages=MESSAGES, max_tokens=3, response_format=Owner)


def test_a_schema_that_cannot_be_kept_is_a_bad_request(writer: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match="'not'") as refused:
        writer.chat.completions.create(model="test", messages=MESSAGES, response_format=form)
    assert refused.value.param == "response_format"


class Forecaster(InProcessEngine):
    """Calls a function, and when it sees the result, answers."""

    def __init__(self) -> None:
        super().__init__(self.reply)

    @staticmethod
    def reply(request: Any) -> list[int]:
        prompt = bytes(request.prompt_tokens).decode()
        return [*("It is sunny." if "<tool>sunny" in prompt else TEXT).encode(), IM_END]


@pytest.fixture
def forecaster(serve_app: Any) -> Served:
    served: Served = serve_app(Forecaster(), tokenizer=byte_tokenizer(TEMPLATE), tool_call_parser="hermes")
    return served


def test_a_loop_of_calls(forecaster: Served) -> None:
    messages = list(MESSAGES)
    tools: Any = TOOLS
    with openai.OpenAI(**options(forecaster)) as client:
        first = client.chat.completions.create(model="test", messages=messages, tools=tools)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            assert call.type == "function"
            assert isinstance(json.loads(call.function.arguments), dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        second = client.chat.completions.create(model="test", messages=messages, tools=tools)
        assert second.choices[0].message.content == "It is sunny."
        assert second.choices[0].finish_reason == "stop"


def test_a_stream_of_calls_adds_up(forecaster: Served) -> None:
    async def run() -> Any:
        async with openai.AsyncOpenAI(**options(forecaster)) as client:
            tools: Any = TOOLS
            async with client.chat.completions.stream(model="test", messages=MESSAGES, tools=tools) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_completion()

    message = asyncio.run(run()).choices[0].message
    assert message.content == "I look."
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "f"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Z\u00fcrich"}
    assert CALL in TEXT
