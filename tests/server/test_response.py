"""Streams: framing to the byte, statuses before the first event, keep-alives, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from typing import Any

import pytest

from octavo.errors import RequestFailed
from octavo.types import Request
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http import response as response_module
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.raw import connect, post, read_chunk, read_head
from tests.tiers import nightly_after

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}


def events(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream, whose framing must be exact."""
    assert data.endswith(b"\n\n")
    *frames, last = data.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_a_chat_stream_to_the_byte(serve_app: Any) -> None:
    served = serve_app()
    response = served.chat(max_tokens=2, stream=True, stream_options={"include_usage": True})
    first = events(response.content)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
        '"model":"test","choices":['
    )
    tail = '],"usage":null}\n\n'
    num_prompt = len(served.engine.requests[0].prompt_tokens)
    assert response.text == (
        head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + tail
        + head + '{"index":0,"delta":{"content":"T"},"logprobs":null,"finish_reason":null}' + tail
        + head + '{"index":0,"delta":{"content":"h"},"logprobs":null,"finish_reason":"length","stop_reason":null}'
        + tail
        + head + f'],"usage":{{"prompt_tokens":{num_prompt},"completion_tokens":2,"total_tokens":{num_prompt + 2},'
        '"prompt_tokens_details":{"cached_tokens":3},"completion_tokens_details":{"reasoning_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip
    assert first["id"].startswith("chatcmpl-")


def test_a_completion_stream_to_the_byte(serve_app: Any) -> None:
    response = serve_app().complete(max_tokens=2, stream=True)
    first = events(response.content)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},'
        '"model":"test","choices":[{"index":0,"text":'
    )
    assert response.text == (
        head + '"T","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head + '"h","logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip
    assert first["id"].startswith("cmpl-")


def test_headers_of_a_stream(serve_app: Any) -> None:
    headers = serve_app().chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert "content-length" not in headers


def test_events_of_one_step_go_out_together_and_headers_wait_for_the_first(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def read() -> None:
        reader, writer = await connect(served.port, "/v1/chat/completions", {**CHAT, "n": 3})
        head = asyncio.create_task(read_head(reader))
        while engine.num_live < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert not head.done(), "the status was sent before anything was certain"
        served.call(engine.step)
        assert (await head)[0] == 200
        first = await read_chunk(reader)
        assert first.count(b"data: ") == 6, "three roles and three texts"
        served.call(engine.step)
        last = await read_chunk(reader)
        assert last.count(b'"content":"h"') == 3
        assert last.endswith(b"data: [DONE]\n\n")
        writer.close()

    asyncio.run(read())


def test_a_slow_reader_gets_longer_pieces_and_all_of_the_text(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def read() -> bytes:
        reader, writer = await connect(served.port, "/v1/chat/completions", {**CHAT, "max_tokens": 60})
        while not engine.num_live:
            await asyncio.sleep(0.005)
        served.call(lambda: [engine.step() for _ in range(60)])
        await read_head(reader)
        data = b""
        while piece := await read_chunk(reader):
            data += piece
        writer.close()
        return data

    received = events(asyncio.run(read()))
    assert len(received) == 2
    assert len(received[1]["choices"][0]["delta"]["content"]) == 60


@pytest.mark.parametrize(
    "text", ["naïve 😀 日本語 \u2028\u2029\x85 end", 'tab\t line\n quote" back\\ nul\x00', "ab\ufffd"]
)
def test_streamed_pieces_add_up_to_the_whole_text(serve_app: Any, text: str) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: list(text.encode())))
    num_tokens = len(text.encode())
    assert served.complete(max_tokens=num_tokens).json()["choices"][0]["text"] == text
    assert served.chat(max_tokens=num_tokens).json()["choices"][0]["message"]["content"] == text
    for response, piece in (
        (served.complete(max_tokens=num_tokens, stream=True), lambda choice: choice["text"]),
        (served.chat(max_tokens=num_tokens, stream=True), lambda choice: choice["delta"].get("content", "")),
    ):
        assert len(response.text.splitlines()) == len(response.content.split(b"\n")) - 1, "a reader sees other lines"
        pieces = [piece(event["choices"][0]) for event in events(response.content)]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces).replace(text, "")


def test_an_error_after_the_first_event_is_an_event_and_then_done(serve_app: Any) -> None:
    engine = InProcessEngine(errors={2: RequestFailed("The engine fails on this.")})
    *texts, error = events(serve_app(engine).chat(stream=True, n=2).content)
    assert [choice["delta"].get("content") for text in texts for choice in text["choices"]].count("T") == 2
    assert error == {
        "error": {
            "message": "The engine fails on this.",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }
    assert engine.num_live == 0


def test_usage_in_every_chunk(serve_app: Any) -> None:
    served = serve_app()
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = events(served.chat(max_tokens=3, stream=True, stream_options=options).content)
    counts = [event["usage"]["completion_tokens"] for event in received]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert received[-1]["choices"] == []
    assert all(event["choices"] for event in received[:-1])


def test_silence_is_filled_with_comments(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "KEEP_ALIVE_SECONDS", 0.05)
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def read() -> None:
        reader, writer = await connect(served.port, "/v1/chat/completions", CHAT)
        while not engine.num_live:
            await asyncio.sleep(0.005)
        start = time.monotonic()
        served.call(engine.step)
        await read_head(reader)
        assert b"assistant" in await read_chunk(reader)
        assert [await read_chunk(reader) for _ in range(3)] == [b": keep-alive\n\n"] * 3
        assert time.monotonic() - start > 0.1
        served.call(engine.step)
        assert (await read_chunk(reader)).endswith(b"data: [DONE]\n\n")
        writer.close()

    asyncio.run(read())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_client_that_leaves_ends_its_requests_at_once(serve_app: Any, stream: bool, num_steps: int) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def leave() -> None:
        body = {**CHAT, "max_tokens": 100, "stream": stream, "n": 2}
        _, writer = await connect(served.port, "/v1/chat/completions", body)
        while engine.num_live < 2:
            await asyncio.sleep(0.005)
        for _ in range(num_steps):
            served.call(engine.step)
        writer.transport.abort()

    asyncio.run(leave())
    deadline = time.monotonic() + 30
    while engine.num_live and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert sorted(engine.aborted) == [1, 2]
    served.call(engine.step)
    assert served.client.get("/health").status_code == 200


def test_a_stop_string_ends_the_request_in_the_engine(serve_app: Any) -> None:
    served = serve_app()
    for stream in (True, False):
        served.complete(max_tokens=200, stop=["ans"], stream=stream)
        request: Request = served.engine.requests[-1]
        assert served.engine.aborted[-1] == request.id


@pytest.mark.parametrize("num_streams", nightly_after(1, (80, 200)))
def test_many_streams_at_once(serve_app: Any, num_streams: int) -> None:
    served = serve_app(InProcessEngine(max_num_seqs=300))

    async def run() -> list[tuple[int, dict[str, str], bytes]]:
        body = {**CHAT, "max_tokens": 30}
        return await asyncio.gather(*(post(served.port, "/v1/chat/completions", body) for _ in range(num_streams)))

    for status, _, data in asyncio.run(run()):
        assert status == 200
        texts = [event["choices"][0]["delta"].get("content", "") for event in events(data)]
        assert "".join(texts) == "The answer is 4, said the bird"


def _whole_of(received: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the events of a completion stream say of each choice, put together."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in received for choice in event["choices"]):
        entry = whole.setdefault(choice["index"], {"text": "", "logprobs": [], "token_ids": [], "end": None})
        entry["text"] += choice["text"]
        entry["token_ids"] += choice.get("token_ids") or []
        if choice["logprobs"] is not None:
            entry["logprobs"] += zip(*choice["logprobs"].values(), strict=True)
        if choice["finish_reason"] is not None:
            entry["end"] = (choice["finish_reason"], choice["stop_reason"])
    return whole


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": 2, "return_token_ids": True},
        {"stop": ["4, said"], "logprobs": 0},
        {"stop": ["r i"], "min_tokens": 12},
        {"stop_token_ids": [ord("4")], "n": 2},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_merging_the_tokens_of_several_steps_changes_nothing(serve_app: Any, asked: dict[str, Any]) -> None:
    """The same answer with an event for every token, and with the tokens of a random number of steps in one event."""
    rng = random.Random(str(asked))
    body = {"prompt": "Hi", "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}, **asked}
    one_by_one = events(serve_app().client.post("/v1/completions", json=body).content)
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)

    async def read() -> bytes:
        reader, writer = await connect(served.port, "/v1/completions", body)
        while not engine.num_live:
            await asyncio.sleep(0.005)
        while engine.num_live:
            await asyncio.to_thread(served.call, lambda: [engine.step() for _ in range(rng.randrange(1, 9))])
        await read_head(reader)
        data = b""
        while piece := await read_chunk(reader):
            data += piece
        writer.close()
        return data

    merged = events(asyncio.run(read()))
    assert len(merged) < len(one_by_one) / 2
    assert _whole_of(merged) == _whole_of(one_by_one)
    assert merged[-1]["usage"] == one_by_one[-1]["usage"]


@pytest.mark.slow
def test_a_request_that_ended_is_freed_without_a_collection(served: Served) -> None:
    gc.collect()
    gc.disable()
    try:
        for stream in (True, False):
            served.complete(stream=stream, n=2)
            served.chat(stream=stream, max_tokens=3)
            served.complete(stream=stream, temperature=-1)
        deadline = time.monotonic() + 30
        # By its type, since isinstance asks what a weak reference of somebody else's stood for, and that may be gone.
        while left := [item for item in gc.get_objects() if issubclass(type(item), Generation | GeneratedChoice)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    finally:
        gc.enable()
