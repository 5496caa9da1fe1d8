"""/v1/responses: stored replies that can be continued, retrieved, deleted, and computed in the background."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter, RequestError, Unavailable
from octavo.server.background_jobs import inner_request, retry_while_unavailable
from octavo.server.chat_reply import begin_reply
from octavo.server.durable.serve import end_inner
from octavo.server.errors import NotFound, UnexpectedError, printable
from octavo.server.keys import Caller, caller_of
from octavo.server.openai.rendering import json_response
from octavo.server.openai.schema import Endpoint
from octavo.server.responses.answer import ResponseAnswer, ResponseStream, begun, failed
from octavo.server.responses.body import ResponseBody, chat_body, check, decoder, without_effect
from octavo.server.responses.items import Item, input_items
from octavo.server.services import Services, services_of
from octavo.server.sse import attended, finished_choices
from octavo.server.store import StoredItem, decoded

KIND = "response"
PENDING = "pending_response"
"""Store kind of unfinished background responses."""
PATH = "/v1/responses"


logger = logging.getLogger(__name__)


class PreviousResponseNotFound(InvalidParameter):
    """The previous response does not exist."""

    code = "previous_response_not_found"


class Record(msgspec.Struct):
    """A stored response with its input items."""

    response: dict[str, Any]
    history: list[Item]


class Pending(msgspec.Struct):
    """An unfinished background response, stored so that another process can resume it."""

    body: ResponseBody
    record: Record


async def create_response(request: Request) -> Response:
    services, caller = services_of(request), caller_of(request)
    services.admission.check_room()
    body, headers = await services.read(request, decoder, without_effect)
    check(body)
    services.check_model(body.model)
    history = await _previous(services, caller, body.previous_response_id) + input_items(body.input)
    chat = chat_body(body, history)
    model, is_parallel = services.answering_name(body.model), services.message_format.is_parallel
    record = Record(begun(body, model, services.engine.info.sampling_defaults, is_parallel), history)
    if body.background:
        await _begin_in_background(request.app, caller, Pending(body, record))
        return json_response(record.response, headers)

    async def keep() -> None:
        if body.store:
            await _keep(services, caller, record)

    reply = await begin_reply(services, chat, request, record.response["id"])
    answer = ResponseAnswer(record.response, reply)
    if body.stream:
        return ResponseStream(reply, answer, headers, keep)
    await finished_choices(reply.generation, request)
    answer.finish()
    await keep()
    return json_response(record.response, headers)


async def retrieve_response(request: Request) -> Response:
    for name in ("stream", "starting_after"):
        if request.query_params.get(name, "false") != "false":
            raise InvalidParameter(name, f"'{name}' is not supported: responses are retrieved whole.")
    return json_response((await _record(request)).response, {})


async def list_input_items(request: Request) -> Response:
    items = (await _record(request)).history
    items = [{"id": f"item_{place}", **item} for place, item in enumerate(items)]
    ids = [item["id"] for item in items] or [None]
    # Newest first by default, as in the API.
    if request.query_params.get("order", "desc") == "desc":
        items, ids = items[::-1], ids[::-1]
    return json_response(
        {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}, {}
    )


async def delete_response(request: Request) -> Response:
    services, name, owner = services_of(request), request.path_params["response_id"], caller_of(request).name
    await _value(request)

    async def forget() -> None:
        await services.store.delete(PENDING, name, owner)
        await services.store.delete(KIND, name, owner)

    # Delete first, so that the job continues if that fails; then again, as the job may have stored the response since.
    await forget()
    if await services.jobs.cancel(name):
        end_inner(services, caller_of(request), name)
        await forget()
    return json_response({"id": name, "object": "response", "deleted": True}, {})


async def cancel_response(request: Request) -> Response:
    services, caller = services_of(request), caller_of(request)
    name = (await _record(request)).response["id"]
    is_cancelled = await services.jobs.cancel(name)
    if is_cancelled:
        end_inner(services, caller, name)
    record = await _record(request)
    if not record.response["background"]:
        raise InvalidParameter("response_id", "Only responses that were begun in the background can be cancelled.")
    if is_cancelled and record.response["status"] in ("queued", "in_progress"):
        record.response["status"] = "cancelled"
        await services.jobs.settle(name, _keep_end(services, caller, record))
    return json_response(record.response, {})


ENDPOINTS = [
    Endpoint("POST", PATH, create_response, "Answer a conversation, and keep the answer", ResponseBody),
    Endpoint("GET", PATH + "/{response_id}", retrieve_response, "A response that was kept"),
    Endpoint("DELETE", PATH + "/{response_id}", delete_response, "Forget a response"),
    Endpoint("GET", PATH + "/{response_id}/input_items", list_input_items, "The items that a response follows"),
    Endpoint("POST", PATH + "/{response_id}/cancel", cancel_response, "End a response in the background"),
]


async def resume_responses(app: Starlette) -> None:
    """Resume background responses that an earlier process left unfinished."""
    services: Services = app.state.services
    for row, pending in decoded(PENDING, await services.store.list(PENDING), Pending):
        services.jobs.start(row.id, _in_background(app, services.keys.caller(row.owner), pending))


# --- the store ---


async def _keep(services: Services, caller: Caller, record: Record) -> None:
    await services.store.put_all(caller.name, [_item(record)])


async def _keep_end(services: Services, caller: Caller, record: Record) -> None:
    """Store a finished background response, retrying until the store has room."""
    await retry_while_unavailable(lambda: _keep(services, caller, record))
    await retry_while_unavailable(lambda: services.store.delete(PENDING, record.response["id"], caller.name))


def _item(record: Record) -> StoredItem:
    return StoredItem(KIND, record.response["id"], msgspec.json.encode(record))


async def _record(request: Request) -> Record:
    return msgspec.json.decode(await _value(request), type=Record)


async def _value(request: Request) -> bytes:
    name = request.path_params["response_id"]
    value = await services_of(request).store.get(KIND, name, caller_of(request).name)
    if value is None:
        raise NotFound(f"There is no response '{printable(name)}'.", param="response_id")
    return value


async def _previous(services: Services, caller: Caller, name: str | None) -> list[Item]:
    """The conversation up to and including an earlier response."""
    if name is None:
        return []
    value = await services.store.get(KIND, name, caller.name)
    if value is None:
        message = f"There is no response '{printable(name)}' to follow up."
        raise PreviousResponseNotFound("previous_response_id", message)
    record = msgspec.json.decode(value, type=Record)
    return [*record.history, *record.response["output"]]


# --- the background ---


async def _begin_in_background(app: Starlette, caller: Caller, pending: Pending) -> None:
    services: Services = app.state.services
    name = pending.record.response["id"]
    items = [StoredItem(PENDING, name, msgspec.json.encode(pending)), _item(pending.record)]
    await services.store.put_all(caller.name, items)
    services.jobs.start(name, _in_background(app, caller, pending))


async def _in_background(app: Starlette, caller: Caller, pending: Pending) -> None:
    """Compute the reply, retrying while the server is full or shutting down."""
    services: Services = app.state.services
    record = pending.record

    async def attempt() -> dict[str, Any]:
        request = inner_request(app, PATH, b"", caller)
        chat = chat_body(pending.body, record.history)
        reply = await begin_reply(services, chat, request, record.response["id"], is_durable=True)
        async with attended(reply.generation, request.receive):
            record.response["status"] = "in_progress"
            with contextlib.suppress(Unavailable):  # the status update is optional
                await _keep(services, caller, record)
            await reply.generation.result()
        return ResponseAnswer(record.response, reply).finish()

    try:
        await retry_while_unavailable(attempt)
    except RequestError as error:
        failed(record.response, error)
    except Exception:
        logger.exception("%s failed", record.response["id"])
        failed(record.response, UnexpectedError())
    await _keep_end(services, caller, record)
    end_inner(services, caller, record.response["id"])
