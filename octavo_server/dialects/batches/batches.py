"""/v1/batches: requests from a file, processed at low load, with results in another file.

https://platform.openai.com/docs/api-reference/batch

Results are stored line by line, so another process can resume an unfinished batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypedDict, cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import CANCELLATIONS, InvalidParameter
from octavo_server.dialects.batches.files import StoredFile, content_of, find, new_file
from octavo_server.dialects.batches.runner import BadLine, BatchLine, LineReader, LineRunner, Outcome, digest_of
from octavo_server.durable.background_jobs import retry_while_unavailable
from octavo_server.durable.own_requests import end_all, end_with_key
from octavo_server.durable.store import ListedItem, StoredItem, decode, decoded
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import NotFound, UnexpectedError, printable
from octavo_server.http.paging import page
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import ServerServices, server_of
from octavo_server.tenants.api_keys import caller_of
from octavo_server.tenants.turn_queue import Places

KIND = "batch"
WINDOW = "24h"
WINDOW_SECONDS = 86400
SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
MAX_AT_ONCE = 4
"""Batches of one API key that are worked on, each with some lines in memory; further ones wait."""
DONE = ("completed", "failed", "expired", "cancelled")

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
"""The API's batch object."""
Work = Callable[[Batch, str], Awaitable[None]]
"""What is done with an owner's batch."""


class StoredBatch(TypedDict):
    """What a stored batch must have."""

    id: str
    object: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    errors: Any
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str]


class BatchBody(msgspec.Struct, kw_only=True):
    """The body of a request to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = {}


decoder = BodyDecoder(BatchBody)


async def create_batch(request: Request) -> Response:
    server, owner = server_of(request), caller_of(request).name
    _, body, headers = await server.read(request, decoder)
    served = request.app.state.batches.endpoints
    if body.endpoint not in served:
        raise InvalidParameter("endpoint", f"'endpoint' must be one of {', '.join(served)}.")
    if body.completion_window != WINDOW:
        raise InvalidParameter("completion_window", f"'completion_window' must be '{WINDOW}'.")
    if await find(server.store, body.input_file_id, owner) is None:
        raise InvalidParameter("input_file_id", f"There is no file '{printable(body.input_file_id)}'.")
    batch = begun(body, f"batch_{uuid.uuid4().hex}")
    await request.app.state.batches.begin(batch, owner)
    return json_response(batch, headers)


async def list_batches(request: Request) -> Response:
    return json_response(page(request, await batches_of(request)), {})


async def retrieve_batch(request: Request) -> Response:
    return json_response(await batch_of(request), {})


async def cancel_batch(request: Request) -> Response:
    return json_response(await cancelled(request), {})


ENDPOINTS = [
    Endpoint("POST", "/v1/batches", create_batch, "Answer the requests in a file", BatchBody),
    Endpoint("GET", "/v1/batches", list_batches, "List the batches"),
    Endpoint("GET", "/v1/batches/{batch_id}", retrieve_batch, "Describe a batch"),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "End a batch with what is done of it"),
]


async def batches_of(request: Request) -> list[Batch]:
    """The caller's batches, newest first."""
    kept = await server_of(request).store.list(KIND, caller_of(request).name)
    live = request.app.state.batches.live
    return [live.get(row.id) or batch for row, batch in _read(kept)]


async def batch_of(request: Request) -> Batch:
    """The batch that the path names. Raises ``RequestError``."""
    name, owner = request.path_params["batch_id"], caller_of(request).name
    value = await server_of(request).store.get(KIND, name, owner)
    if value is None:
        raise NotFound(f"There is no batch '{printable(name)}'.", param="batch_id")
    live: Batch | None = request.app.state.batches.live.get(name)
    return live or cast(Batch, decode(KIND, name, value, StoredBatch))


async def cancelled(request: Request) -> Batch:
    """The batch that the path names, being cancelled unless it is done. Raises ``RequestError``."""
    batch = await batch_of(request)
    if batch["status"] not in DONE:
        await request.app.state.batches.cancel(batch, caller_of(request).name)
    return batch


def _read(rows: Iterable[ListedItem]) -> Iterator[tuple[ListedItem, Batch]]:
    """Stored batches; those that cannot be read are left out."""
    return ((row, cast(Batch, batch)) for row, batch in decoded(KIND, rows, StoredBatch))


def begun(body: BatchBody, id: str) -> Batch:
    """A new batch."""
    now = int(time.time())
    return {
        "id": id,
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": WINDOW,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **{f"{moment}_at": None for moment in MOMENTS},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }


class Batches:
    """Runs the unfinished batches as background jobs, which wait while the store is full."""

    def __init__(self, app: Starlette, endpoints: list[Endpoint]) -> None:
        self.endpoints = {each.path: each for each in endpoints if each.method == "POST" and each.path in SERVED}
        self.live: dict[str, Batch] = {}
        self._server: ServerServices = app.state.services
        # The other half of the places is reserved for clients.
        self._runner = LineRunner(app, self.endpoints, max(1, self._server.first.engine.info.max_num_seqs // 2))
        self._turns = Places(sys.maxsize, MAX_AT_ONCE)

    async def resume(self) -> None:
        """Resume batches that an earlier process left unfinished."""
        own = set(self.live)  # before the list is read: they may end meanwhile
        for row, batch in _read(await self._server.store.list(KIND)):
            if batch["status"] not in DONE and batch["id"] not in own | self.live.keys():
                is_cancelled = batch["status"] == "cancelling"
                self._start(self._finish_cancelled if is_cancelled else self._work, batch, row.owner)

    async def stop(self) -> None:
        """Leave the batches to the next process."""
        for id in list(self.live):
            await self._server.jobs.cancel(id)

    async def begin(self, batch: Batch, owner: str, file: Iterable[StoredItem] = ()) -> None:
        """Store a new batch, with its ``file`` if it is new too, and start its job. Raises ``QueueFull``."""
        self._server.jobs.check_room(owner)
        await self._server.store.put_all(owner, _Joined([file, [_item(batch)]]), is_large=bool(file))
        self._start(self._work, batch, owner)

    async def cancel(self, batch: Batch, owner: str) -> None:
        """Cancel a batch; results so far are kept."""
        _mark(batch, "cancelling")
        await self._server.jobs.cancel(batch["id"])
        if batch["status"] == "cancelling":
            await self._server.jobs.settle(batch["id"], self._do(self._finish_cancelled, batch, owner), owner)

    def _start(self, work: Work, batch: Batch, owner: str) -> None:
        self.live[batch["id"]] = batch
        self._server.jobs.start(batch["id"], self._do(work, batch, owner), owner)

    async def _do(self, work: Work, batch: Batch, owner: str) -> None:
        """Run ``work`` on a batch; if it raises, the batch fails with that reason."""
        try:
            await work(batch, owner)
            return
        except BadLine as error:
            problem = {"code": "invalid_line", "message": str(error), "line": error.number, "param": None}
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("%s failed", batch["id"])
            problem = {"code": "internal_error", "message": UnexpectedError().message, "line": None, "param": None}
        batch["errors"] = {"object": "list", "data": [problem]}
        _mark(batch, "failed")
        await self._end(batch, owner, "failed", {}, [])

    async def _work(self, batch: Batch, owner: str) -> None:
        async with self._turns.place(owner):
            await self._answer_lines(batch, owner)

    async def _answer_lines(self, batch: Batch, owner: str) -> None:
        reader = LineReader((batch["endpoint"],))
        async for _ in self._lines(reader, batch, owner):
            pass  # all are checked before the first is answered
        reader.check_number()
        done = set()
        counts = batch["request_counts"]
        counts |= {"total": reader.num_lines, "completed": 0, "failed": 0}
        async for _, outcome in self._outcomes(batch, owner):
            done.add(digest_of(outcome.custom_id))
            _count(batch, outcome)
        _mark(batch, "in_progress")
        await self._put(owner, [_item(batch)])
        again = LineReader((batch["endpoint"],))
        todo = _Todo(self._lines(again, batch, owner), done)
        try:
            async with asyncio.timeout(max(0, batch["expires_at"] - time.time())), asyncio.TaskGroup() as group:
                for _ in range(self._runner.num_places):
                    group.create_task(self._work_off(todo, batch, owner))
        except TimeoutError:
            await self._finish(batch, owner, "expired")
        else:
            if again.num_lines < reader.num_lines:
                raise BadLine("The input file was deleted before all of its lines were answered.")
            await self._finish(batch, owner, "completed")

    async def _work_off(self, todo: _Todo, batch: Batch, owner: str) -> None:
        caller = self._server.keys.caller(owner)
        while (line := await todo.next()) is not None:
            key = f"{batch['id']}.{digest_of(line.custom_id).hex()}"
            outcome = await self._runner.run(line, caller, key)
            await self._put(owner, [StoredItem(_lines_kind(batch), line.custom_id, msgspec.json.encode(outcome))])
            _count(batch, outcome)
            end_with_key(self._server, caller, key)

    def _lines(self, reader: LineReader, batch: Batch, owner: str) -> AsyncIterator[BatchLine]:
        return reader.read(content_of(self._get, batch["input_file_id"], owner))

    async def _outcomes(self, batch: Batch, owner: str) -> AsyncIterator[tuple[bytes, Outcome]]:
        """Stored and decoded results, oldest first; those that cannot be read are left out."""
        kind = _lines_kind(batch)
        for id in await retry_while_unavailable(lambda: self._server.store.ids(kind, owner)):
            value = await self._get(kind, id, owner)
            for row, outcome in decoded(kind, [] if value is None else [ListedItem(id, owner, value)], Outcome):
                yield row.value, outcome

    async def _get(self, kind: str, id: str, owner: str) -> bytes | None:
        return await retry_while_unavailable(lambda: self._server.store.get(kind, id, owner))

    async def _finish(self, batch: Batch, owner: str, status: str) -> None:
        """Write the result files, and mark the batch as done."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
            results = {"output": output, "error": error}
            async for value, outcome in self._outcomes(batch, owner):
                results["output" if outcome.response["status_code"] == 200 else "error"].write(value + b"\n")
            names: dict[str, str] = {}
            items: list[Iterable[StoredItem]] = []
            for kind, content in results.items():
                if content.tell():
                    file = new_file(f"{batch['id']}_{kind}.jsonl", content, "batch_output")
                    names[f"{kind}_file_id"] = file.id
                    items.append(StoredFile(file, content))
            await self._end(batch, owner, status, names, items)

    async def _finish_cancelled(self, batch: Batch, owner: str) -> None:
        value = await self._get(KIND, batch["id"], owner)
        latest = [] if value is None else [ListedItem(batch["id"], owner, value)]
        kept = next((found for _, found in _read(latest)), Batch())
        if kept.get("status") in DONE:
            # The job was cancelled after it had stored the final status.
            batch.update(kept)
            self.live.pop(batch["id"], None)
        else:
            await self._put(owner, [_item(batch)])  # so that another process does not go on with it
            await self._finish(batch, owner, "cancelled")

    async def _end(
        self, batch: Batch, owner: str, status: str, names: dict[str, str], files: list[Iterable[StoredItem]]
    ) -> None:
        """Store the final batch and its files, replacing the per-line results."""
        ended: Batch = {**batch, **names}
        _mark(ended, status)
        await self._put(owner, _Joined([*files, [_item(ended)]]), instead_of=_lines_kind(batch))
        end_all(self._server, self._server.keys.caller(owner), f"{batch['id']}.")
        batch.update(ended)
        self.live.pop(batch["id"], None)

    async def _put(self, owner: str, items: Iterable[StoredItem], instead_of: str | None = None) -> None:
        is_large = instead_of is not None
        await retry_while_unavailable(lambda: self._server.store.put_all(owner, items, instead_of, is_large))


class _Joined:
    """Items of several sources, which are read each time."""

    def __init__(self, sources: list[Iterable[StoredItem]]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[StoredItem]:
        return itertools.chain.from_iterable(self._sources)


class _Todo:
    """The lines that several tasks answer, less those that are ``done``."""

    def __init__(self, lines: AsyncIterator[BatchLine], done: set[bytes]) -> None:
        self._lines = lines
        self._done = done
        self._turn = asyncio.Lock()

    async def next(self) -> BatchLine | None:
        """The next line; ``None`` at the end. Raises ``BadLine``."""
        async with self._turn:
            async for line in self._lines:
                if digest_of(line.custom_id) not in self._done:
                    return line
            return None


def _item(batch: Batch) -> StoredItem:
    return StoredItem(KIND, batch["id"], msgspec.json.encode(batch))


def _lines_kind(batch: Batch) -> str:
    return f"lines of {batch['id']}"


def _mark(batch: Batch, status: str) -> None:
    batch["status"] = status
    batch[f"{status}_at"] = int(time.time())


def _count(batch: Batch, outcome: Outcome) -> None:
    batch["request_counts"]["completed" if outcome.response["status_code"] == 200 else "failed"] += 1
