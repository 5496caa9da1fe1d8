"""LangChain's ChatOpenAI: answers, streams, tools, structured output, a batch, and errors. Arguments: URL, model."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
CHAT = ChatOpenAI(base_url=URL + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=60, max_retries=0)
QUESTION = [SystemMessage("Be brief."), HumanMessage("What is 2+2?")]


class Pet(BaseModel):
    """A pet."""

    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look up the weather of a city."""
    return f"It is sunny in {city}."


def answers_and_streams() -> None:
    whole = CHAT.invoke(QUESTION)
    assert whole.content
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert (
        whole.usage_metadata["total_tokens"]
        == whole.usage_metadata["input_tokens"] + whole.usage_metadata["output_tokens"]
    )
    chunks = list(CHAT.stream(QUESTION, stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [answer.content for answer in CHAT.batch([QUESTION] * 4)] == [whole.content] * 4
    assert asyncio.run(CHAT.ainvoke(QUESTION)).content == whole.content
    scored = CHAT.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(scored.response_metadata["logprobs"]["content"]) == whole.usage_metadata["output_tokens"]


def tools() -> None:
    for choice in ("required", "weather"):
        caller = CHAT.bind_tools([weather], tool_choice=choice, strict=True)
        answer = caller.invoke("How is the weather in Rome?")
        (call,) = answer.tool_calls[:1]
        assert call["name"] == "weather"
        assert call["args"]["city"] in ("Oslo", "Rome")
        streamed = None
        for chunk in caller.stream("How is the weather in Rome?"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in answer.tool_calls]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    after = CHAT.bind_tools([weather]).invoke([*QUESTION, AIMessage("", tool_calls=[call]), result])
    assert isinstance(after, AIMessage)


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        parser = CHAT.with_structured_output(Pet, method=method, strict=True)
        assert isinstance(parser.invoke("Make up a pet."), Pet)


def completions_and_errors() -> None:
    plain = OpenAI(base_url=URL + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=8)
    assert plain.invoke("One two three")
    assert "".join(plain.stream("One two three")) == plain.invoke("One two three")
    assert isinstance(error_of(CHAT, "long " * 20_000), ContextOverflowError)
    assert error_of(CHAT.bind(model="other"), "Hi").code == "model_not_found"


def error_of(chat: Runnable, prompt: str) -> openai.APIStatusError:
    try:
        chat.invoke(prompt)
    except openai.APIStatusError as error:
        return error
    raise AssertionError("no error")


answers_and_streams()
tools()
structured_output()
completions_and_errors()
