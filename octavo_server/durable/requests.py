"""Durable requests: those with an idempotency key are recorded with their tokens, and outlive connection and server.

A durable request is computed whether or not a client is connected. Any number of connections read it, each from the
position where its client is; see ``reader``. After a restart with the same journal, unfinished ones are resubmitted to
the engine as prompt + output so far, as after the death of an engine process.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from octavo.errors import RequestError, RequestFailed, Unavailable
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output
from octavo_server.admission import ClientRequest
from octavo_server.durable.reader import DurableReader
from octavo_server.durable.records import (
    UNREADABLE,
    Begin,
    Ended,
    NewWeights,
    Note,
    Noted,
    Outputs,
    RequestHead,
    encode_ended,
    encode_request,
    extent,
    is_plain,
    merged,
    pack,
    unpack,
)
from octavo_server.durable.recovery import Restored
from octavo_server.durable.synced_log import Damage
from octavo_server.engines.engine_client import EngineClient
from octavo_server.engines.lora_adapters import adapter_name
from octavo_server.generation import Generation, Prompt
from octavo_server.tenants.api_keys import Account

MAX_TOKEN_BYTES = 5
"""Of a token in a record of a whole request."""


class RequestOwner(Protocol):
    """The journal, as its requests see it."""

    engine: EngineClient
    tokenizer: Tokenizer | None

    def note(self, note: Note) -> None: ...
    def note_tokens(self, number: int, place: int, index: int, tokens: list[int]) -> None: ...
    def ended(self, request: DurableRequest) -> None: ...
    def failed(self, request: DurableRequest) -> None: ...


class _Live:
    """What is kept of a request until it has ended."""

    __slots__ = (
        "_open",
        "begin",
        "engine_ids",
        "first_reader",
        "first_weights",
        "outputs",
        "place",
        "readers",
        "unfinished",
        "weights",
    )

    def __init__(self, begin: Begin, head: RequestHead) -> None:
        self.begin = begin
        self.first_weights = head.weights
        self.outputs: Outputs = []
        """So far; consecutive plain ones of a choice are joined, as so many objects would keep the collector busy."""
        self._open: dict[int, Output] = {}
        """Each choice's last output, if tokens can be added to it."""
        self.place = 0
        """Of the next output in the log."""
        self.unfinished = set(range(head.num_choices))
        self.engine_ids: dict[int, int] = {}
        self.readers: list[DurableReader] = []
        self.first_reader: DurableReader | None = None
        """Until it begins, as it does once the request is on disk."""
        self.weights: dict[int, str] = {}
        """The version with which a choice goes on, where it has changed."""

    def add_tokens(self, index: int, tokens: list[int]) -> None:
        """Take a plain output of some tokens."""
        if (output := self._open.get(index)) is not None:
            output.tokens += tokens
        else:
            self._open[index] = output = Output(0, tokens.copy())
            self.outputs.append((index, output))
        self.place += len(tokens)

    def add(self, index: int, output: Output) -> None:
        """Take any other output."""
        self._open.pop(index, None)
        self.outputs.append((index, output))
        self.place += extent(output.tokens)

    def tell_weights(self, reader: DurableReader) -> None:
        """Tell of the weights with which choices go on, or have ended."""
        for choice in reader.generation.choices:
            if choice.index in self.weights:
                choice.on_weights(self.weights[choice.index])

    def leave(self, reader: DurableReader) -> None:
        """Forget a reader, if it is known."""
        if reader is self.first_reader:
            self.first_reader = None
        if reader in self.readers:
            self.readers.remove(reader)


class DurableRequest:
    """One request with all its output; the listener of its choices in the engine.

    Ended ones are many, so little is left of them: ``octavo_server.durable.journal.REQUEST_BYTES``.
    """

    __slots__ = ("_account", "_ended", "_error", "_live", "_owner", "forget_at", "head")

    def __init__(
        self, owner: RequestOwner, head: RequestHead, content: Begin | Ended, account: Account | None = None
    ) -> None:
        self.head = head
        self.forget_at = 0.0
        """Time of the event loop at which an ended request is forgotten."""
        self._owner = owner
        self._account = account
        self._live = _Live(content, head) if isinstance(content, Begin) else None
        self._ended = content if isinstance(content, Ended) else None
        """Once ended, what it computed and its output, instead of ``_live``."""
        self._error: RequestError | None = None

    @classmethod
    def restored(cls, owner: RequestOwner, found: Restored, damage: Damage) -> DurableRequest:
        """A request of the log; raises ``UNREADABLE`` if its content cannot be read."""
        if found.is_ended:
            return cls(owner, found.head, found.packed())
        begin, outputs = found.content(damage)
        request = cls(owner, found.head, begin)
        assert request._live is not None
        request._live.outputs = outputs
        request._live.place = sum(extent(output.tokens) for _, output in outputs)
        request._live.unfinished = found.unfinished
        return request

    @property
    def is_ended(self) -> bool:
        return self._ended is not None

    @property
    def ended_at(self) -> float:
        """Unix time of its end; infinite if it has not ended."""
        return math.inf if self._ended is None else self._ended.at

    @property
    def size(self) -> int:
        """Bytes that it takes in a new log file; at most about so many, until it has ended."""
        if self._live is None:
            assert self._ended is not None
            return self._ended.size
        prompts = sum(len(request.prompt_tokens) for request in self._live.begin.requests)
        return MAX_TOKEN_BYTES * (prompts + self._live.place)

    def submit(self) -> bool:
        """Let the engine compute what is missing, if it has the weights for that; return whether it has, or nothing
        is missing. Raises ``RequestError``."""
        live = self._live
        if live is None:  # an earlier process ended it
            self._owner.ended(self)
            return True
        if any(request.params.stop for request in live.begin.requests):
            self.new_reader().begin(None)  # finds stop strings while no client is connected
        self._end_if_finished()
        engine = self._owner.engine
        if live.unfinished and self.head.weights != engine.weight_version:
            return False
        try:
            for index in sorted(live.unfinished):
                tokens = [token for at, output in live.outputs if at == index for token in output.tokens]
                id, now = engine.next_id(), time.monotonic()
                request = live.begin.requests[index]
                live.engine_ids[index] = id
                engine.timelines.own(id, self.head.owner)
                adapter = engine.adapters.alias(adapter_name(request.adapter))  # another one, if it is of the settings
                changes = {"id": id, "output_tokens": tokens, "arrival": now, "owner": self.head.owner}
                again = msgspec.structs.replace(request, adapter=adapter, **changes)
                engine.add(again, _Listener(self, index))
        except BaseException:
            self._abort_all(live)
            raise
        return True

    # --- the engine's outputs ---

    def on_output(self, index: int, output: Output) -> None:
        live = self._live
        if live is None or index not in live.unfinished:
            return
        if output.finish_reason in ("error", "abort"):
            self.on_error(RequestFailed("The engine could not finish this request; other requests are not affected."))
            return
        tokens, number = output.tokens, self.head.number
        if tokens and is_plain(output):
            self._owner.note_tokens(number, live.place, index, tokens)
            live.add_tokens(index, tokens)
        else:
            self._owner.note(Noted(number, live.place, index, output))
            live.add(index, output)
            if output.finish_reason is not None:
                live.unfinished.discard(index)
                self._note_weights()
        for reader in list(live.readers):
            reader.on_output(index, output)
        if not live.unfinished:
            self._end_if_finished()

    def on_error(self, error: RequestError) -> None:
        """The engine failed a choice; one that it only could not finish now continues after a restart."""
        live = self._live
        if live is None or not live.unfinished:
            return
        self._abort_all(live)
        live.unfinished.clear()
        self._error = error
        readers, live.readers = live.readers, []
        for reader in readers:
            reader.on_error(error)
        if not isinstance(error, Unavailable):
            self._owner.failed(self)

    def stop(self, request_id: int) -> None:
        """The text of a choice ended with a stop string."""
        live = self._live
        if live is None:
            return
        requests = live.begin.requests
        index = next((index for index, request in enumerate(requests) if request.id == request_id), None)
        if index in live.unfinished:
            live.unfinished.discard(index)
            self._note_weights()
            if index in live.engine_ids:
                self._owner.engine.abort(live.engine_ids[index], "stop")

    def cancel(self) -> None:
        """End without a result."""
        self.on_error(RequestFailed("The request was cancelled."))

    def _abort_all(self, live: _Live) -> None:
        for index in live.unfinished & live.engine_ids.keys():
            self._owner.engine.abort(live.engine_ids[index])

    def _end_if_finished(self) -> None:
        live = self._live
        if live is None or live.unfinished or self._error is not None:
            return
        if self._account is not None:
            self._account.charge(sum(len(output.tokens) for _, output in live.outputs))
        self._ended = pack(self.head, live.begin, merged(live.outputs))
        if live.first_reader is not None:
            live.tell_weights(live.first_reader)
        self._live = None
        self._owner.ended(self)

    def on_weights(self, index: int, version: str) -> None:
        """Later tokens of a choice are computed with these weights, as those learn who read it now."""
        live = self._live
        if live is not None:
            live.weights[index] = version
            asyncio.get_running_loop().call_soon(self._note_weights)  # once all choices have learned of an update
            for reader in live.readers:
                reader.generation.choices[index].on_weights(version)

    def _note_weights(self) -> None:
        """Record the version with which all unfinished choices go on, "" if they have several."""
        live = self._live
        versions = set() if live is None else {live.weights.get(each, live.first_weights) for each in live.unfinished}
        version_of_all = versions.pop() if len(versions) == 1 else "" if versions else self.head.weights
        if version_of_all != self.head.weights:
            self.head = msgspec.structs.replace(self.head, weights=version_of_all)
            self._owner.note(NewWeights(self.head.number, version_of_all))

    # --- readers ---

    def first_reader(self, generation: Generation) -> DurableReader:
        """A reader with the generation that the request was made of; see ``new_reader``."""
        assert self._live is not None
        generation.account = None  # ``_end_if_finished`` charges it
        generation.reader = generation.engine = reader = DurableReader(self, self._live.begin, generation)
        self._live.first_reader = reader
        return reader

    def new_reader(self) -> DurableReader:
        """A reader with a generation of its own, for ``DurableReader.begin``. Raises ``RequestError``."""
        generation = Generation(self._owner.engine, weight_version="")  # of first tokens it is not recorded
        begin, _ = self._content()
        prompts = [Prompt([], text) for text in begin.prompt_texts]
        for request, place in zip(begin.requests, begin.prompt_of, strict=True):
            prompts[place] = Prompt(request.prompt_tokens, begin.prompt_texts[place])
        for request, place in zip(begin.requests, begin.prompt_of, strict=True):
            shown, marks = frozenset(begin.shown_ids), begin.answer_marks
            generation.add(prompts[place], request, self._owner.tokenizer, shown, marks)
        generation.reader = generation.engine = reader = DurableReader(self, begin, generation)
        return reader

    def add_reader(self, reader: DurableReader) -> None:
        """Give a reader all output so far, and what follows."""
        _, outputs = self._content()
        if self._live is not None:
            self._live.leave(reader)
            self._live.readers.append(reader)
        for index, output in outputs:
            reader.on_output(index, output)
        if self._live is not None:
            self._live.tell_weights(reader)
        if self._error is not None:
            reader.on_error(self._error)

    def remove_reader(self, reader: DurableReader) -> None:
        if self._live is not None:
            self._live.leave(reader)

    def _content(self) -> tuple[Begin, Outputs]:
        """What it computes, and its output so far. Raises ``RequestFailed`` if the log had something else."""
        if self._live is not None:
            return self._live.begin, merged(self._live.outputs)
        assert self._ended is not None
        try:
            return unpack(self._ended)
        except UNREADABLE as error:
            raise RequestFailed("The recorded answer of this request cannot be read.") from error

    # --- the journal ---

    def snapshot(self) -> Callable[[], bytes]:
        """A function that makes the record of all that is known, for a thread."""
        live = self._live
        if live is None:
            assert self._ended is not None
            return partial(encode_ended, self._ended)
        return partial(encode_request, self.head, live.begin, merged(live.outputs))


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

    def on_weights(self, version: str) -> None:
        self._request.on_weights(self._index, version)


def head_of(number: int, owner: str, key: str, body: str, fingerprint: str, generation: Generation) -> RequestHead:
    """What identifies a request whose choices were made and not yet submitted."""
    first = generation.choices[0].request
    return RequestHead(
        number,
        owner,
        key,
        body,
        fingerprint,
        adapter=first.adapter,
        cache_salt=first.cache_salt,
        num_choices=len(generation.choices),
        weights=generation.weight_version,
    )


def begin_of(generation: Generation, request: ClientRequest) -> Begin:
    """What a request computes whose choices were made and not yet submitted."""
    places: dict[int, int] = {}
    texts: list[str | None] = []
    for choice in generation.choices:
        if places.setdefault(id(choice.prompt), len(texts)) == len(texts):
            texts.append(choice.prompt.text)
    return Begin(
        unique=uuid.uuid4().hex,
        created=int(time.time()),
        requests=[choice.request for choice in generation.choices],
        prompt_of=[places[id(choice.prompt)] for choice in generation.choices],
        prompt_texts=texts,
        shown_ids=sorted(request.shown_ids),
        answer_marks=request.answer_marks,
    )
