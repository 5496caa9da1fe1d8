"""What a client of `octavo serve` may rely on, checked from outside against the default model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.completions import (
    TEXT,
    client_of,
    complete,
    complete_all,
    complete_together,
    mixed_drafting,
    mixed_requests,
    wait_until_idle,
)
from tests.conftest import Server
from tests.server import raw
from tests.tiers import nightly_after

pytestmark = [pytest.mark.model, pytest.mark.slow]

TIGHT = "--max-model-len", "288", "--num-kv-blocks", "19", "--block-size", "16", "--max-num-seqs", "32"


def test_first_answer(server: Server) -> None:
    """The request that the server prints, which leaves the sampling open."""
    (curl,) = [line for line in server.lines if "curl" in line]
    body = json.loads(curl[curl.index("-d '") + 4 : curl.rindex("'")])
    for seed in range(4):
        reply = server.post("/v1/chat/completions", {**body, "seed": seed})
        assert reply.status_code == 200
        assert "4" in reply.json()["choices"][0]["message"]["content"]


def _growing(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with a short prompt and a long answer: three such at once preempt each other in a small pool."""
    return {**body, "prompt": "Once", "max_tokens": 120, "ignore_eos": True}


CHOICES: dict[str, Any] = {"n": 2, "temperature": 1.2, "logit_bias": {"11": -5, "30": 2}, "min_tokens": 5}


@pytest.mark.parametrize("count", nightly_after(1, (8, 32)))
def test_batching_preemption_and_streaming_change_nothing(
    server: Server, serve: Callable[..., Server], tmp_path: Path, count: int
) -> None:
    """Requests at once in a pool that cannot hold them, half of them streamed, give what each gives alone.

    Those that are alone are computed on as many threads as there are, the others on one.
    """
    bodies = mixed_requests(count, seed=1)
    bodies[:3] = map(_growing, bodies[:3])
    bodies[4] |= CHOICES

    async def alone() -> list[Any]:
        async with client_of(server) as client:
            return [await complete(client, body, stream=False) for body in bodies]

    expected = asyncio.run(alone())
    tight = serve(*TIGHT, "--weight-updates-dir", str(tmp_path), env={"OMP_NUM_THREADS": "1"})

    results = asyncio.run(complete_together(tight, bodies, [number % 4 < 2 for number in range(count)]))
    for body, result, wanted in zip(bodies, results, expected, strict=True):
        assert result == wanted, body
    stats = wait_until_idle(tight)
    assert stats["num_preemptions"] > 0, "the pool was not small enough to prove anything"
    assert stats["num_used_blocks"] == 0


@pytest.mark.nightly
def test_guesses_change_nothing(server: Server, serve: Callable[..., Server]) -> None:
    guessing = serve("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    prompt = "1 apple, 2 pears, 3 plums. 1 apple, 2 pears, 3 plums. 1 apple, 2"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 40}
    want, found = (one.post("/v1/completions", body).json()["choices"][0] for one in (server, guessing))
    assert (found["text"], found["finish_reason"]) == (want["text"], want["finish_reason"])
    stats = guessing.get("/stats").json()
    assert 0 < stats["num_accepted_drafts"] <= stats["num_drafts"]


@pytest.mark.parametrize("count", nightly_after(1, (8, 100)))
def test_mixed_requests_with_drafts(server: Server, serve: Callable[..., Server], tmp_path: Path, count: int) -> None:
    """Bitwise what they are without, among drafts, preemptions and grammars."""
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    drafting = serve("--speculative-config", json.dumps(settings), *TIGHT, "--weight-updates-dir", str(tmp_path))
    bodies = mixed_drafting(count, seed=5)
    bodies[:3] = map(_growing, bodies[:3])
    bodies[4] |= CHOICES
    for number, body in enumerate(bodies[5:8]):
        body["num_speculative_tokens"] = number
    found = asyncio.run(complete_together(drafting, bodies, [True] * count))
    want = asyncio.run(complete_all(server, bodies, stream=True))
    for body, result, wanted in zip(bodies, found, want, strict=True):
        assert result == wanted, body
    stats = wait_until_idle(drafting)
    assert stats["num_preemptions"] > 0, "the pool was not small enough to prove anything"
    assert 0 < stats["num_accepted_drafts"] < stats["num_drafts"]


@pytest.mark.nightly
def test_engine_killed_in_the_middle_of_sixteen_streams(server: Server) -> None:
    num_restarts = server.get("/stats").json()["num_restarts"]
    bodies = [{**body, "max_tokens": 40, "n": 1, "ignore_eos": True} for body in mixed_requests(16, seed=2)]

    async def run(kill: bool) -> list[Any]:
        async with client_of(server) as client:
            streams = [asyncio.create_task(complete(client, body, stream=True)) for body in bodies]
            if kill:
                for _ in range(400):
                    await asyncio.sleep(0.02)
                    stats = (await client.get("/stats")).json()
                    if stats["num_output_tokens"] > before + 16 * 15:
                        break
                os.kill(stats["engine_pid"], signal.SIGKILL)
            return await asyncio.gather(*streams)

    undisturbed = asyncio.run(run(kill=False))
    before = server.get("/stats").json()["num_output_tokens"]
    disturbed = asyncio.run(run(kill=True))
    assert server.get("/stats").json()["num_restarts"] == num_restarts + 1
    assert disturbed == undisturbed


@pytest.mark.nightly
def test_overload_is_refused_politely(serve: Callable[..., Server]) -> None:
    """2,000 requests at once against a queue of 256: each gets an answer or a 429, and memory stays flat."""
    server = serve("--max-num-seqs", "16", "--max-num-queued-reqs", "256")
    front, port = psutil.Process(server.process.pid), int(server.url.rpartition(":")[2])
    body = {"model": "smollm2-135m", "prompt": "One two three", "max_tokens": 2, "temperature": 0}

    async def burst() -> list[tuple[int, dict[str, str], bytes]]:
        """By hand: most of the time would be the client's own."""
        return await asyncio.gather(*(raw.post(port, "/v1/completions", body) for _ in range(2000)))

    asyncio.run(burst())
    before = front.memory_info().rss
    answers = asyncio.run(burst())
    growth = front.memory_info().rss - before
    statuses = Counter(status for status, _, _ in answers)
    print(statuses, f"front process grew by {growth / 2**20:.1f} MiB")
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 256
    assert all(headers.get("retry-after", "").isdigit() for status, headers, _ in answers if status == 429)
    assert growth < 50 * 2**20
    assert wait_until_idle(server)["num_used_blocks"] == 0


def test_disconnect_frees_the_blocks(server: Server) -> None:
    """The engine stops within two steps of hearing it; the rest of the bound is until it hears."""

    async def leave_early() -> int:
        body = {"model": "smollm2-135m", "prompt": TEXT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        num_read = 0
        async with client_of(server) as client, client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                num_read += line.startswith("data: ")
                if num_read == 5:
                    break
        return num_read

    num_read = asyncio.run(leave_early())
    start = server.get("/stats").json()["num_steps"]
    stats = wait_until_idle(server)
    num_steps = stats["num_steps"] - start
    print(f"{num_steps} steps for a client that left after {num_read} events")
    assert stats["num_used_blocks"] == 0
    assert num_steps < 30, "the request went on after its client had left"


def test_openai_client(server: Server) -> None:
    """The unmodified client, synchronous and asynchronous, streaming and not, with strict response checking."""
    import openai

    options: dict[str, Any] = {"base_url": server.url + "/v1", "api_key": "none", "_strict_response_validation": True}
    question: Any = [{"role": "user", "content": "Name three colours."}]
    chat: dict[str, Any] = {"model": "smollm2-135m", "messages": question, "temperature": 0, "max_tokens": 24}
    with openai.OpenAI(**options) as client:
        whole = client.chat.completions.create(**chat).choices[0].message.content
        chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0
        assert client.models.retrieve("smollm2-135m").id == client.models.list().data[0].id
        scored = client.completions.create(model="smollm2-135m", prompt="Hello", max_tokens=3, logprobs=2)
        assert scored.choices[0].logprobs is not None
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**chat, "max_tokens": 10**6})
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no-such-model")

    async def asynchronous() -> str:
        async with openai.AsyncOpenAI(**options) as client:
            stream = await client.chat.completions.create(**chat, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    assert asyncio.run(asynchronous()) == whole
