"""Reads a log of durable requests.

Nearly all of a log is rows of tokens, of many requests in turn. They are collected, then sorted by request at once,
so that little is done for a single token; contents of other items are only decoded for requests that go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from octavo.types import Output
from octavo_server.durable.records import (
    ROW_BYTES,
    UNREADABLE,
    Begin,
    Begun,
    Ended,
    Forgotten,
    NewWeights,
    Outputs,
    RequestHead,
    TokenRows,
    Whole,
    decode,
    decode_begin,
    decode_output,
    pack,
)
from octavo_server.durable.synced_log import Damage, LogFile

BLOCK_BYTES = 2 << 20
"""So many bytes of rows are sorted at once. More are hardly faster, and leave memory in pieces that stays taken."""
NUMBER_LOW, NUMBER_HIGH, PLACE, INDEX, TOKEN = range(5)
"""Columns of rows."""

logger = logging.getLogger("octavo.server")

Other = Begun | Ended | Whole | Forgotten | NewWeights
Array = np.ndarray[Any, np.dtype[np.uint32]]


class Restored:
    """A request, as far as the log has it."""

    __slots__ = ("_begin", "_ended", "_open", "_parts", "_place", "head", "unfinished")

    def __init__(self, first: Begun | Ended) -> None:
        self.head: RequestHead = first.head
        self._ended = first if isinstance(first, Ended) else None
        self.unfinished = set() if self._ended is not None else set(range(first.head.num_choices))
        self._begin = first.begin
        self._parts: list[Whole | tuple[int, list[Array]]] = []
        """Outputs in order; tokens with the index of their choice."""
        self._open: dict[int, list[Array]] = {}
        """Each choice's last part, if tokens can be added to it."""
        self._place = 0
        """Of the next output."""

    @property
    def is_ended(self) -> bool:
        return not self.unfinished

    def take_output(self, item: Whole) -> None:
        """Take an output, unless one before it is missing."""
        if item.place != self._place or item.index not in self.unfinished:
            return
        self._place += item.extent
        self._open.pop(item.index, None)
        self._parts.append(item)
        if item.is_last:
            self.unfinished.discard(item.index)

    def take_rows(self, rows: Array) -> None:
        """Take tokens ``[N, 5]`` up to the first before which an output is missing."""
        if not np.array_equal(rows[:, PLACE], np.arange(self._place, self._place + len(rows))):
            self._take_one_by_one(rows)
            return
        indexes = set(np.unique(rows[:, INDEX]).tolist())
        if not indexes <= self.unfinished:
            self._take_one_by_one(rows)
            return
        self._place += len(rows)
        for index in indexes:
            self._add(index, rows[rows[:, INDEX] == index, TOKEN])

    def _take_one_by_one(self, rows: Array) -> None:
        for row in rows:
            if row[PLACE] == self._place and row[INDEX] in self.unfinished:
                self._place += 1
                self._add(int(row[INDEX]), row[TOKEN:].copy())

    def _add(self, index: int, tokens: Array) -> None:
        if index not in self._open:
            self._open[index] = []
            self._parts.append((index, self._open[index]))
        self._open[index].append(tokens)

    def packed(self) -> Ended:
        """All that is known of a request that has ended."""
        if self._ended is not None:
            return self._ended
        outputs: Iterator[tuple[int, Output | bytes]] = (
            (part.index, part.output) if isinstance(part, Whole) else (part[0], _output(part[1]))
            for part in self._parts
        )
        return pack(self.head, self._begin, outputs)

    def content(self, damage: Damage) -> tuple[Begin, Outputs]:
        """What is needed to continue, and the outputs before the first that is unreadable. Raises ``UNREADABLE``."""
        begin = decode_begin(self.head, self._begin)
        outputs: Outputs = []
        try:
            for part in self._parts:
                outputs.append(
                    (part.index, decode_output(part)) if isinstance(part, Whole) else (part[0], _output(part[1]))
                )
        except UNREADABLE:
            damage.records += 1
            ended = {index for index, output in outputs if output.finish_reason is not None}
            self.unfinished = set(range(self.head.num_choices)) - ended
        return begin, outputs


def _output(tokens: list[Array]) -> Output:
    return Output(0, np.concatenate(tokens).tolist())


class Recovery:
    """Takes the records of a log, in order."""

    def __init__(self) -> None:
        self.requests: dict[int, Restored] = {}
        """What the log has, by number, once ``finish`` was called."""
        self._rows: list[bytes] = []
        self._num_rows = 0
        self._others: dict[int, list[tuple[int, Other]]] = {}
        """Other items since the first of ``_rows``, by request, each with the number of rows before it."""
        self._ended: list[int] = []
        """Requests that ended since then."""

    def take(self, payload: bytes) -> None:
        """Raises ``UNREADABLE``."""
        for item in decode(payload):
            if isinstance(item, TokenRows):
                self._rows.append(item.rows)
                self._num_rows += len(item.rows) // ROW_BYTES
            else:
                self._others.setdefault(item.number, []).append((self._num_rows, item))
        if self._num_rows * ROW_BYTES >= BLOCK_BYTES:
            self.finish()

    def finish(self) -> None:
        """Give everything to its request."""
        rows: Array = np.frombuffer(b"".join(self._rows), np.uint32).reshape(-1, ROW_BYTES // 4)
        others = self._others
        self._rows, self._num_rows, self._others = [], 0, {}
        if len(rows):
            numbers = rows[:, NUMBER_HIGH].astype(np.uint64) << np.uint64(32) | rows[:, NUMBER_LOW]
            order = _stable_order(numbers)
            numbers, rows = numbers[order], rows[order]
            bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
            for start, end in pairwise(bounds):
                number = int(numbers[start])
                self._replay(number, rows[start:end], order[start:end], others.pop(number, []))
        for number, items in others.items():
            for _, item in items:
                self._restore(number, item)
        for number in self._ended:
            if (request := self.requests.get(number)) is not None:
                self.requests[number] = Restored(request.packed())
        self._ended = []

    def _replay(self, number: int, rows: Array, places: Any, items: list[tuple[int, Other]]) -> None:
        """One request's rows, whose places in the block are ``places``, and its other items, in their order."""
        last = 0
        for cut, (_, item) in zip(np.searchsorted(places, [at for at, _ in items]).tolist(), items, strict=True):
            self._take_rows(number, rows[last:cut])
            self._restore(number, item)
            last = cut
        self._take_rows(number, rows[last:])

    def _take_rows(self, number: int, rows: Array) -> None:
        if len(rows) and (request := self.requests.get(number)) is not None:
            request.take_rows(rows)

    def _restore(self, number: int, item: Other) -> None:
        if isinstance(item, Whole):
            if (request := self.requests.get(number)) is not None:
                request.take_output(item)
                if request.is_ended:
                    self._ended.append(number)
        elif isinstance(item, NewWeights):
            if (request := self.requests.get(number)) is not None:
                request.head = msgspec.structs.replace(request.head, weights=item.version)
        elif isinstance(item, Forgotten):
            self.requests.pop(number, None)
        else:
            self.requests[number] = Restored(item)


def _stable_order(numbers: Any) -> Any:
    """Places of equal numbers together, in their order."""
    least, most = int(numbers.min()), int(numbers.max())
    if most - least < 1 << 16:  # numpy sorts 16 bits by radix, many times faster
        return np.argsort((numbers - np.uint64(least)).astype(np.uint16), kind="stable")
    return np.argsort(numbers, kind="stable")


def read_logs(files: Iterable[LogFile], damage: Damage) -> list[Restored]:
    """The requests in log files, oldest first. Raises ``OSError``."""
    recovery = Recovery()
    num_unreadable = 0
    for file in files:
        for payload in file.read(damage):
            try:
                recovery.take(payload)
            except UNREADABLE as error:
                num_unreadable += 1
                if num_unreadable == 1:
                    logger.error("%s: records cannot be read and are left out, the first: %s", file.path, error)
    recovery.finish()
    damage.records += num_unreadable
    return [recovery.requests[number] for number in sorted(recovery.requests)]
