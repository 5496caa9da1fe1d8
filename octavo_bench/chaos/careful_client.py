"""One request followed to its end, over as many connections as it takes: as a careful client of the API would."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from octavo_bench.chaos.answers import ReceivedAnswer, Repeated
from octavo_bench.chaos.traffic import BATCHES, COMPLETIONS, RESPONSES, RepeatableRequest
from octavo_fleet.proxy.connections import Connection, ConnectionFailed, Connections, Headers

RETRY_SECONDS = 0.05
POLL_SECONDS = 0.1
LONGEST_RETRY_AFTER = 1.0
BUSY = (429, 503, 507)
"""Statuses after which a client tries again."""
FORM = (
    b"--octavo\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
    b"--octavo\r\nContent-Disposition: form-data; name=file; filename=in.jsonl\r\n\r\n%b\r\n--octavo--\r\n"
)
"""A file to be uploaded, with its content to be filled in."""
Manner = Literal["plain", "vanishes", "leaves", "slow"]
"""How a client reads a stream: to its end; it goes away and reconnects; it goes away and later reads the whole from the
start; it takes its time."""
MANNERS: tuple[Manner, ...] = ("plain", "plain", "plain", "vanishes", "leaves", "slow")


class RequestUnanswered(Exception):
    """The request ended without its answer."""


class Followed(NamedTuple):
    """What came of a request."""

    content: Any
    num_connections: int
    num_unexplained: int
    """Connections that broke while no fault explains it."""
    num_begun_again: int
    """How often the server knew nothing of the stream any more, and the client began from the start."""


class Excuses:
    """What a server may do because of faults that are at work, as clients need to know."""

    def __init__(self) -> None:
        self.breaks = 0
        """Grows with each fault that breaks connections."""
        self.is_breaking = 0
        """Number of current faults that break connections."""
        self.losses = 0
        """Grows with each fault that takes records from the journal."""
        self.is_losing = 0


class ChaosClient:
    """Follows requests to one server."""

    def __init__(self, url: str, excuses: Excuses) -> None:
        self._connections = Connections(url.rstrip("/") + "/")
        self._excuses = excuses

    async def follow(
        self, asked: RepeatableRequest, key: str, rng: random.Random, manner: Manner = "plain"
    ) -> Followed:
        """The answer to ``asked``. Raises ``RequestUnanswered``, and ``Repeated`` if parts came twice."""
        return await _Following(self._connections, self._excuses, asked, key, rng, manner).run()

    def close(self) -> None:
        self._connections.close()


class _Following:
    def __init__(
        self,
        connections: Connections,
        excuses: Excuses,
        asked: RepeatableRequest,
        key: str,
        rng: random.Random,
        manner: Manner,
    ) -> None:
        self._connections = connections
        self._excuses = excuses
        self._asked = asked
        self._headers: Headers = [(b"content-type", b"application/json")]
        if asked.is_durable:
            self._headers.append((b"idempotency-key", key.encode()))
        self._data = json.dumps(asked.body).encode()
        self._rng = rng
        self._manner = manner
        self._leaves_after = rng.randrange(1, 12) if manner in ("vanishes", "leaves") else 0
        """Events after which it goes away; 0: it stays."""
        self._pauses = 8 if manner == "slow" else 0
        self._answer = ReceivedAnswer()
        self._response_id = ""
        """Of a background response whose stream is read."""
        self._counts = [0, 0, 0]
        self._losses = excuses.losses - bool(excuses.is_losing)

    async def run(self) -> Followed:
        attempt: Callable[[], Any] = self._attempt
        if self._asked.path == BATCHES:
            attempt = self._batch
        elif self._asked.body.get("background") and not self._asked.is_streamed:
            attempt = self._background
        while True:
            self._counts[0] += 1
            breaks = self._excuses.breaks - bool(self._excuses.is_breaking)
            try:
                if await attempt():
                    return Followed(self._answer.content(), *self._counts)
            except ConnectionFailed:
                self._counts[1] += breaks == self._excuses.breaks
                await asyncio.sleep(RETRY_SECONDS)
            if not self._asked.is_resumable:
                self._answer = ReceivedAnswer()

    async def _attempt(self) -> bool:
        """Send the request; returns whether its answer is complete. Raises as ``_stream`` and ``_refused``."""
        headers, last = list(self._headers), self._answer.last_id
        method, path, data = "POST", self._asked.path, self._data
        if self._response_id:
            after = f"&starting_after={last}" if last else ""
            method, path, data = "GET", f"{RESPONSES}/{self._response_id}?stream=true{after}", b""
        elif last:
            headers.append((b"last-event-id", last.encode()))
        async with self._connections.request(method, path, headers, data) as connection:
            if connection.status != 200:
                return await self._refused(connection)
            if not self._asked.is_streamed:
                self._answer.take(json.loads(await connection.read_all()))
                return True
            return await self._stream(connection)

    async def _stream(self, connection: Connection) -> bool:
        async for event in connection.divided(b"\n\n"):
            self._answer.take_event(event)
            self._response_id = self._answer.response_id or self._response_id
            if self._answer.error is not None:
                return await self._failed_stream()
            if self._answer.is_done:
                return True
            if self._pauses:
                self._pauses -= 1
                await asyncio.sleep(self._rng.uniform(0, 0.1))
            if self._leaves_after and self._answer.num_events >= self._leaves_after:
                self._leaves_after = 0
                await self._leave(connection)
                return False
        raise ConnectionFailed("the stream has no end")

    async def _leave(self, connection: Connection) -> None:
        connection.close()
        await asyncio.sleep(self._rng.uniform(0, 0.5))
        if self._manner == "leaves":
            self._answer = ReceivedAnswer()

    async def _failed_stream(self) -> bool:
        """An event reported an error: one that passes is followed by another attempt."""
        error, self._answer.error = self._answer.error or "", None
        if '"code":503' not in error.replace(" ", "") and "shut down" not in error:
            raise RequestUnanswered(f"an event reports {error}")
        self._answer.is_done = False
        await asyncio.sleep(RETRY_SECONDS)
        return False

    async def _refused(self, connection: Connection) -> bool:
        body = (await connection.read_all()).decode(errors="replace")
        if connection.status in BUSY:
            await asyncio.sleep(_retry_after(connection))
            return False
        is_excused = self._losses != self._excuses.losses
        is_unknown = '"stream_unknown"' in body or '"stream_changed"' in body
        if connection.status == 409 and is_unknown and is_excused:
            self._answer = ReceivedAnswer()
            self._counts[2] += 1
            return False
        raise RequestUnanswered(f"status {connection.status}: {body[:300]}")

    async def _background(self) -> bool:
        """Begin a background response, and ask until it is there."""
        async with self._connections.request("POST", RESPONSES, self._headers, self._data) as connection:
            if connection.status != 200:
                return await self._refused(connection)
            name = json.loads(await connection.read_all())["id"]
        self._answer.take(await self._until_ended(f"{RESPONSES}/{name}", ("queued", "in_progress")))
        return True

    async def _batch(self) -> bool:
        """Upload lines, begin a batch of them, and ask until its results are there."""
        of_line = {"method": "POST", "url": f"/{COMPLETIONS}"}
        lines = enumerate(self._asked.body["lines"])
        content = "\n".join(json.dumps({"custom_id": str(i), **of_line, "body": body}) for i, body in lines)
        headers = [(b"content-type", b"multipart/form-data; boundary=octavo")]
        file = json.loads(await self._until_answered("POST", "v1/files", headers, FORM % content.encode()))
        begun = {"input_file_id": file["id"], "endpoint": f"/{COMPLETIONS}", "completion_window": "24h"}
        batch = json.loads(await self._until_answered("POST", BATCHES, self._headers, json.dumps(begun).encode()))
        batch = await self._until_ended(f"{BATCHES}/{batch['id']}", ("validating", "in_progress", "finalizing"))
        if batch["status"] != "completed" or batch["error_file_id"] is not None:
            raise RequestUnanswered(f"the batch ended so: {json.dumps(batch)[:600]}")
        self._answer.take_batch(await self._until_answered("GET", f"v1/files/{batch['output_file_id']}/content"))
        return True

    async def _until_ended(self, path: str, unfinished: tuple[str, ...]) -> Any:
        """The object at ``path``, once its status is none of ``unfinished``."""
        while (found := json.loads(await self._until_answered("GET", path)))["status"] in unfinished:
            await asyncio.sleep(POLL_SECONDS)
        return found

    async def _until_answered(self, method: str, path: str, headers: Headers | None = None, data: bytes = b"") -> bytes:
        """The body of the answer, whatever attempts it takes. Raises ``RequestUnanswered`` if it stays refused."""
        while True:
            breaks = self._excuses.breaks - bool(self._excuses.is_breaking)
            try:
                async with self._connections.request(method, path, headers, data) as connection:
                    status, body = connection.status, await connection.read_all()
            except ConnectionFailed:
                self._counts[0] += 1
                self._counts[1] += breaks == self._excuses.breaks
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if status == 200:
                return body
            if status not in BUSY:
                raise RequestUnanswered(f"{path}: status {status}: {body[:300].decode(errors='replace')}")
            await asyncio.sleep(POLL_SECONDS)


def _retry_after(connection: Connection) -> float:
    said = {name.lower(): value for name, value in connection.headers}.get(b"retry-after", b"1")
    return min(float(said), LONGEST_RETRY_AFTER)


__all__ = ["MANNERS", "ChaosClient", "Excuses", "Followed", "Repeated", "RequestUnanswered"]
