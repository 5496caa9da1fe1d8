"""Request bodies for the jobs of a workload: prompts of random tokens, or of random words, with the lengths asked for.

A job's prompt is a list of segments, each a number that stands for a text, and a length. Segments with the same number
are the same text, which is how prompts share prefixes; those that are answers are replaced by what the server said.
"""

from __future__ import annotations

import random
from typing import Any

from octavo_bench.http_client import Endpoint, TimedAnswer
from octavo_fleet.sim.jobs import Job

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name president team minute idea body back "
    "parent face level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher"
)
WORDS = COMMON.split()
"""One token each in most vocabularies, with the space before it."""
FIRST_TOKEN = 20
"""Tokens below are special in many models."""


class Prompts:
    """Makes the bodies of requests for one model."""

    def __init__(self, endpoint: Endpoint, model: str, vocab_size: int, extra: dict[str, Any], salt: str) -> None:
        """``salt``: texts differ between salts. ``extra``: more fields of each body, which may replace others."""
        self.endpoint = endpoint
        self._fields = {"model": model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        self._extra = {"ignore_eos": True, **extra}
        self._vocabulary = range(min(FIRST_TOKEN, vocab_size // 2), vocab_size)
        self._salt = salt

    def body(self, job: Job, answers: dict[int, TimedAnswer]) -> dict[str, Any]:
        """The request of ``job``; ``answers`` to the earlier turns of its session, by ``output_token``."""
        if self.endpoint == "chat":
            asked = {"messages": self._messages(job, answers), "max_completion_tokens": job.output_len}
        else:
            asked = {"prompt": self._tokens(job, answers), "max_tokens": job.output_len}
            if job.turns_left:
                asked["return_token_ids"] = True
        return {**self._fields, **asked, **self._extra}

    def _tokens(self, job: Job, answers: dict[int, TimedAnswer]) -> list[int]:
        """The prompt as tokens. An answer whose tokens the server did not name is as long, but of other tokens."""
        tokens: list[int] = []
        for number, count in job.prompt:
            told = answers[number].token_ids if number in answers else []
            tokens += told or self._random(number).choices(self._vocabulary, k=count)
        return tokens

    def _messages(self, job: Job, answers: dict[int, TimedAnswer]) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        for number, count in job.prompt:
            if number in answers:
                messages.append({"role": "assistant", "content": answers[number].text})
                continue
            text = " ".join(self._random(number).choices(WORDS, k=count))
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += " " + text
            else:
                messages.append({"role": "user", "content": text})
        return messages

    def _random(self, number: int) -> random.Random:
        return random.Random(f"{self._salt} {number}")
