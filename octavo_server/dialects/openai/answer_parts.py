"""Common parts of responses: identity, usage, chunks with pre-rendered constant parts, and log-probabilities in three
formats: chat completions, completions, and vLLM's for prompts."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.text.tokenizer import Tokenizer
from octavo.types import TokenLogprobs
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.response import encode

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def finite(logprob: float) -> float:
    """``logprob``, or ``LOWEST`` if it is lower or NaN."""
    return logprob if logprob > LOWEST else LOWEST


class TokenNames:
    """Renders tokens as text, or as ``token_id:7`` on request or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self.tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)

    def bytes(self, token: int) -> bytes:
        """The token's bytes, which may be incomplete UTF-8."""
        return b"" if self._bytes_of is None else self._bytes_of.token_bytes(token)


def ranked(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The most likely tokens, best first; the sampled token's entry has its own log-probability."""
    return [
        (token, entry.logprob if token == entry.token_id else logprob)
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]


# --- chat ---


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_entry(token, logprob, names) for token, logprob in ranked(entry)[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": finite(logprob), "bytes": list(names.bytes(token))}


# --- completions ---


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion, incrementally: ``text_offset`` counts from the start of the text."""

    def __init__(self, names: TokenNames, hidden: frozenset[int], num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._hidden = hidden
        """Special tokens that the text omits."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def render(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """Render the next (token, entry) pairs; the first token of an echoed prompt has no entry."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in entries:
            lists["tokens"].append(self._names.name(token))
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(self._offset)
            if token not in self._hidden:
                self._offset += len(self._decoder.decode(self._names.bytes(token)))
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Token to log-probability, including the sampled token. Tokens of equal text are shown by id."""
        top = {self._names.name(entry.token_id): finite(entry.logprob)}
        for token, logprob in ranked(entry)[: self._num_top]:
            if token != entry.token_id:
                name = self._names.name(token)
                top[f"token_id:{token}" if name in top else name] = finite(logprob)
        return top


# --- prompts, in vLLM's form ---


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], names: TokenNames, num_top: int
) -> list[dict[str, Any] | None]:
    """One entry per prompt token: id to log-probability, rank and text. The first token has none."""
    return [None if entry is None else _prompt_entry(entry, names, num_top) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, names: TokenNames, num_top: int) -> dict[str, Any]:
    ranks = [(entry.token_id, entry.logprob, entry.rank)]
    ranks += [(token, logprob, rank) for rank, (token, logprob) in enumerate(ranked(entry)[:num_top], 1)]
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token)}
        for token, logprob, rank in ranks
    }


def identity_of(generation: Generation, prefix: str, kind: str, model: str) -> ReplyIdentity:
    """A new identity, or that of a durable request."""
    reader = generation.reader
    return (
        ReplyIdentity(prefix, kind, model)
        if reader is None
        else ReplyIdentity(prefix, kind, model, reader.unique, reader.created)
    )


@dataclass(frozen=True)
class ReplyIdentity:
    """The fields that every chunk of a response repeats."""

    prefix: str
    kind: str
    model: str
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The random part of ``id``."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{self.unique}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}


def usage(choices: Sequence[GeneratedChoice]) -> dict[str, Any]:
    """Token counts; a prompt with several choices counts once. Drafts of speculative decoding are predictions."""
    firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(len(choice.prompt.tokens) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    details = {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)}
    if num_drafts := sum(choice.num_drafts for choice in choices):
        num_accepted = sum(choice.num_accepted_drafts for choice in choices)
        details |= {"accepted_prediction_tokens": num_accepted, "rejected_prediction_tokens": num_drafts - num_accepted}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
        "completion_tokens_details": details,
    }


class ChunkFrame:
    """The constant part of a chunk around its single choice, rendered once per stream."""

    def __init__(
        self,
        identity: ReplyIdentity,
        choices: Sequence[GeneratedChoice],
        includes_usage: bool,
        has_continuous_usage: bool,
    ) -> None:
        head = encode(identity.as_dict())[:-1]
        self.start = b"data: " + head + b',"choices":[{'
        self._end = b'}],"usage":null}\n\n' if includes_usage else b"}]}\n\n"
        self._usage_start = b"data: " + head + b',"choices":[],"usage":'
        self._choices = choices
        self._includes_usage = includes_usage
        self._has_continuous_usage = has_continuous_usage

    def end(self) -> bytes:
        """The end of a chunk; with continuous usage it contains the counts so far."""
        if self._has_continuous_usage:
            return b'}],"usage":' + encode(usage(self._choices)) + b"}\n\n"
        return self._end

    def usage_chunk(self) -> bytes:
        """The final usage chunk if requested, else empty."""
        return self._usage_start + encode(usage(self._choices)) + b"}\n\n" if self._includes_usage else b""
