"""What the log of durable requests contains.

Recovery reads many records and needs the content of few: what it does not look into is encoded once more, as bytes,
and tokens, which are most of the log, are rows of five numbers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import msgspec

from octavo.text.reasoning import AnswerMarks
from octavo.types import Output, Request
from octavo_server.engines.engine_client import FIRST_WEIGHTS

ROW_BYTES = 20
_MAX_UINT32 = 2**32 - 1


class RequestHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is needed of a request to find it, and to know whether it can be continued."""

    number: int
    """Identifies the request in the log."""
    owner: str
    """Name of the API key."""
    key: str
    body: str
    """Digest of the path and the body."""
    fingerprint: str
    adapter: str
    """Alias in the engine of the LoRA adapter of all choices."""
    cache_salt: str
    num_choices: int
    weights: str = FIRST_WEIGHTS
    """Version of the weights with which its unfinished choices go on; "" if they have several."""


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """What is needed of a request to compute it. Its choices are in the order of their indexes."""

    unique: str
    """The random part of the response's id."""
    created: int
    """Unix time in the response."""
    requests: list[Request]
    prompt_of: list[int]
    """Index into ``prompt_texts`` of each choice."""
    prompt_texts: list[str | None]
    shown_ids: list[int]
    answer_marks: AnswerMarks | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError``, which makes a record that is read unreadable."""
        is_whole = bool(self.requests) and len(self.requests) == len(self.prompt_of)
        if not is_whole or not all(0 <= place < len(self.prompt_texts) for place in self.prompt_of):
            raise ValueError("choices and prompts do not belong together")


class _OfRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    head: RequestHead
    begin: bytes
    """A ``Begin``, encoded."""

    @property
    def number(self) -> int:
        return self.head.number


class Begun(_OfRequest, tag=5, frozen=True, gc=False):
    """A request was accepted."""


class Ended(_OfRequest, tag=8, frozen=True, gc=False):
    """A request that has ended, with all its output."""

    outputs: bytes
    """``Outputs``, encoded."""
    at: float = 0.0
    """Unix time of the end or, if a server found the end in its journal, of that."""

    @property
    def size(self) -> int:
        """Bytes that it takes in the log, less some hundred."""
        return len(self.begin) + len(self.outputs)


class Whole(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """Any output of a choice."""

    number: int
    place: int
    """The sum of ``extent`` of the request's outputs before this one; recovery stops at a gap."""
    index: int
    extent: int
    is_last: bool
    output: bytes
    """An ``Output``, encoded."""


class TokenRows(msgspec.Struct, array_like=True, tag=7, frozen=True, gc=False):
    """Outputs that are only tokens, of any requests: five uint32 for a token, in the byte order of the machine.

    They are the request's number, as its lower and its upper half, place, index and token. A row is an output of one
    token.
    """

    rows: bytes

    def __post_init__(self) -> None:
        """Raises ``ValueError``, which makes a record that is read unreadable."""
        if len(self.rows) % ROW_BYTES:
            raise ValueError("a row is incomplete")


class Forgotten(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The request failed, or was kept long enough."""

    number: int


class NewWeights(msgspec.Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The request goes on with other weights: ``RequestHead.weights`` from now on."""

    number: int
    version: str


class Noted(msgspec.Struct, frozen=True, gc=False):
    """An output to record; the fields are those of ``Whole``."""

    number: int
    place: int
    index: int
    output: Output


Item = Begun | Ended | Whole | TokenRows | Forgotten | NewWeights
Note = tuple[RequestHead, Begin] | Noted | Forgotten | NewWeights
"""What is recorded, before it is encoded."""
Outputs = list[tuple[int, Output]]
"""Outputs with the indexes of their choices."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of all functions here that decode."""

_encode = msgspec.msgpack.Encoder().encode
_decode_begin = msgspec.msgpack.Decoder(Begin).decode
_decode_output = msgspec.msgpack.Decoder(Output).decode
_decode_outputs = msgspec.msgpack.Decoder(Outputs).decode
decode = msgspec.msgpack.Decoder(list[Item]).decode


class RecordBatch:
    """What is noted until it becomes one record; the notes of a request are in their order."""

    __slots__ = ("_notes", "_rows")

    def __init__(self) -> None:
        self._notes: list[Note | array[int]] = []
        self._rows: array[int] | None = None
        """The last of ``_notes``, if it is tokens: the numbers of ``TokenRows``."""

    def add(self, note: Note) -> None:
        if isinstance(note, Noted) and note.output.tokens and is_plain(note.output):
            self.add_tokens(note.number, note.place, note.index, note.output.tokens)
        else:
            self._notes.append(note)
            self._rows = None

    def add_tokens(self, number: int, place: int, index: int, tokens: list[int]) -> None:
        """Add a plain output of some tokens, which makes no object that stays: this is done for each token."""
        rows = self._rows
        if rows is None:
            rows = self._rows = array("I")
            self._notes.append(rows)
        low, high = number & _MAX_UINT32, number >> 32
        for each in tokens:
            rows.extend((low, high, place, index, each))
            place += 1

    def encode(self) -> bytes:
        """The record, once nothing is added any more; for any thread."""
        return _encode(
            [TokenRows(note.tobytes()) if isinstance(note, array) else _item_of(note) for note in self._notes]
        )


def encode(notes: Iterable[Note]) -> bytes:
    """One record of all ``notes``."""
    batch = RecordBatch()
    for note in notes:
        batch.add(note)
    return batch.encode()


def encode_request(head: RequestHead, begin: Begin, outputs: Outputs) -> bytes:
    """One record of a request that has not ended, with its output so far."""
    items: list[Item] = [_item_of((head, begin))]
    place = 0
    for index, output in outputs:
        items.append(_whole(head.number, place, index, output))
        place += extent(output.tokens)
    return _encode(items)


def pack(head: RequestHead, begin: Begin | bytes, outputs: Iterable[tuple[int, Output | bytes]]) -> Ended:
    """A request that has ended now, of parts that may be encoded already."""
    joined = [(index, msgspec.Raw(part) if isinstance(part, bytes) else part) for index, part in outputs]
    return Ended(head, begin if isinstance(begin, bytes) else _encode(begin), _encode(joined), time.time())


def unpack(ended: Ended) -> tuple[Begin, Outputs]:
    """What was packed. Raises ``UNREADABLE``."""
    return decode_begin(ended.head, ended.begin), _decode_outputs(ended.outputs)


def encode_ended(ended: Ended) -> bytes:
    """The record of a request that has ended."""
    return _encode([ended])


def decode_begin(head: RequestHead, content: bytes) -> Begin:
    """Raises ``UNREADABLE``, also if the content is of another request."""
    begin = _decode_begin(content)
    if len(begin.requests) != head.num_choices:
        raise msgspec.ValidationError("head and content do not belong together")
    return begin


def decode_output(item: Whole) -> Output:
    """Raises ``UNREADABLE``, also if the output is another one than the item says."""
    output = _decode_output(item.output)
    if extent(output.tokens) != item.extent or (output.finish_reason is not None) != item.is_last:
        raise msgspec.ValidationError("an output is not what its record says")
    return output


def _item_of(note: Note) -> Item:
    if isinstance(note, Forgotten | NewWeights):
        return note
    if isinstance(note, Noted):
        return _whole(note.number, note.place, note.index, note.output)
    head, begin = note
    return Begun(head, _encode(begin))


def _whole(number: int, place: int, index: int, output: Output) -> Whole:
    is_last = output.finish_reason is not None
    return Whole(number, place, index, extent(output.tokens), is_last, _encode(output))


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
