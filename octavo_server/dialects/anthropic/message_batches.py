"""/v1/messages/batches: message requests processed at low load, as the Anthropic API has them.

https://docs.anthropic.com/en/api/creating-message-batches

Each is a batch of /v1/batches, whose input and result files hold the requests and their outcomes.
"""

from __future__ import annotations

import asyncio
import datetime
import tempfile
import uuid
from collections.abc import AsyncIterator
from typing import IO, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.errors import InvalidParameter
from octavo_server.dialects.anthropic.answer import ERRORS, anthropic_error
from octavo_server.dialects.batches.batches import (
    DONE,
    KIND,
    WINDOW,
    Batch,
    BatchBody,
    batch_of,
    batches_of,
    begun,
    cancelled,
)
from octavo_server.dialects.batches.files import StoredFile, content_of, find, forget, new_file
from octavo_server.dialects.batches.runner import MAX_LINES, BatchLine, Outcome, asks_for_stream, digest_of, lines_of
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import NotFound, UnexpectedError
from octavo_server.http.paging import page
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import server_of
from octavo_server.tenants.api_keys import caller_of

PATH = "/v1/messages/batches"
PREFIX = "msgbatch_"
UNANSWERED: dict[str, dict[str, Any]] = {
    "cancelled": {"type": "canceled"},
    "expired": {"type": "expired"},
    "failed": {"type": "errored", "error": anthropic_error(UnexpectedError())},
}
"""Results of requests that a batch with this status has not answered."""
FILES = ("output_file_id", "error_file_id")


class BatchedMessage(msgspec.Struct, kw_only=True):
    """A request of a batch; ``params`` is the body of a message request."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchBody(msgspec.Struct, kw_only=True):
    """The body of a request to create a batch of messages."""

    requests: list[BatchedMessage]


decoder = BodyDecoder(MessageBatchBody, bodies="requests")


async def create_message_batch(request: Request) -> Response:
    _, body, headers = await server_of(request).read(request, decoder)
    await asyncio.to_thread(_check, body.requests)
    id = f"{PREFIX}{uuid.uuid4().hex}"
    with tempfile.TemporaryFile() as content:
        await asyncio.to_thread(_write, body.requests, content)
        file = new_file(f"{id}.jsonl", content, "batch")
        batch = begun(BatchBody(input_file_id=file.id, endpoint="/v1/messages", completion_window=WINDOW), id)
        batch["request_counts"]["total"] = len(body.requests)
        await request.app.state.batches.begin(batch, caller_of(request).name, StoredFile(file, content))
    return json_response(_message_batch(batch), headers)


async def list_message_batches(request: Request) -> Response:
    shown = [_message_batch(each) for each in await batches_of(request) if each["id"].startswith(PREFIX)]
    before = request.query_params.get("before_id")
    if before is None:
        found = page(request, shown, default=20, most=1000, key="after_id")
    else:
        # The page that ends before an item begins after it in the other direction.
        found = page(request, shown[::-1], default=20, most=1000, key="before_id")
        found |= {"data": found["data"][::-1], "first_id": found["last_id"], "last_id": found["first_id"]}
    del found["object"]
    return json_response(found, {})


async def retrieve_message_batch(request: Request) -> Response:
    return json_response(_message_batch(await batch_of(request)), {})


async def cancel_message_batch(request: Request) -> Response:
    return json_response(_message_batch(await cancelled(request)), {})


async def delete_message_batch(request: Request) -> Response:
    batch = await _ended(request)
    store, owner = server_of(request).store, caller_of(request).name
    await store.delete(KIND, batch["id"], owner)
    for name in ("input_file_id", *FILES):
        if batch[name] is not None:
            await forget(store, batch[name], owner)
    return json_response({"id": batch["id"], "type": "message_batch_deleted"}, {})


async def message_batch_results(request: Request) -> Response:
    batch = await _ended(request)
    store, owner = server_of(request).store, caller_of(request).name
    for name in FILES:
        if batch[name] is not None and await find(store, batch[name], owner) is None:
            raise NotFound("The results of this batch were deleted.", param="batch_id")
    return StreamingResponse(_results(request, batch), media_type="application/x-jsonl")


ENDPOINTS = [
    Endpoint("POST", PATH, create_message_batch, "Answer many conversations", MessageBatchBody, errors=ERRORS),
    Endpoint("GET", PATH, list_message_batches, "List the batches of conversations", errors=ERRORS),
    Endpoint("GET", PATH + "/{batch_id}", retrieve_message_batch, "Describe such a batch", errors=ERRORS),
    Endpoint("DELETE", PATH + "/{batch_id}", delete_message_batch, "Forget such a batch", errors=ERRORS),
    Endpoint("POST", PATH + "/{batch_id}/cancel", cancel_message_batch, "End such a batch", errors=ERRORS),
    Endpoint("GET", PATH + "/{batch_id}/results", message_batch_results, "The answers of such a batch", errors=ERRORS),
]


def _check(requests: list[BatchedMessage]) -> None:
    """Raise ``InvalidParameter`` for requests that make no batch; bodies are checked when they are answered."""
    if not 1 <= len(requests) <= MAX_LINES:
        raise InvalidParameter("requests", f"'requests' must have 1 to {MAX_LINES} entries, not {len(requests)}.")
    seen: dict[str, int] = {}
    for place, each in enumerate(requests):
        if (first := seen.setdefault(each.custom_id, place)) != place:
            message = f"'requests[{place}].custom_id' must differ from 'requests[{first}].custom_id'."
            raise InvalidParameter("requests", message)
        if asks_for_stream(each.params):
            raise InvalidParameter("requests", f"'requests[{place}].params.stream' must be false in a batch.")


def _write(requests: list[BatchedMessage], content: IO[bytes]) -> None:
    """Write the requests as lines of an input file."""
    for each in requests:
        line = BatchLine(custom_id=each.custom_id, method="POST", url="/v1/messages", body=_on_a_line(each.params))
        content.write(msgspec.json.encode(line) + b"\n")


def _on_a_line(body: msgspec.Raw) -> msgspec.Raw:
    """The same JSON without line ends, which strings cannot hold."""
    return msgspec.Raw(bytes(body).replace(b"\n", b" ").replace(b"\r", b" "))


async def _ended(request: Request) -> Batch:
    """The batch that the path names, if it has ended. Raises ``RequestError``."""
    batch = await batch_of(request)
    if batch["status"] not in DONE:
        raise InvalidParameter("batch_id", f"The batch '{batch['id']}' has not ended yet.")
    return batch


def _message_batch(batch: Batch) -> dict[str, Any]:
    """A batch as the API's message batch object."""
    status, counts = batch["status"], batch["request_counts"]
    succeeded, errored = (0, counts["total"]) if status == "failed" else (counts["completed"], counts["failed"])
    left = counts["total"] - succeeded - errored
    is_done = status in DONE
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if is_done else "canceling" if status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if is_done else left,
            "succeeded": succeeded,
            "errored": errored,
            "canceled": left if status == "cancelled" else 0,
            "expired": left if status == "expired" else 0,
        },
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(batch[f"{status}_at"]) if is_done else None,
        "cancel_initiated_at": _time(batch["cancelling_at"]),
        "archived_at": None,
        # Without a host: the one that the client used is its to know, as there may be proxies.
        "results_url": f"{PATH}/{batch['id']}/results" if is_done else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


async def _results(request: Request, batch: Batch) -> AsyncIterator[bytes]:
    """A line for each request: those with an outcome, then those without."""
    answered = set()
    for name in FILES:
        async for line in _file_lines(request, batch[name]):
            outcome = msgspec.json.decode(line, type=Outcome)
            answered.add(digest_of(outcome.custom_id))
            yield _result(outcome.custom_id, _of_outcome(outcome.response))
    if (result := UNANSWERED.get(batch["status"])) is not None:
        async for line in _file_lines(request, batch["input_file_id"]):
            id = msgspec.json.decode(line, type=BatchLine).custom_id
            if digest_of(id) not in answered:
                yield _result(id, result)


async def _file_lines(request: Request, id: str | None) -> AsyncIterator[bytes]:
    if id is not None:
        async for lines in lines_of(content_of(server_of(request).store.get, id, caller_of(request).name)):
            for line in filter(None, lines):
                yield line


def _of_outcome(response: dict[str, Any]) -> dict[str, Any]:
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": {**response["body"], "request_id": response["request_id"]}}


def _result(id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": id, "result": result}) + b"\n"
