"""The engine process killed again and again under mixed requests: none is lost, changed or failed.

``OCTAVO_KILLS=300`` makes it a long run, of about four seconds a kill on two free cores; ``OCTAVO_KILLS_SEED`` makes it
another one. `make nightly` has one of twenty.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.conftest import Server
from tests.tiers import nightly_after

NUM_KILLS = int(os.environ.get("OCTAVO_KILLS", "1"))
SEED = int(os.environ.get("OCTAVO_KILLS_SEED", "1"))
NUM_CLIENTS = 8
FIRST_MOMENT = 0.05
"""Seconds that an engine process is ready, at least, before it is killed; at most some times what the longest answer
takes alone, so that a slow machine gets as far as a fast one."""
SHARE_KILLED_IN_START = 0.15
NUM_LIVES = 3
TOKENS_OF_A_LIFE = 8
SENTENCE = "An octavo is a book made of sheets folded three times into eight leaves, small enough for a pocket. "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "pages": {"type": "integer"}},
    "required": ["name", "pages"],
    "additionalProperties": False,
}

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300 + 120 * max(20, NUM_KILLS))]


def requests(repeats: int) -> list[tuple[str, dict[str, Any]]]:
    """Completions of each kind, with a kind's name."""
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(repeats):
        body = {"prompt": f"{number}. {SENTENCE}", "max_tokens": 12 + 12 * number, "ignore_eos": True}
        seeded = {**body, "temperature": 0.9, "top_p": 0.95, "seed": number}
        made += [
            ("plain", {**body, "temperature": 0}),
            ("seeded", seeded),
            ("choices", {**seeded, "n": 2, "frequency_penalty": 0.5}),
            ("stream", {**seeded, "stream": True}),
            ("long", {**body, "prompt": f"{number}. {SENTENCE * 15 * repeats}", "max_tokens": 8, "temperature": 0}),
            ("prompt_logprobs", {**seeded, "prompt": body["prompt"] * 6, "prompt_logprobs": 2, "logprobs": 1}),
            ("grammar", {**seeded, "ignore_eos": False, "max_tokens": 48, "structured_outputs": {"json": SCHEMA}}),
            ("regex", {**seeded, "ignore_eos": False, "structured_outputs": {"regex": "[a-z]{8,40}"}, "stream": True}),
        ]
    return made


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """All choices; of a stream, the text and the finish reason."""
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]
    text, reason = "", None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return text, reason


class Kills:
    """Kills the engine process of a server."""

    def __init__(self, client: httpx.AsyncClient, last_moment: float) -> None:
        self.client = client
        self.last_moment = last_moment
        self.rng = random.Random(SEED)
        self.recoveries: list[float] = []
        """Seconds from each kill of a ready engine process to the next that is ready."""

    async def stats(self) -> dict[str, Any]:
        return (await self.client.get("/stats")).json()  # type: ignore[no-any-return]

    async def ready(self) -> dict[str, Any]:
        while True:
            stats = await self.stats()
            if stats["is_ready"]:
                return stats
            await asyncio.sleep(0.01)

    async def next_process(self, pid: int) -> int:
        while (found := (await self.stats())["engine_pid"]) == pid:
            await asyncio.sleep(0.01)
        return int(found)

    async def run(self, count: int) -> None:
        clock = asyncio.get_running_loop().time
        while count:
            pid = (await self.ready())["engine_pid"]
            await asyncio.sleep(self.rng.uniform(FIRST_MOMENT, self.last_moment))
            count -= 1
            os.kill(pid, self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            began = clock()
            pid = await self.next_process(pid)
            if count and self.rng.random() < SHARE_KILLED_IN_START:
                await asyncio.sleep(self.rng.uniform(0, 1.5))
                count -= 1
                os.kill(pid, signal.SIGKILL)
                pid = await self.next_process(pid)
            await self.ready()
            self.recoveries.append(clock() - began)


def totals(server: Server) -> Counter[str]:
    """What the server counts, by name."""
    found = re.findall(r"^octavo_(\w+)_total\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return Counter({name: int(float(count)) for name, count in found})


@pytest.mark.parametrize("num_kills", nightly_after(1, dict.fromkeys((NUM_KILLS, 20))))
def test_kills_lose_change_and_fail_nothing(server: Server, num_kills: int) -> None:
    asked, before = requests(1 if num_kills < 20 else 2), totals(server)

    async def main() -> tuple[list[Any], list[tuple[int, Any]], Kills]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            clock, alone, longest = asyncio.get_running_loop().time, [], 0.0
            for _, body in asked:
                began = clock()
                alone.append(await answer(client, body))
                longest = max(longest, clock() - began)
            answers: list[tuple[int, Any]] = []
            numbers = itertools.count()
            kills = Kills(client, longest if num_kills < 20 else 3 * longest)
            killing = asyncio.create_task(kills.run(num_kills))

            async def ask() -> None:
                while not killing.done():
                    index = next(numbers) % len(asked)
                    try:
                        answers.append((index, await answer(client, asked[index][1])))
                    except (AssertionError, httpx.HTTPError) as error:
                        answers.append((index, error))

            await asyncio.gather(killing, *(ask() for _ in range(NUM_CLIENTS)))
            return alone, answers, kills

    alone, answers, kills = asyncio.run(main())
    after = totals(server)
    recoveries = sorted(kills.recoveries)
    told = {name: after[name] - before[name] for name in ("engine_restarts", "requests_replayed", "poison_requests")}
    kinds = dict(Counter(asked[index][0] for index, _ in answers))
    print(f"{num_kills} kills within {kills.last_moment:.1f} s of being ready, {len(answers)} answers {kinds}")
    print(f"recovery median {recoveries[len(recoveries) // 2]:.2f}, most {recoveries[-1]:.2f} s; {told}")
    wrong = [(asked[index], found, alone[index]) for index, found in answers if found != alone[index]]
    assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:5]}"
    assert told["poison_requests"] == 0
    assert told["engine_restarts"] >= len(recoveries)


@pytest.mark.nightly
def test_a_request_with_a_grammar_needs_no_longer_life_than_another(server: Server) -> None:
    """The engine process is killed as soon as a plain request got a few tokens of it; the other gets some, too."""
    counts = Counter[str]()
    body = {"prompt": SENTENCE, "max_tokens": 4000, "ignore_eos": True, "temperature": 0.9, "stream": True}
    asked = {"plain": body, "regex": {**body, "structured_outputs": {"regex": "( [a-z]{2,9})+"}}}

    async def read(client: httpx.AsyncClient, kind: str) -> None:
        async with client.stream("POST", "/v1/completions", json=asked[kind]) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                counts[kind] += line.startswith("data: {")

    async def main() -> list[int]:
        gained = []
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            readers = [asyncio.create_task(read(client, kind)) for kind in asked]
            while not (counts["plain"] and counts["regex"]):
                await asyncio.sleep(0.01)
            kills = Kills(client, 0)
            for _ in range(NUM_LIVES):
                pid = (await kills.ready())["engine_pid"]
                os.kill(pid, signal.SIGKILL)
                await kills.next_process(pid)
                before = counts.copy()
                while counts["plain"] < before["plain"] + TOKENS_OF_A_LIFE:
                    assert not readers[0].done(), "a stream ended before its time"
                    await asyncio.sleep(0.002)
                gained.append(counts["regex"] - before["regex"])
            for reader in readers:
                reader.cancel()
        return gained

    gained = asyncio.run(main())
    assert all(gained), f"tokens of the request with a grammar in each life: {gained}"
