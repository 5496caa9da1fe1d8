"""Common parts of responses: identity, usage, and chunks with pre-rendered constant parts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo_server.generation import Choice, Generation
from octavo_server.http.sse import encode


def identity_of(generation: Generation, prefix: str, kind: str, model: str) -> Identity:
    """A new identity, or that of a durable request."""
    reader = generation.reader
    return (
        Identity(prefix, kind, model)
        if reader is None
        else Identity(prefix, kind, model, reader.unique, reader.created)
    )


@dataclass(frozen=True)
class Identity:
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


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
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
        self, identity: Identity, choices: Sequence[Choice], includes_usage: bool, has_continuous_usage: bool
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
