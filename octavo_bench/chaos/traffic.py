"""Requests of every kind that a server must answer in the same way whatever happens to it meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPLETIONS = "v1/completions"
CHAT = "v1/chat/completions"
RESPONSES = "v1/responses"
EMBEDDINGS = "v1/embeddings"
BATCHES = "v1/batches"
BATCH_LINES = 4
LIMITS = ("max_tokens", "max_output_tokens", "min_tokens")
ADAPTER = "lent"
"""Name of the adapter that requests may select."""
SENTENCE = "An octavo is a book made of sheets folded three times into eight leaves, small enough for a pocket. "


class RepeatableRequest(NamedTuple):
    """A request whose answer is the same each time."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_durable(self) -> bool:
        """Whether it continues after a restart of the server if it has an idempotency key."""
        return self.path in (COMPLETIONS, CHAT)

    @property
    def is_resumable(self) -> bool:
        """Whether a client gets the rest of its stream when it reconnects."""
        return self.is_streamed and (self.is_durable or bool(self.body.get("background")))


def make_requests(count: int, seed: int, has_adapter: bool, most_tokens: int | None = None) -> list[RepeatableRequest]:
    """``count`` requests, all of them different, the kinds in turn; none asks for more than ``most_tokens``."""
    rng = random.Random(seed)
    made: list[RepeatableRequest] = []
    while len(made) < count:
        made += [asked for asked in _one_of_each(len(made), rng) if has_adapter or "model" not in asked.body]
    for asked in made if most_tokens is not None else ():
        for body in (asked.body, *asked.body.get("lines", ())):
            body.update({name: min(body[name], most_tokens) for name in LIMITS if name in body})
    return made[:count]


def _book(number: int) -> dict[str, Any]:
    """A schema, another one for each number."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "pages": {"type": "integer", "maximum": number + 9},
        },
        "required": ["name", "pages"],
        "additionalProperties": False,
    }


def _with_grammar(number: int, sampled: dict[str, Any], messages: dict[str, Any]) -> Iterator[RepeatableRequest]:
    """Requests whose answers have a form, each with a grammar of its own."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "book", "schema": _book(number)}}
    forms = {"response_format": schema, "max_tokens": 100}
    function = {"name": "lend", "description": "Lend a book", "parameters": _book(number)}
    tools = {**messages, "tools": [{"type": "function", "function": function}], "max_tokens": 100}
    strict = {**tools, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
    regex, choices = f"[a-z]{{8,{number + 40}}}", [f"{number}. leaf", f"{number}. sheet", f"{number}. book"]
    yield RepeatableRequest("tools_stream", CHAT, {**tools, **streamed, "tool_choice": "required"})
    yield RepeatableRequest("tools", CHAT, {**tools, "tool_choice": "required"})
    yield RepeatableRequest("strict_tools_stream", CHAT, {**strict, **streamed})
    yield RepeatableRequest("schema", CHAT, {**messages, **forms})
    yield RepeatableRequest("schema_stream", CHAT, {**messages, **forms, **streamed})
    yield RepeatableRequest("regex", COMPLETIONS, {**sampled, "structured_outputs": {"regex": regex}, "stream": True})
    yield RepeatableRequest("whole_regex", COMPLETIONS, {**sampled, "structured_outputs": {"regex": f"{regex}!"}})
    yield RepeatableRequest(
        "choice", COMPLETIONS, {**sampled, "structured_outputs": {"choice": choices}, "stream": True}
    )


def _one_of_each(number: int, rng: random.Random) -> Iterator[RepeatableRequest]:
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(1 << 31)}
    prompt = f"{number}. {SENTENCE}"
    plain = {"prompt": prompt, "max_tokens": rng.randrange(16, 200), "ignore_eos": True, "temperature": 0}
    sampled = {**plain, **drawn, "max_tokens": rng.randrange(16, 200)}
    messages = {"messages": [{"role": "user", "content": prompt}], **drawn, "max_tokens": rng.randrange(16, 120)}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    yield RepeatableRequest("stream", COMPLETIONS, {**sampled, **streamed})
    yield RepeatableRequest(
        "long_stream", COMPLETIONS, {**sampled, "max_tokens": rng.randrange(800, 1600), "stream": True}
    )
    yield RepeatableRequest("chat_stream", CHAT, {**messages, **streamed})
    yield RepeatableRequest("whole", COMPLETIONS, {**plain, "max_tokens": rng.randrange(16, 800)})
    background = {**_response(prompt, rng), "background": True, "max_output_tokens": rng.randrange(16, 800)}
    yield RepeatableRequest("background", RESPONSES, background)
    yield RepeatableRequest("background_stream", RESPONSES, {**background, "stream": True})
    yield RepeatableRequest("choices", COMPLETIONS, {**sampled, "n": 2, "frequency_penalty": 0.5, "stream": True})
    yield RepeatableRequest("stop", COMPLETIONS, {**sampled, "stop": ["a", "ku"], "stream": True, "min_tokens": 8})
    yield RepeatableRequest("logprobs", COMPLETIONS, {**sampled, "logprobs": 2, "stream": True})
    yield RepeatableRequest("chat_logprobs", CHAT, {**messages, "logprobs": True, "top_logprobs": 1})
    yield RepeatableRequest(
        "prompt_logprobs", COMPLETIONS, {**sampled, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    )
    yield RepeatableRequest("long_prompt", COMPLETIONS, {**plain, "prompt": prompt + SENTENCE * 12, "max_tokens": 8})
    yield from _with_grammar(number, sampled, messages)
    yield RepeatableRequest("response", RESPONSES, _response(prompt, rng))
    yield RepeatableRequest("embedding", EMBEDDINGS, {"input": prompt})
    yield RepeatableRequest("adapter_stream", COMPLETIONS, {**sampled, **streamed, "model": ADAPTER})
    yield RepeatableRequest("batch", BATCHES, {"lines": [{**sampled, "seed": line} for line in range(BATCH_LINES)]})


def _response(prompt: str, rng: random.Random) -> dict[str, Any]:
    return {"input": prompt, "temperature": 0, "max_output_tokens": rng.randrange(16, 120)}
