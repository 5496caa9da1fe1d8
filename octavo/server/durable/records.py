"""What the log of durable requests contains."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.types import Output, Request


class Begin(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A request was accepted. Its choices are in the order of their indexes."""

    number: int
    """Identifies the request in the log."""
    owner: str
    """Name of the API key."""
    key: str
    body: str
    """Digest of the path and the body."""
    fingerprint: str
    unique: str
    """The random part of the response's id."""
    created: int
    """Unix time in the response."""
    requests: list[Request]
    prompt_of: list[int]
    """Index into ``prompt_texts`` of each choice."""
    prompt_texts: list[str | None]
    shown_ids: list[int]


class Tokens(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """An output that is only tokens."""

    number: int
    place: int
    """The sum of ``extent`` of the request's outputs before this one; recovery stops at a gap."""
    index: int
    tokens: list[int]


class Whole(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Any output."""

    number: int
    place: int
    index: int
    output: Output


class Forgotten(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The request failed, or was kept long enough."""

    number: int


Item = Begin | Tokens | Whole | Forgotten
Outputs = list[tuple[int, Output]]
"""Outputs with the indexes of their choices."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Item]).decode
encode_outputs = encode
decode_outputs = msgspec.msgpack.Decoder(Outputs).decode


def extent(tokens: list[int]) -> int:
    """What an output of ``tokens`` adds to the place of the next one: as much when it is joined with others."""
    return max(1, len(tokens))


def is_plain(output: Output) -> bool:
    """Whether an output is only tokens."""
    return (
        output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.error is None
        and not output.num_drafts
        and not output.num_cached_tokens
    )


def item_of(number: int, place: int, index: int, output: Output) -> Item:
    if is_plain(output):
        return Tokens(number, place, index, output.tokens)
    return Whole(number, place, index, output)


def merged(outputs: Iterable[tuple[int, Output]]) -> Outputs:
    """``outputs`` with consecutive plain ones of a choice joined."""
    result: Outputs = []
    last_of: dict[int, Output] = {}
    for index, output in outputs:
        last = last_of.get(index)
        if last is not None and is_plain(last) and is_plain(output):
            last.tokens += output.tokens
            continue
        copied = Output(output.request_id, list(output.tokens)) if is_plain(output) else output
        last_of[index] = copied
        result.append((index, copied))
    return result
