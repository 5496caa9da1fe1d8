"""/v1/responses: stored replies that can be continued, retrieved, deleted, and computed in the background."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter, Unavailable
from octavo_server.dialects.chat_reply import Translated, chat_request, num_prompt_tokens, submission
from octavo_server.dialects.openai.render import generate_bodies
from octavo_server.dialects.responses.answer import ResponseAnswer, ResponseStream, TextLogprobs, begun
from octavo_server.dialects.responses.background_responses import BackgroundResponses
from octavo_server.dialects.responses.background_stream import LiveResponse, event_stream, position
from octavo_server.dialects.responses.body import PATH, ResponseBody, check, decoder, translated, without_effect
from octavo_server.dialects.responses.conversations import items_of
from octavo_server.dialects.responses.events import response_of
from octavo_server.dialects.responses.items import REFERENCE, input_items, new_items
from octavo_server.dialects.responses.stored_responses import PendingResponse, Record, find, keep, not_found, requested
from octavo_server.dialects.responses.tools import Item, with_added
from octavo_server.durable.background_jobs import RETRY_SECONDS
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter, printable
from octavo_server.http.paging import page_of_items
from octavo_server.http.response import json_response
from octavo_server.pipeline import Dialect, Submission
from octavo_server.services import ModelServices, ServerServices, server_of
from octavo_server.tenants.api_keys import Caller, caller_of


class PreviousResponseNotFound(InvalidParameter):
    """The previous response does not exist."""

    code = "previous_response_not_found"


async def _translate(body: ResponseBody, services: ModelServices, request: Request) -> Submission | Response:
    caller, headers = caller_of(request), request.state.headers
    earlier, inputs, (chat, names, _) = await _conversation(body, services, request)
    if body.conversation_id is not None:
        inputs = new_items(inputs)
    model, is_parallel = services.answering_name(body.model), services.message_format.is_parallel
    response = begun(body, model, services.engine.info.sampling_defaults, is_parallel)
    record = Record(response, [*earlier, *inputs], num_inputs=len(inputs))
    if body.background:
        live = await _background(request).begin(caller, PendingResponse(body, record))
        if body.stream:
            return event_stream(live, services.journal, headers=headers)
        return json_response(record.response, headers)
    stored = partial(keep, services.server, caller, record)
    stream = partial(ResponseStream, keep=stored)
    logprobs = TextLogprobs(services, body.skip_special_tokens, body.top_logprobs) if chat.logprobs else None
    answer = partial(ResponseAnswer, record, logprobs)
    return submission(services, chat, request, answer, stream, names, keep=stored)


async def _conversation(
    body: ResponseBody, services: ModelServices, request: Request
) -> tuple[list[Item], list[Item], Translated]:
    """The items that the input follows, those of the input, and all as a chat completion. Raises ``RequestError``."""
    check(body)
    services.check_model(body.model)
    caller = caller_of(request)
    earlier = await _earlier(services.server, caller, body)
    inputs = await _without_references(services.server, caller, input_items(body.input))
    body.tools = with_added(body.tools, [*earlier, *inputs])
    found = translated(body, [*earlier, *inputs], len(earlier), services.takes_images)
    services.report(request, found.left_out)
    return earlier, inputs, found


async def count_tokens(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, decoder, without_effect)
    _, _, (chat, names, _) = await _conversation(body, services, request)
    count = await num_prompt_tokens(services, chat, request, names)
    return json_response({"object": "response.input_tokens", "input_tokens": count}, headers)


async def render_response(request: Request) -> Response:
    """A body for /inference/v1/generate; nothing is kept, and nothing that was kept is read."""
    services, body, headers = await server_of(request).read(request, decoder, without_effect)
    check(body)
    services.check_model(body.model)
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise UnsupportedParameter(name, f"'{name}' is not rendered: 'input' must have the whole conversation.")
    items = input_items(body.input)
    body.tools = with_added(body.tools, items)
    chat, names, left_out = translated(body, items, 0, services.takes_images)
    services.report(request, left_out)
    with names.in_errors():
        (rendered,) = await generate_bodies(services, chat_request(services, chat, request, names), chat, "resp")
    return json_response(rendered, headers)


async def retrieve_response(request: Request) -> Response:
    after = position(request)
    live = _background(request).live.get(request.path_params["response_id"])  # first, as it may end meanwhile
    record = await requested(request)
    if after is None:
        return json_response(record.response, {})
    if live is None:
        if not record.is_finished:
            raise Unavailable("The response is not computed now; try again.", retry_after=RETRY_SECONDS)
        live = LiveResponse.finished(record)
    return event_stream(live, server_of(request).of_model(record.response["model"]).journal, after)


async def list_input_items(request: Request) -> Response:
    items = (await requested(request)).history
    items = [{"id": f"item_{place}", **item} for place, item in enumerate(items)]
    return json_response(page_of_items(request, items), {})


async def delete_response(request: Request) -> Response:
    name, caller = request.path_params["response_id"], caller_of(request)
    if not await _background(request).delete(caller, name):
        raise not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True}, {})


async def cancel_response(request: Request) -> Response:
    record = await requested(request)
    if not record.response["background"]:
        raise InvalidParameter("response_id", "Only responses that were begun in the background can be cancelled.")
    return json_response((await _background(request).cancel(caller_of(request), record)).response, {})


async def _earlier(server: ServerServices, caller: Caller, body: ResponseBody) -> list[Item]:
    """The items that the input follows: those of a conversation, or up to and including an earlier response."""
    if body.conversation_id is not None:
        return await items_of(server, caller, body.conversation_id)
    name = body.previous_response_id
    if name is None:
        return []
    record = await find(server, caller, name)
    if record is None:
        message = f"There is no response '{printable(name)}' to follow up."
        raise PreviousResponseNotFound("previous_response_id", message)
    return [*record.history, *record.response["output"]]


async def _without_references(server: ServerServices, caller: Caller, items: list[Item]) -> list[Item]:
    """``items`` with output items of stored responses in the place of references to them, where they are known."""
    outputs: dict[str, list[Item]] = {}
    found: list[Item] = []
    for item in items:
        name = response_of(item.get("id")) if item["type"] == REFERENCE else None
        if name is None:
            found.append(item)
            continue
        if name not in outputs:
            record = await find(server, caller, name)
            outputs[name] = [] if record is None else record.response["output"]
        found.append(next((output for output in outputs[name] if output["id"] == item["id"]), item))
    return found


def _background(request: Request) -> BackgroundResponses:
    responses: BackgroundResponses = request.app.state.background_responses
    return responses


RESPONSE = Dialect(decoder, _translate, without_effect)
ENDPOINTS = [
    RESPONSE.endpoint(PATH, "Answer a conversation, and keep the answer", "create_response"),
    Endpoint("POST", PATH + "/input_tokens", count_tokens, "Count the tokens of a conversation", decoder.documented),
    Endpoint(
        "POST", PATH + "/render", render_response, "A conversation as token ids to generate from", decoder.documented
    ),
    Endpoint("GET", PATH + "/{response_id}", retrieve_response, "A response that was kept, whole or as a stream"),
    Endpoint("DELETE", PATH + "/{response_id}", delete_response, "Forget a response"),
    Endpoint("GET", PATH + "/{response_id}/input_items", list_input_items, "The items that a response follows"),
    Endpoint("POST", PATH + "/{response_id}/cancel", cancel_response, "End a response in the background"),
]
