"""What a client has of an answer, from all connections on which parts of it came, in a form that can be compared."""

from __future__ import annotations

import json
from typing import Any


class Repeated(Exception):
    """A client got something a second time."""


class ReceivedAnswer:
    """The content of one response, whether it was streamed or not."""

    def __init__(self) -> None:
        self.last_id = ""
        """Of the last event that arrived whole."""
        self.num_events = 0
        self.is_done = False
        """Whether a stream's end marker arrived."""
        self.error: str | None = None
        """An event that reports an error."""
        self.response_id = ""
        """Of a stream of ``/v1/responses``."""
        self._seen: set[str] = set()
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: Any = None
        self._deltas = ""

    def content(self) -> Any:
        """Everything that must be the same each time."""
        return {"choices": {index: self._choices[index] for index in sorted(self._choices)}, "usage": self._usage}

    def take_event(self, event: bytes) -> None:
        """Take one server-sent event. Raises ``Repeated`` for an event that arrived before, or out of order."""
        fields = dict(line.split(": ", 1) for line in event.decode().splitlines() if not line.startswith(":"))
        data = fields.get("data")
        if data is None:
            return
        if data == "[DONE]":
            self.is_done = True
            return
        parsed = json.loads(data)
        if "error" in parsed:
            self.error = data[:300]
            return
        if "sequence_number" in parsed:
            self._take_response_event(parsed)
        elif id := fields.get("id"):
            if id in self._seen:
                raise Repeated(f"the event {id}")
            self._seen.add(id)
            self.last_id = id
        self.num_events += 1
        self.take(parsed)

    def _take_response_event(self, event: dict[str, Any]) -> None:
        """Its sequence number is the id; the texts are the final response's, and those of the deltas."""
        number = event["sequence_number"]
        if number != int(self.last_id or -1) + 1:
            raise Repeated(f"the event {number} after the event {self.last_id or 'before the first'}")
        self.last_id = str(number)
        self._deltas += event.get("delta", "")
        if response := event.get("response"):
            self.response_id = response["id"]
            self.is_done = response["status"] not in ("queued", "in_progress")
            if self.is_done:
                self.take(response)
                self._choices[0]["deltas"] = self._deltas

    def take(self, data: dict[str, Any]) -> None:
        """Take a whole answer, or a chunk of one. Raises ``Repeated`` for a second end of a choice."""
        if data.get("object") == "list":
            self._choices[0] = {"embedding": data["data"][0]["embedding"]}
        elif data.get("object") == "response":
            self._choices[0] = {"status": data["status"], "output": [_without_id(item) for item in data["output"]]}
        for choice in data.get("choices", ()):
            self._take_choice(choice)
        if usage := data.get("usage"):
            self._usage = _counts(usage)

    def take_batch(self, lines: bytes) -> None:
        """Take the results of a batch. Raises ``Repeated`` if a line was answered twice."""
        for result in map(json.loads, lines.splitlines()):
            number = int(result["custom_id"])
            if number in self._choices:
                raise Repeated(f"the line {number} of a batch")
            body = result["response"]["body"]
            self._choices[number] = {"choices": body["choices"], "usage": _counts(body["usage"])}

    def _take_choice(self, choice: dict[str, Any]) -> None:
        kept = self._choices.setdefault(choice["index"], {"text": "", "end": None, "tools": {}, "logprobs": []})
        said = choice.get("delta") or choice.get("message") or {}
        kept["text"] += choice.get("text") or said.get("content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            tool = kept["tools"].setdefault(call.get("index", place), ["", ""])
            tool[0] += call["function"].get("name") or ""
            tool[1] += call["function"].get("arguments") or ""
        report = choice.get("logprobs") or {}
        kept["logprobs"] += report.get("token_logprobs") or [one["logprob"] for one in report.get("content") or ()]
        if choice.get("finish_reason") is not None:
            if kept["end"] is not None:
                raise Repeated(f"the end of choice {choice['index']}")
            kept["end"] = choice["finish_reason"]


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    """Without what depends on the caches."""
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
    return {name: usage[name] for name in names if name in usage}


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}
