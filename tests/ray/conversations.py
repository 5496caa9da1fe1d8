"""Conversations of known token ids, for a server and for the simulator.

Each client holds one at a time: a prompt of its own, then turns that repeat all before them and add a few tokens. It
waits for the answer, and a pause, before the next turn.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from octavo_bench.serving.http_client import HttpClient, TimedAnswer
from octavo_bench.serving.serve_load import Load, Prompts, apply
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


async def converse(url: str, model: str, shape: ConversationShape, seed: int = 0) -> tuple[list[TimedAnswer], float]:
    """Hold all conversations over HTTP; returns the answers, and the seconds that they took."""
    prompts = Prompts("completions", model, shape.vocab_size, {}, salt=str(seed))
    client = HttpClient(url, "completions", None, timeout=600)

    async def asked(job: Job, told: dict[int, TimedAnswer]) -> TimedAnswer:
        answer = await client.ask(prompts.body(job, told))
        if answer.error is None and answer.num_output != job.output_len:
            answer.error = f"{answer.num_output} of {job.output_len} tokens"
        return answer

    try:
        starts = Load(rate=math.inf)  # the conversations have their own
        return await apply(starts, Conversations(shape, seed), asked)
    finally:
        client.close()


class Conversations:
    """The conversations as a workload, of the simulator and over HTTP."""

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
        made, left = prompt or (self._text(self.shape.first),), self._turns_left[client]
        return Job(arrival, made, self.shape.answer, self._text(0)[0], session=client, turns_left=left)
