"""The unmodified openai client: synchronous and asynchronous, streaming, strict about shapes, and its error classes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


class FullEngine(InProcessEngine):
    num_live = 10_000
    live_owners = Counter({"": 10_000})


def options(served: Served) -> dict[str, Any]:
    return {
        "base_url": served.url + "/v1",
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
    }


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**options(server)) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="test", messages=MESSAGES, max_completion_tokens=5, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER[:5]] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10
    assert answer._request_id


def test_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="test", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER[:5]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    with client.chat.completions.stream(model="test", messages=MESSAGES, stop=["ans"]) as helper:
        helper.until_done()
        assert helper.get_final_completion().choices[0].message.content == "The "


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="test", prompt=["Hi", "Ho"], max_tokens=3, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["The", "The"]
    assert answer.choices[0].logprobs is not None
    # Not strict: the client's own type has no null here, though every server of this API sends it in streams.
    with openai.OpenAI(base_url=client.base_url, api_key="none") as lenient:
        pieces = list(lenient.completions.create(model="test", prompt="Hi", max_tokens=3, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "The"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    assert client.models.retrieve("test").id == "test"


def test_asynchronous(server: Served) -> None:
    async def run() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(**options(server)) as client:
            whole = await client.chat.completions.create(model="test", messages=MESSAGES, max_tokens=7)
            stream = await client.chat.completions.create(model="test", messages=MESSAGES, max_tokens=7, stream=True)
            return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(run()) == (ANSWER[:7], ANSWER[:7])


def test_leaving_a_stream_ends_it(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(runs=False))

    async def run() -> None:
        async with openai.AsyncOpenAI(**options(served)) as client:
            call = asyncio.create_task(
                client.chat.completions.create(model="test", messages=MESSAGES, max_tokens=400, stream=True)
            )
            while not served.engine.num_live:
                await asyncio.sleep(0.005)
            served.call(served.engine.step)
            stream = await call
            await anext(stream.__aiter__())
            await stream.close()
            for _ in range(400):
                if not served.engine.num_live:
                    return
                await asyncio.sleep(0.005)
            pytest.fail("the request goes on")

    asyncio.run(run())


def test_error_classes(client: openai.OpenAI, serve_app: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="test", messages=MESSAGES, temperature=101)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="test", messages=MESSAGES, max_tokens=10_000)
    assert refused.value.code == "context_length_exceeded"
    assert "this model's maximum context length is" in str(refused.value).lower()
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.code == "model_not_found"
    locked = serve_app(api_key="key")
    with openai.OpenAI(**options(locked)) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai.OpenAI(**options(serve_app(FullEngine()))) as waiting, pytest.raises(openai.RateLimitError):
        waiting.completions.create(model="test", prompt="x")
    with openai.OpenAI(**options(serve_app(InProcessEngine(is_draining=True)))) as late:
        with pytest.raises(openai.InternalServerError) as unavailable:
            late.completions.create(model="test", prompt="x")
        assert unavailable.value.status_code == 503
