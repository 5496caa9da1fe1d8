"""Mixed completions, asked of a server from outside."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.conftest import Server

TEXT = (
    "An octavo is a book made of sheets folded three times into eight leaves. The size of a page follows from the "
    "size of the sheet, and so an octavo is smaller than a quarto and larger than a duodecimo. Printers liked it "
    "because it was cheap to print, light to carry and easy to read. "
)


def mixed_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Completions of mixed lengths and mixed sampling parameters; the same list for the same seed."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        words = (TEXT * 4).split()
        start, length = rng.randrange(60), rng.choice([3, 9, 20, 60, 130])
        body: dict[str, Any] = {
            "prompt": f"{number}. " + " ".join(words[start : start + length]),
            "max_tokens": rng.choice([8, 30, 60]),
            "ignore_eos": rng.random() < 0.5,
            "seed": 1000 + number,
        }
        body |= rng.choice(
            [
                {"temperature": 0},
                {"temperature": 0.8, "top_p": 0.9},
                {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
                {"temperature": 0.7, "repetition_penalty": 1.2},
                {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
                {"temperature": 1.2, "logit_bias": {"11": -5, "30": 2}, "min_tokens": 5, "n": 2},
            ]
        )
        requests.append(body)
    return requests


def mixed_drafting(count: int, seed: int) -> list[dict[str, Any]]:
    """``mixed_requests``, some with grammars, stop strings, and numbers of drafts of their own."""
    bodies = mixed_requests(count, seed)
    for number, body in enumerate(bodies):
        if number % 10 == 3:
            body["structured_outputs"] = {"regex": "( [a-z]+){4,9}[.]"}
        if number % 10 == 7:
            body["stop"] = ["the", "\n"]
        if number % 10 == 5:
            body["num_speculative_tokens"] = number % 3
    return bodies


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream, which must close with [DONE]."""
    done = False
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            assert not done, "an event after [DONE]"
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"


async def complete(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> dict[int, tuple[str, str]]:
    """Choice index to (text, finish_reason)."""
    if not stream:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return {c["index"]: (c["text"], c["finish_reason"]) for c in response.json()["choices"]}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for event in events(response):
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    assert choice["index"] not in reasons, "two ends of one choice"
                    reasons[choice["index"]] = choice["finish_reason"]
    return {index: (texts[index], reasons[index]) for index in texts}


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=4000, max_keepalive_connections=100)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)


async def complete_all(server: Server, bodies: list[dict[str, Any]], stream: bool) -> list[dict[int, tuple[str, str]]]:
    """The completions of all at once."""
    async with client_of(server) as client:
        return await asyncio.gather(*(complete(client, body, stream) for body in bodies))


async def complete_together(server: Server, bodies: list[dict[str, Any]], streams: list[bool]) -> list[Any]:
    """The completions of all, streamed or not; none is begun before all have arrived, in this order, however slow this
    machine is.

    The server needs ``--weight-updates-dir``, without which it can't be paused.
    """
    async with client_of(server) as client:
        assert (await client.post("/pause?mode=keep")).json()["is_paused"]
        results, count = [], 0
        for body, stream in zip(bodies, streams, strict=True):
            results.append(asyncio.create_task(complete(client, body, stream)))
            count += body.get("n", 1)
            while not results[-1].done() and (await client.get("/stats")).json()["num_live"] < count:
                await asyncio.sleep(0.005)
        assert not (await client.post("/resume")).json()["is_paused"]
        return await asyncio.gather(*results)


def wait_until_idle(server: Server) -> dict[str, Any]:
    """The statistics once nothing runs; at most a minute from now."""
    for _ in range(600):
        stats: dict[str, Any] = server.get("/stats").json()
        if not stats["num_running"] and not stats["num_waiting"] and not stats["num_live"]:
            break
        time.sleep(0.1)
    return stats
