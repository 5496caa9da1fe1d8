"""A client of streamed completions that costs little, so that what it sees is the server: raw sockets, one thread."""

from __future__ import annotations

import heapq
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

EVENT = b"data: "
END = b"data: [DONE]\n\n"
MAX_SECONDS = 120.0


class TimedRequest(NamedTuple):
    """A request to send ``at`` seconds after the start; ``watched``: whether the times of its pieces are kept."""

    at: float
    body: bytes
    watched: bool = True


class Streamed:
    """What came of one request."""

    def __init__(self, ask: TimedRequest, sent: float) -> None:
        self.ask = ask
        self.sent = sent
        self.times: list[float] = []
        """When pieces arrived (``time.perf_counter``); what one read brought is one piece."""
        self.counts: list[int] = []
        """Events of each piece."""
        self.num_events = 0
        self.tail = b""

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces; the first follows the first piece."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def completion(prompt: str | list[int], tokens: int, **more: Any) -> bytes:
    """A request for ``tokens`` tokens after ``prompt``, a text or tokens."""
    fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **more}
    body = json.dumps(fields).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )


def with_key(request: bytes, key: str) -> bytes:
    """``request`` with an idempotency key."""
    return request.replace(b"\r\n", b"\r\nIdempotency-Key: %b\r\n" % key.encode(), 1)


def read_streams(
    port: int, asks: Iterable[TimedRequest], following: Callable[[], TimedRequest | None] = lambda: None
) -> list[Streamed]:
    """Send each request when it is due and read all answers to their ends. After an answer, its client sends what
    ``following`` returns, at once.

    Raises ``RuntimeError`` for a watched answer that is not a whole stream, and when it all takes too long.
    """
    start = time.perf_counter()
    waiting = [(ask.at, number, ask) for number, ask in enumerate(asks)]
    heapq.heapify(waiting)
    done: list[Streamed] = []
    with selectors.EpollSelector() as selector:
        while waiting or selector.get_map():
            now = time.perf_counter() - start
            if now > MAX_SECONDS:
                raise RuntimeError(f"the streams did not end within {MAX_SECONDS:g} s")
            if waiting and waiting[0][0] <= now:
                _send(selector, port, heapq.heappop(waiting)[2])
            for key, _ in selector.select(max(0.0, waiting[0][0] - now) if waiting else 1.0):
                if not _read(key.fileobj, key.data):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    done.append(key.data)
                    if (ask := following()) is not None:
                        _send(selector, port, ask)
    broken = [one for one in done if one.ask.watched and END not in one.tail]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(done)} streams did not end well; one ends with {broken[0].tail!r}")
    return done


def _send(selector: selectors.BaseSelector, port: int, ask: TimedRequest) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(ask.body)
    connection.setblocking(False)
    selector.register(connection, selectors.EVENT_READ, Streamed(ask, time.perf_counter()))


def _read(connection: socket.socket, streamed: Streamed) -> bool:
    """Take what arrived; say whether more may come."""
    try:
        data = connection.recv(1 << 16)
    except ConnectionResetError:
        return False
    events = data.count(EVENT)
    if events:
        streamed.num_events += events
        if streamed.ask.watched:
            streamed.times.append(time.perf_counter())
            streamed.counts.append(events)
    if data:
        streamed.tail = (streamed.tail + data)[-64:]
    return bool(data)
