"""/v1/batches: many requests in a file, answered when there is room, in another file.

https://platform.openai.com/docs/api-reference/batch

What is done of a batch is in the store line by line, so another process goes on where one ended.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.server.batches.files import CONTENT, keep_file, page
from octavo.server.batches.runner import BadLine, Line, LineRunner, Outcome, read_lines
from octavo.server.body import BodyReader
from octavo.server.caller import caller_of
from octavo.server.errors import NotFound, printable
from octavo.server.front import Front, front_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint

KIND = "batch"
WINDOW = "24h"
WINDOW_SECONDS = 86400
SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
DONE = ("completed", "failed", "expired", "cancelled")

Batch = dict[str, Any]
"""What the API says of a batch."""


class BatchBody(msgspec.Struct, kw_only=True):
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] = {}


reader = BodyReader(BatchBody, {"output_expires_after": ()}, frozenset())


async def create_batch(request: Request) -> Response:
    front, owner = front_of(request), caller_of(request).name
    body, headers = await front.read(request, reader)
    served = request.app.state.batches.endpoints
    if body.endpoint not in served:
        raise InvalidParameter("endpoint", f"'endpoint' must be one of {', '.join(served)}.")
    if body.completion_window != WINDOW:
        raise InvalidParameter("completion_window", f"'completion_window' must be '{WINDOW}'.")
    if await front.store.get(CONTENT, body.input_file_id, owner) is None:
        raise InvalidParameter("input_file_id", f"There is no file '{printable(body.input_file_id)}'.")
    batch = _begun(body)
    await request.app.state.batches.begin(batch, owner)
    return json_response(batch, headers)


async def list_batches(request: Request) -> Response:
    kept = await front_of(request).store.list(KIND, caller_of(request).name)
    batches = request.app.state.batches.live
    return json_response(
        page(request, [batches.get(name) or msgspec.json.decode(value) for name, _, value in kept]), {}
    )


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
    value = await front_of(request).store.get(KIND, name, owner)
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
    """All batches that are not done."""

    def __init__(self, app: Starlette, endpoints: list[Endpoint]) -> None:
        self.endpoints = {each.path: each for each in endpoints if each.method == "POST" and each.path in SERVED}
        self.live: dict[str, Batch] = {}
        self._front: Front = app.state.front
        self._runner = LineRunner(app, self.endpoints)

    async def resume(self) -> None:
        """Go on with what an earlier process left undone."""
        for _, owner, value in await self._front.store.list(KIND):
            batch = msgspec.json.decode(value)
            if batch["status"] not in DONE:
                await self.begin(batch, owner)

    async def begin(self, batch: Batch, owner: str) -> None:
        await self._keep(batch, owner)
        self.live[batch["id"]] = batch
        self._front.jobs.start(batch["id"], self._work(batch, owner))

    async def cancel(self, batch: Batch, owner: str) -> None:
        """End a batch with what is done of it."""
        _mark(batch, "cancelling")
        await self._front.jobs.cancel(batch["id"])
        if batch["status"] == "cancelling":
            await self._finish(batch, owner, "cancelled")

    async def _work(self, batch: Batch, owner: str) -> None:
        content = await self._front.store.get(CONTENT, batch["input_file_id"], owner)
        try:
            lines = read_lines(content or b"", batch["endpoint"])
        except BadLine as error:
            batch["errors"] = {"object": "list", "data": [{"code": "invalid_line", "message": str(error)}]}
            await self._finish(batch, owner, "failed")
            return
        kept = [msgspec.json.decode(value, type=Outcome) for value in await self._outcomes(batch, owner)]
        done = {outcome.custom_id for outcome in kept}
        counts = batch["request_counts"]
        counts |= {"total": len(lines), "completed": 0, "failed": 0}
        for outcome in kept:
            _count(batch, outcome)
        _mark(batch, "in_progress")
        await self._keep(batch, owner)
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
        for line in todo:
            outcome = await self._runner.run(line, owner)
            await self._front.store.put(_lines_kind(batch), line.custom_id, owner, msgspec.json.encode(outcome))
            _count(batch, outcome)

    async def _outcomes(self, batch: Batch, owner: str) -> list[bytes]:
        return [value for _, _, value in await self._front.store.list(_lines_kind(batch), owner)]

    async def _finish(self, batch: Batch, owner: str, status: str) -> None:
        """Write the files of results, and say that it is done."""
        outcomes = sorted(await self._outcomes(batch, owner))
        results = {"output": b"", "error": b""}
        for value in outcomes:
            is_good = msgspec.json.decode(value, type=Outcome).response["status_code"] == 200
            results["output" if is_good else "error"] += value + b"\n"
        for kind, content in results.items():
            if content:
                name = f"{batch['id']}_{kind}.jsonl"
                file = await keep_file(self._front, owner, name, content, "batch_output")
                batch[f"{kind}_file_id"] = file.id
        _mark(batch, status)
        await self._keep(batch, owner)
        for value in outcomes:
            line = msgspec.json.decode(value, type=Outcome)
            await self._front.store.delete(_lines_kind(batch), line.custom_id, owner)
        del self.live[batch["id"]]

    async def _keep(self, batch: Batch, owner: str) -> None:
        await self._front.store.put(KIND, batch["id"], owner, msgspec.json.encode(batch))


def _lines_kind(batch: Batch) -> str:
    return f"lines of {batch['id']}"


def _mark(batch: Batch, status: str) -> None:
    batch["status"] = status
    batch[f"{status}_at"] = int(time.time())


def _count(batch: Batch, outcome: Outcome) -> None:
    batch["request_counts"]["completed" if outcome.response["status_code"] == 200 else "failed"] += 1
