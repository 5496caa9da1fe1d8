"""The events of a streamed response: a function of the response object and the pieces of its output.

So events need not be stored: a stream that is read again, from any event on, is rendered again from the pieces, with
the same ids and sequence numbers.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from octavo.text.message_parser import Call, CallProgress, Piece, Text
from octavo_server.dialects.responses.tools import KEYS, CallTypes, Item, call_of, written
from octavo_server.http.response import encode_line

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{2,}")
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseEvents:
    """Adds pieces to the output of a response object, and renders the events that report them."""

    def __init__(
        self,
        response: dict[str, Any],
        after: float = -1,
        take_logprobs: Callable[[int], list[dict[str, Any]]] = lambda length: [],
    ) -> None:
        """``response`` has no output yet. Events with numbers up to ``after`` are left out. ``take_logprobs`` gives the
        log-probabilities of the next text, by its length."""
        self.response = response
        self.deltas: list[int] = []
        """Length of the text in each delta so far; see ``pieces_of``."""
        self.number = 0
        """Of the next event."""
        self._after = after
        self._take_logprobs = take_logprobs
        self._call_types = CallTypes(response["tools"])
        self._is_begun = self._is_in_progress = False
        self._is_open = False
        """Whether the last output item, which is no call, is unfinished."""
        self._is_call_open = False
        """Whether the last output item is a call whose arguments are being written."""

    def begin(self) -> bytes:
        """The events before the first token; without effect if they were made."""
        if self._is_begun:
            return b""
        self._is_begun = True
        data = self._event("response.created", response=self.response)
        if self.response["status"] == "queued":
            data += self._event("response.queued", response=self.response)
        return data

    def start(self) -> bytes:
        """The event at the start of the computation, after those of ``begin``; without effect if it was made."""
        if self._is_in_progress:
            return b""
        data = self.begin()
        self._is_in_progress = True
        self.response["status"] = "in_progress"
        return data + self._event("response.in_progress", response=self.response)

    def frames(self, pieces: Iterable[Piece]) -> bytes:
        """The events of further output."""
        return self.start() + b"".join([event for piece in pieces for event in self._piece(piece)])

    def close(self, status: str) -> bytes:
        """The events that end the open output item, with ``status``, if there is one."""
        return b"".join(self._close(status))

    def last(self, response: dict[str, Any]) -> bytes:
        """The final event, with the final response.

        The API has no event for a cancelled response: its stream ends as an incomplete one's, and the status says why.
        """
        status = response["status"]
        return self.start() + self._event(
            f"response.{'incomplete' if status == 'cancelled' else status}", response=response
        )

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if not isinstance(piece, Text):
            yield from self._call(piece)
            return
        kind = "message" if piece.kind == "content" else "reasoning"
        output = self.response["output"]
        if not self._is_open or output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        item = output[-1]
        part, extra = item["content"][0], dict[str, Any]()
        part["text"] += piece.text
        self.deltas.append(len(piece.text))
        logprobs = self._take_logprobs(len(piece.text))
        if kind == "message":
            part["logprobs"] += logprobs
            extra["logprobs"] = logprobs
        yield self._event(f"response.{PART_TYPES[kind]}.delta", **self._place(), delta=piece.text, **extra)

    def _open(self, kind: str) -> Iterator[bytes]:
        """Begin an output item with one text part."""
        part: dict[str, Any] = {"type": PART_TYPES[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            item: Item = {"type": kind, "id": self._new_id("msg"), "role": "assistant", "status": "in_progress"}
        else:
            item = {"type": kind, "id": self._new_id("rs"), "summary": [], "status": "in_progress"}
        self._is_open = True
        yield self._added({**item, "content": []})
        self.response["output"][-1]["content"] = [part]
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str) -> Iterator[bytes]:
        """End the open output item."""
        if self._is_call_open:
            item = self.response["output"][-1]
            yield from self._call(call_of(item)._replace(is_cut=True))
        if not self._is_open:
            return
        self._is_open = False
        item = self.response["output"][-1]
        item["status"] = status
        part, extra = item["content"][0], dict[str, Any]()
        if item["type"] == "message":
            extra["logprobs"] = part["logprobs"]
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **extra)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._done(item)

    def _call(self, piece: Call | CallProgress) -> Iterator[bytes]:
        """Begin a call, add to its text, or end it with its ``Call``."""
        if not self._is_call_open:
            yield from self._close("completed")
            self._is_call_open = True
            opened = self._call_types.item(piece.name)
            prefix = "fc" if opened["type"] == "function_call" else "ctc"
            own = {"id": self._new_id(prefix), "call_id": self._new_id("call"), "status": "in_progress"}
            yield self._added({**opened, **own})
        item = self.response["output"][-1]
        key = KEYS[item["type"]]
        place = {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}
        event = f"response.{item['type']}_{key}"
        delta = piece.text if isinstance(piece, CallProgress) else written(item["type"], piece)[len(item[key]) :]
        if delta:
            item[key] += delta
            self.deltas.append(len(delta))
            yield self._event(f"{event}.delta", **place, delta=delta)
        if isinstance(piece, Call):
            self._is_call_open = False
            item["status"] = "incomplete" if piece.is_cut else "completed"
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._event(f"{event}.done", **place, **named, **{key: item[key]})
            yield self._done(item)

    def _new_id(self, prefix: str) -> str:
        """The id of the next output item, which follows from that of the response."""
        unique = self.response["id"].partition("_")[2]
        return f"{prefix}_{unique}{len(self.response['output']):02x}"

    def _added(self, item: Item) -> bytes:
        output = self.response["output"]
        output.append(item)
        return self._event("response.output_item.added", output_index=len(output) - 1, item=item)

    def _done(self, item: Item) -> bytes:
        index = len(self.response["output"]) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def _place(self) -> dict[str, Any]:
        output = self.response["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1, "content_index": 0}

    def _event(self, kind: str, **members: Any) -> bytes:
        number = self.number
        self.number += 1
        if number <= self._after:
            return b""
        data = encode_line({"type": kind, "sequence_number": number, **members})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def response_of(item_id: Any) -> str | None:
    """The id of the response whose output item has this id."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if found is None else f"resp_{found[1]}"


def add_output(response: dict[str, Any], pieces: Iterable[Piece], status: str) -> list[int]:
    """Make ``pieces`` the output of a response, whose last item gets ``status``; returns the lengths of the deltas."""
    response["output"] = []
    events = ResponseEvents(response, after=math.inf)
    events.frames(pieces)
    events.close(status)
    return events.deltas


def pieces_of(output: list[Item], deltas: Iterable[int]) -> Iterator[Piece]:
    """The pieces that made ``output``, whose texts came in ``deltas`` of these lengths."""
    lengths = iter(deltas)
    for item in output:
        if item["type"] in KEYS:
            call, text, place = call_of(item), item[KEYS[item["type"]]], 0
            while place < len(text):
                end = place + next(lengths, len(text))
                if item["type"] == "function_call":
                    yield CallProgress(call.name, text[place:end])
                place = end
            yield call
            continue
        text, place = item["content"][0]["text"], 0
        while place < len(text):
            end = place + next(lengths, len(text))
            yield Text("content" if item["type"] == "message" else "reasoning", text[place:end])
            place = end
