"""Durable requests: those with an idempotency key are recorded with their tokens, and outlive connection and server.

A durable request is computed whether or not a client is connected. Any number of connections read it, each from the
position where its client is; see ``reader``. After a restart with the same journal, unfinished ones are resubmitted to
the engine as prompt + output so far, as after the death of an engine process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from octavo.errors import RequestError, RequestFailed, Unavailable
from octavo.server.admission import ClientRequest
from octavo.server.durable.reader import Reader
from octavo.server.durable.records import (
    Begin,
    Item,
    Outputs,
    Tokens,
    Whole,
    decode_outputs,
    encode,
    encode_outputs,
    extent,
    item_of,
    merged,
)
from octavo.server.engine_client import EngineClient
from octavo.server.generation import Choice, Generation, Prompt
from octavo.server.quotas import Account
from octavo.text.text_stream import TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output


class Owner(Protocol):
    """The journal, as its requests see it."""

    engine: EngineClient
    tokenizer: Tokenizer | None

    def note(self, item: Item) -> None: ...
    def ended(self, request: DurableRequest) -> None: ...
    def failed(self, request: DurableRequest) -> None: ...


class DurableRequest:
    """One request with all its output; the listener of its choices in the engine."""

    def __init__(self, owner: Owner, begin: Begin, account: Account | None = None) -> None:
        self.begin = begin
        self.size = 0
        """Bytes of the output, once ended."""
        self._owner = owner
        self._account = account
        self._outputs: Outputs = []
        self._place = 0
        """Of the next output in the log."""
        self._open: dict[int, Output] = {}
        """While the log is read: each choice's last output, if tokens can be added to it."""
        self._packed: bytes | None = None
        """The output, once ended."""
        self._index_of = {request.id: index for index, request in enumerate(begin.requests)}
        self._unfinished = set(range(len(begin.requests)))
        self._engine_ids: dict[int, int] = {}
        self._readers: list[Reader] = []
        self._error: RequestError | None = None
        prompts = [Prompt([], text) for text in begin.prompt_texts]
        for request, place in zip(begin.requests, begin.prompt_of, strict=True):
            prompts[place] = Prompt(request.prompt_tokens, begin.prompt_texts[place])
        self._prompts = [prompts[place] for place in begin.prompt_of]

    @property
    def is_ended(self) -> bool:
        return self._packed is not None

    def submit(self) -> None:
        """Let the engine compute what is missing. Raises ``RequestError``."""
        if any(request.params.stop for request in self.begin.requests):
            self.new_reader().begin(None)  # finds stop strings while no client is connected
        self._end_if_finished()
        engine = self._owner.engine
        try:
            for index in sorted(self._unfinished):
                tokens = [token for at, output in self._outputs if at == index for token in output.tokens]
                id, now = engine.next_id(), time.monotonic()
                request = self.begin.requests[index]
                self._engine_ids[index] = id
                engine.timelines.own(id, self.begin.owner)
                engine.add(
                    msgspec.structs.replace(request, id=id, output_tokens=tokens, arrival=now), _Listener(self, index)
                )
        except BaseException:
            self._abort_all()
            raise

    # --- the engine's outputs ---

    def restore_tokens(self, item: Tokens) -> None:
        """Take recorded tokens, unless an output before them is missing."""
        if item.place != self._place:
            return
        self._place += extent(item.tokens)
        last = self._open.get(item.index)
        if last is not None:
            last.tokens += item.tokens
        else:
            self._open[item.index] = output = Output(0, item.tokens)
            self._outputs.append((item.index, output))

    def restore(self, item: Whole) -> None:
        """Take a recorded output, unless one before it is missing."""
        if item.place != self._place or item.index not in self._unfinished:
            return
        self._place += extent(item.output.tokens)
        self._open.pop(item.index, None)
        self._outputs.append((item.index, item.output))
        if item.output.finish_reason is not None:
            self._unfinished.discard(item.index)

    def on_output(self, index: int, output: Output) -> None:
        if index not in self._unfinished:
            return
        if output.finish_reason in ("error", "abort"):
            self.on_error(RequestFailed("The engine could not finish this request; other requests are not affected."))
            return
        self._owner.note(item_of(self.begin.number, self._place, index, output))
        self._place += extent(output.tokens)
        self._outputs.append((index, output))
        if output.finish_reason is not None:
            self._unfinished.discard(index)
        for reader in list(self._readers):
            reader.on_output(index, output)
        self._end_if_finished()

    def on_error(self, error: RequestError) -> None:
        """The engine failed a choice; one that it only could not finish now continues after a restart."""
        if not self._unfinished:
            return
        self._abort_all()
        self._unfinished.clear()
        self._error = error
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.on_error(error)
        if not isinstance(error, Unavailable):
            self._owner.failed(self)

    def stop(self, request_id: int) -> None:
        """The text of a choice ended with a stop string."""
        index = self._index_of[request_id]
        if index in self._unfinished:
            self._unfinished.discard(index)
            if index in self._engine_ids:
                self._owner.engine.abort(self._engine_ids[index], "stop")

    def cancel(self) -> None:
        """End without a result."""
        self.on_error(RequestFailed("The request was cancelled."))

    def _abort_all(self) -> None:
        for index in self._unfinished & self._engine_ids.keys():
            self._owner.engine.abort(self._engine_ids[index])

    def _end_if_finished(self) -> None:
        if self._unfinished or self.is_ended or self._error is not None:
            return
        if self._account is not None:
            self._account.charge(sum(len(output.tokens) for _, output in self._outputs))
        self._packed = encode_outputs(merged(self._outputs))
        self.size = len(self._packed)
        self._outputs, self._readers = [], []
        self._owner.ended(self)

    # --- readers ---

    def new_reader(self) -> Reader:
        """A reader with a generation of its own, for ``Reader.begin``."""
        generation = Generation(self._owner.engine)
        begin = self.begin
        for index, request in enumerate(begin.requests):
            text_stream = TextStream(self._owner.tokenizer, request.params, frozenset(begin.shown_ids))
            generation.add(Choice(generation, index, self._prompts[index], request, text_stream))
        generation.reader = generation.engine = reader = Reader(self, begin, generation)
        return reader

    def add_reader(self, reader: Reader) -> None:
        """Give a reader all output so far, and what follows."""
        outputs = merged(self._outputs) if self._packed is None else decode_outputs(self._packed)
        if self._packed is None:
            self._readers.append(reader)
        for index, output in outputs:
            reader.on_output(index, output)
        if self._error is not None:
            reader.on_error(self._error)

    def remove_reader(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)

    # --- the journal ---

    def snapshot(self) -> Callable[[], bytes]:
        """A function that makes the record of all that is known, for a thread."""
        if self._packed is None:
            self._outputs = merged(self._outputs)
        begin, packed, outputs = self.begin, self._packed, list(self._outputs)
        return partial(_encode_whole, begin, packed, outputs)


class _Listener:
    """Passes one choice's outputs on."""

    __slots__ = ("_index", "_request")

    def __init__(self, request: DurableRequest, index: int) -> None:
        self._request = request
        self._index = index

    def on_output(self, output: Output) -> None:
        self._request.on_output(self._index, output)

    def on_error(self, error: RequestError) -> None:
        self._request.on_error(error)


def _encode_whole(begin: Begin, packed: bytes | None, outputs: Outputs) -> bytes:
    if packed is not None:
        outputs = decode_outputs(packed)
    items: list[Item] = []
    place = 0
    for index, output in outputs:
        items.append(item_of(begin.number, place, index, output))
        place += extent(output.tokens)
    return encode([begin, *items])


def begin_of(
    number: int, owner: str, key: str, body: str, fingerprint: str, generation: Generation, request: ClientRequest
) -> Begin:
    """The record of a request whose choices were made and not yet submitted."""
    places: dict[int, int] = {}
    texts: list[str | None] = []
    for choice in generation.choices:
        if places.setdefault(id(choice.prompt), len(texts)) == len(texts):
            texts.append(choice.prompt.text)
    return Begin(
        number=number,
        owner=owner,
        key=key,
        body=body,
        fingerprint=fingerprint,
        unique=uuid.uuid4().hex,
        created=int(time.time()),
        requests=[choice.request for choice in generation.choices],
        prompt_of=[places[id(choice.prompt)] for choice in generation.choices],
        prompt_texts=texts,
        shown_ids=sorted(request.shown_ids),
    )
