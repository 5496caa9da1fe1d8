"""Conversations of known token ids: over HTTP, and as a workload of the simulator, so that both can be compared.

Each client holds one conversation at a time: a prompt of its own, then turns that repeat all before them and add a
few tokens. It waits for the answer, and a pause, before the next turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from octavo_bench.http_client import HttpClient
from octavo_fleet.sim.jobs import Awaits, Job


@dataclass(frozen=True)
class ConversationShape:
    """Lengths in tokens, the pause in seconds."""

    num_clients: int = 18
    conversations_each: int = 2
    turns: int = 5
    first: int = 400
    more: int = 48
    answer: int = 24
    pause: float = 4.0
    vocab_size: int = 20_000
    """Prompts are drawn from the tokens below this, without the first few, which are special in many models."""


@dataclass
class ConversationTimes:
    """What the clients saw."""

    ttft: list[float] = field(default_factory=list)
    num_failed: int = 0
    seconds: float = 0.0


async def converse(url: str, model: str, shape: ConversationShape, seed: int = 0) -> ConversationTimes:
    """Hold all conversations over HTTP."""
    measured = ConversationTimes()
    began = time.monotonic()
    client = HttpClient(url, "completions", None, timeout=600)
    try:
        rngs = [random.Random(seed * 1000 + number) for number in range(shape.num_clients)]
        await asyncio.gather(*(_client(client, model, shape, rng, measured) for rng in rngs))
    finally:
        client.close()
    measured.seconds = time.monotonic() - began
    return measured


async def _client(
    client: HttpClient, model: str, shape: ConversationShape, rng: random.Random, measured: ConversationTimes
) -> None:
    await asyncio.sleep(rng.random() * shape.pause)
    vocabulary = range(20, shape.vocab_size)
    for _ in range(shape.conversations_each):
        tokens = rng.choices(vocabulary, k=shape.first)
        for _ in range(shape.turns):
            answer = await _turn(client, model, tokens, shape.answer, measured)
            tokens = [*tokens, *answer, *rng.choices(vocabulary, k=shape.more)]
            await asyncio.sleep(shape.pause)


async def _turn(
    client: HttpClient, model: str, tokens: list[int], num_tokens: int, measured: ConversationTimes
) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": tokens, "max_tokens": num_tokens, "temperature": 0}
    answer = await client.ask(body | {"ignore_eos": True, "stream": True, "return_token_ids": True})
    if answer.times:
        measured.ttft.append(answer.ttft)
    measured.num_failed += len(answer.token_ids) != num_tokens
    return answer.token_ids


class Conversations:
    """The same as a workload of the simulator."""

    awaits: Awaits = "session"

    def __init__(self, shape: ConversationShape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = random.Random(seed)
        self._next_text = 1
        self._starts = sorted((self._rng.random() * shape.pause for _ in range(shape.num_clients)), reverse=True)
        self._turns_left: dict[int, int] = {}
        """Turns to come of each client, over all its conversations."""

    def _text(self, length: int) -> tuple[int, int]:
        self._next_text += 1
        return self._next_text, length

    def next_job(self) -> Job | None:
        """The first turn of the next client."""
        if not self._starts:
            return None
        client = len(self._turns_left) + 1
        self._turns_left[client] = self.shape.turns * self.shape.conversations_each - 1
        return self._job(self._starts.pop(), client, ())

    def after(self, job: Job, now: float) -> Job | None:
        """The client's next turn, which after the last one of a conversation begins another."""
        left = self._turns_left[job.session]
        if not left:
            return None
        self._turns_left[job.session] -= 1
        is_new = left % self.shape.turns == 0
        before = () if is_new else (*job.prompt, (job.output_token, job.output_len), self._text(self.shape.more))
        return self._job(now + self.shape.pause, job.session, before)

    def _job(self, arrival: float, client: int, prompt: tuple[tuple[int, int], ...]) -> Job:
        made = prompt or (self._text(self.shape.first),)
        return Job(arrival, made, self.shape.answer, self._text(0)[0], session=client)
