"""/v1/batches: requests from a file, processed at low load, with results in another file.

https://platform.openai.com/docs/api-reference/batch

Results are stored line by line, so another process can resume an unfinished batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.server.background_jobs import retry_while_unavailable
from octavo.server.batches.files import CONTENT, items_of, new_file
from octavo.server.batches.runner import BadLine, Line, LineRunner, Outcome, read_lines
from octavo.server.body_decoder import BodyDecoder
from octavo.server.durable.serve import end_all, end_with_key
from octavo.server.errors import NotFound, UnexpectedError, printable
from octavo.server.keys import caller_of
from octavo.server.openai.pages import page
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.services import Services, services_of
from octavo.server.store import Row, StoredItem, decoded

KIND = "batch"
WINDOW = "24h"
WINDOW_SECONDS = 86400
SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
DONE = ("completed", "failed", "expired", "cancelled")

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
"""The API's batch object."""
Work = Callable[[Batch, str], Awaitable[None]]
"""What is done with an owner's batch."""


class BatchBody(msgspec.Struct, kw_only=True):
    """The body of a request to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = {}


decoder = BodyDecoder(BatchBody, {"output_expires_after": ()}, frozenset())


async def create_batch(request: Request) -> Response:
    services, owner = services_of(request), caller_of(request).name
    services, body, headers = await services.read(request, decoder)
    served = request.app.state.batches.endpoints
    if body.endpoint not in served:
        raise InvalidParameter("endpoint", f"'endpoint' must be one of {', '.join(served)}.")
    if body.completion_window != WINDOW:
        raise InvalidParameter("completion_window", f"'completion_window' must be '{WINDOW}'.")
    if await services.store.get(CONTENT, body.input_file_id, owner) is None:
        raise InvalidParameter("input_file_id", f"There is no file '{printable(body.input_file_id)}'.")
    batch = _begun(body)
    await request.app.state.batches.begin(batch, owner)
    return json_response(batch, headers)


async def list_batches(request: Request) -> Response:
    kept = await services_of(request).store.list(KIND, caller_of(request).name)
    live = request.app.state.batches.live
    return json_response(page(request, [live.get(row.id) or batch for row, batch in decoded(KIND, kept, dict)]), {})


async def retrieve_batch(request: Request) -> Response:
    return json_response(await _batch(request), {})


async def cancel_batch(request: Request) -> Response:
    batch = await _batch(request)
    if batch["status"] not in DONE:
        await request.app.state.batches.cancel(batch, caller_of(request).name)
    return json_response(batch, {})


ENDPOINTS = [
    Endpoint("POST", "/v1/batches", create_batch, "Answer the requests in a file", BatchBody),
    Endpoint("GET", "/v1/batches", list_batches, "List the batches"),
    Endpoint("GET", "/v1/batches/{batch_id}", retrieve_batch, "Describe a batch"),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "End a batch with what is done of it"),
]


async def _batch(request: Request) -> Batch:
    name, owner = request.path_params["batch_id"], caller_of(request).name
    value = await services_of(request).store.get(KIND, name, owner)
    if value is None:
        raise NotFound(f"There is no batch '{printable(name)}'.", param="batch_id")
    batch: Batch = request.app.state.batches.live.get(name) or msgspec.json.decode(value)
    return batch


def _begun(body: BatchBody) -> Batch:
    moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    now = int(time.time())
    return {
        "id": f"batch_{uuid.uuid4().hex}",
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
        **{f"{moment}_at": None for moment in moments},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }


class Batches:
    """Runs the unfinished batches as background jobs, which wait while the store is full."""

    def __init__(self, app: Starlette, endpoints: list[Endpoint]) -> None:
        self.endpoints = {each.path: each for each in endpoints if each.method == "POST" and each.path in SERVED}
        self.live: dict[str, Batch] = {}
        self._services: Services = app.state.services
        self._runner = LineRunner(app, self.endpoints)

    async def resume(self) -> None:
        """Resume batches that an earlier process left unfinished."""
        own = set(self.live)  # before the list is read: they may end meanwhile
        for row, batch in decoded(KIND, await self._services.store.list(KIND), dict):
            if batch["status"] not in DONE and batch["id"] not in own | self.live.keys():
                is_cancelled = batch["status"] == "cancelling"
                self._start(self._finish_cancelled if is_cancelled else self._answer_lines, batch, row.owner)

    async def stop(self) -> None:
        """Leave the batches to the next process."""
        for id in list(self.live):
            await self._services.jobs.cancel(id)

    async def begin(self, batch: Batch, owner: str) -> None:
        """Store a new batch, and start its job."""
        await self._services.store.put_all(owner, [_item(batch)])
        self._start(self._answer_lines, batch, owner)

    async def cancel(self, batch: Batch, owner: str) -> None:
        """Cancel a batch; results so far are kept."""
        _mark(batch, "cancelling")
        await self._services.jobs.cancel(batch["id"])
        if batch["status"] == "cancelling":
            await self._services.jobs.settle(batch["id"], self._do(self._finish_cancelled, batch, owner))

    def _start(self, work: Work, batch: Batch, owner: str) -> None:
        self.live[batch["id"]] = batch
        self._services.jobs.start(batch["id"], self._do(work, batch, owner))

    async def _do(self, work: Work, batch: Batch, owner: str) -> None:
        """Run ``work`` on a batch; if it raises, the batch fails with that reason."""
        try:
            await work(batch, owner)
            return
        except BadLine as error:
            problem = {"code": "invalid_line", "message": str(error), "line": error.number, "param": None}
        except Exception:
            logger.exception("%s failed", batch["id"])
            problem = {"code": "internal_error", "message": UnexpectedError().message, "line": None, "param": None}
        batch["errors"] = {"object": "list", "data": [problem]}
        _mark(batch, "failed")
        await self._end(batch, owner, "failed", {}, [])

    async def _answer_lines(self, batch: Batch, owner: str) -> None:
        content = await retry_while_unavailable(
            lambda: self._services.store.get(CONTENT, batch["input_file_id"], owner)
        )
        lines = await asyncio.to_thread(read_lines, content or b"", batch["endpoint"])
        kept = await self._outcomes(batch, owner)
        done = {outcome.custom_id for _, outcome in kept}
        counts = batch["request_counts"]
        counts |= {"total": len(lines), "completed": 0, "failed": 0}
        for _, outcome in kept:
            _count(batch, outcome)
        _mark(batch, "in_progress")
        await self._put(owner, [_item(batch)])
        todo = iter([line for line in lines if line.custom_id not in done])
        try:
            async with asyncio.timeout(max(0, batch["expires_at"] - time.time())), asyncio.TaskGroup() as group:
                for _ in range(self._runner.num_places):
                    group.create_task(self._work_off(todo, batch, owner))
        except TimeoutError:
            await self._finish(batch, owner, "expired")
        else:
            await self._finish(batch, owner, "completed")

    async def _work_off(self, todo: Iterator[Line], batch: Batch, owner: str) -> None:
        caller = self._services.keys.caller(owner)
        for line in todo:
            key = f"{batch['id']}.{hashlib.blake2b(line.custom_id.encode(), digest_size=16).hexdigest()}"
            outcome = await self._runner.run(line, caller, key)
            await self._put(owner, [StoredItem(_lines_kind(batch), line.custom_id, msgspec.json.encode(outcome))])
            _count(batch, outcome)
            end_with_key(self._services, caller, key)

    async def _outcomes(self, batch: Batch, owner: str) -> list[tuple[Row, Outcome]]:
        kind = _lines_kind(batch)
        rows = await retry_while_unavailable(lambda: self._services.store.list(kind, owner))
        return await asyncio.to_thread(lambda: list(decoded(kind, rows, Outcome)))

    async def _finish(self, batch: Batch, owner: str, status: str) -> None:
        """Write the result files, and mark the batch as done."""
        results: dict[str, list[bytes]] = {"output": [], "error": []}
        for row, outcome in sorted(await self._outcomes(batch, owner), key=lambda pair: pair[0].value):
            results["output" if outcome.response["status_code"] == 200 else "error"].append(row.value + b"\n")
        names, items = {}, []
        for kind, lines in results.items():
            if lines:
                content = b"".join(lines)
                file = new_file(f"{batch['id']}_{kind}.jsonl", content, "batch_output")
                names[f"{kind}_file_id"] = file.id
                items += items_of(file, content)
        await self._end(batch, owner, status, names, items)

    async def _finish_cancelled(self, batch: Batch, owner: str) -> None:
        value = await retry_while_unavailable(lambda: self._services.store.get(KIND, batch["id"], owner))
        kept = {} if value is None else msgspec.json.decode(value)
        if kept.get("status") in DONE:
            # The job was cancelled after it had stored the final status.
            batch.update(kept)
            self.live.pop(batch["id"], None)
        else:
            await self._put(owner, [_item(batch)])  # so that another process does not go on with it
            await self._finish(batch, owner, "cancelled")

    async def _end(self, batch: Batch, owner: str, status: str, names: dict[str, str], items: list[StoredItem]) -> None:
        """Store the final batch and its files, replacing the per-line results."""
        ended: Batch = {**batch, **names}
        _mark(ended, status)
        await self._put(owner, [*items, _item(ended)], instead_of=_lines_kind(batch))
        end_all(self._services, self._services.keys.caller(owner), f"{batch['id']}.")
        batch.update(ended)
        self.live.pop(batch["id"], None)

    async def _put(self, owner: str, items: list[StoredItem], instead_of: str | None = None) -> None:
        await retry_while_unavailable(lambda: self._services.store.put_all(owner, items, instead_of))


def _item(batch: Batch) -> StoredItem:
    return StoredItem(KIND, batch["id"], msgspec.json.encode(batch))


def _lines_kind(batch: Batch) -> str:
    return f"lines of {batch['id']}"


def _mark(batch: Batch, status: str) -> None:
    batch["status"] = status
    batch[f"{status}_at"] = int(time.time())


def _count(batch: Batch, outcome: Outcome) -> None:
    batch["request_counts"]["completed" if outcome.response["status_code"] == 200 else "failed"] += 1
