"""/v1/conversations: items that responses are added to, and follow.

https://platform.openai.com/docs/api-reference/conversations
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo_server.dialects.history import LeftOut
from octavo_server.dialects.responses.body import check_metadata
from octavo_server.dialects.responses.items import REFERENCE, ItemMessages, input_items, new_items
from octavo_server.dialects.responses.tools import Item
from octavo_server.durable.store import decode
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import NotFound, printable
from octavo_server.http.paging import page_of_items
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import ServerServices, server_of
from octavo_server.tenants.api_keys import Caller, caller_of

CONVERSATION = "conversation"
"""Store kind."""
PATH = "/v1/conversations"
MAX_ADDED = 20
"""Most items that a request can add, as in the API; a response adds all its input and output."""
MAX_BYTES = 4 << 20
"""Most bytes of a conversation before a response or an item is added: it is read and written as a whole."""
_FULL = f"A conversation has at most {MAX_BYTES} bytes; begin another one."


class StoredConversation(msgspec.Struct):
    """A stored conversation."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: list[Item]

    def __post_init__(self) -> None:
        """Raises ``ValueError``, which makes a stored conversation that lacks something unreadable."""
        if not all(isinstance(item.get("id"), str) for item in self.items):
            raise ValueError("items: each must have an id")

    def shown(self) -> dict[str, Any]:
        """The API's conversation object."""
        named = {"id": self.id, "object": "conversation", "created_at": self.created_at}
        return {**named, "metadata": self.metadata}


class ConversationBody(msgspec.Struct, kw_only=True):
    """The body of a request to create a conversation."""

    items: list[Item] = []
    metadata: dict[str, str] = {}


class MetadataBody(msgspec.Struct, kw_only=True):
    """The body of a request to change a conversation."""

    metadata: dict[str, str]


class ItemsBody(msgspec.Struct, kw_only=True):
    """The body of a request to add items."""

    items: list[Item]


_conversations = BodyDecoder(ConversationBody)
_metadata = BodyDecoder(MetadataBody)
_items = BodyDecoder(ItemsBody)


async def create_conversation(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, _conversations)
    check_metadata(body.metadata)
    items = _checked(body.items) if body.items else []
    conversation = StoredConversation(f"conv_{uuid.uuid4().hex}", int(time.time()), body.metadata, items)
    _check_size(b"", items)
    value = msgspec.json.encode(conversation)
    await services.server.store.put(CONVERSATION, conversation.id, caller_of(request).name, value)
    return json_response(conversation.shown(), headers)


async def retrieve_conversation(request: Request) -> Response:
    return json_response((await _requested(request)).shown(), {})


async def update_conversation(request: Request) -> Response:
    _, body, headers = await server_of(request).read(request, _metadata)
    check_metadata(body.metadata)
    changed = await _change(request, partial(_with_metadata, _name(request), metadata=body.metadata))
    return json_response(changed.shown(), headers)


async def delete_conversation(request: Request) -> Response:
    name = _name(request)
    if not await server_of(request).store.delete(CONVERSATION, name, caller_of(request).name):
        raise not_found(name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True}, {})


async def list_items(request: Request) -> Response:
    return json_response(page_of_items(request, (await _requested(request)).items), {})


async def add_items(request: Request) -> Response:
    _, body, headers = await server_of(request).read(request, _items)
    items = _checked(body.items)

    def change(value: bytes) -> bytes:
        _check_size(value, items)
        return with_items(_name(request), value, items)

    await _change(request, change)
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": items, **ends}, headers)


async def retrieve_item(request: Request) -> Response:
    name = request.path_params["item_id"]
    for item in (await _requested(request)).items:
        if item["id"] == name:
            return json_response(item, {})
    raise _no_item(name)


async def delete_item(request: Request) -> Response:
    changed = await _change(request, partial(_without_item, _name(request), item=request.path_params["item_id"]))
    return json_response(changed.shown(), {})


_ONE = PATH + "/{conversation_id}"
ENDPOINTS = [
    Endpoint("POST", PATH, create_conversation, "Begin a conversation", ConversationBody),
    Endpoint("GET", _ONE, retrieve_conversation, "Describe a conversation"),
    Endpoint("POST", _ONE, update_conversation, "Change the metadata of a conversation", MetadataBody),
    Endpoint("DELETE", _ONE, delete_conversation, "Forget a conversation"),
    Endpoint("GET", _ONE + "/items", list_items, "The items of a conversation"),
    Endpoint("POST", _ONE + "/items", add_items, "Add items to a conversation", ItemsBody),
    Endpoint("GET", _ONE + "/items/{item_id}", retrieve_item, "An item of a conversation"),
    Endpoint("DELETE", _ONE + "/items/{item_id}", delete_item, "Remove an item from a conversation"),
]


# --- the store ---


async def items_of(server: ServerServices, caller: Caller, name: str) -> list[Item]:
    """The items of the conversation that a response follows. Raises ``RequestError``."""
    value = await server.store.get(CONVERSATION, name, caller.name)
    if value is None:
        raise not_found(name, "conversation")
    if len(value) > MAX_BYTES:
        raise InvalidParameter("conversation", _FULL)
    return _decode(name, value).items


def with_items(name: str, value: bytes, items: list[Item]) -> bytes:
    """A stored conversation with ``items`` at its end, less those that it has. Raises ``Unreadable``."""
    conversation = _decode(name, value)
    known = {item["id"] for item in conversation.items}
    conversation.items += [item for item in items if item["id"] not in known]
    return msgspec.json.encode(conversation)


def _check_size(value: bytes, added: list[Item]) -> None:
    """Raise ``InvalidParameter`` if a stored conversation has no room for further items."""
    if len(value) + len(msgspec.json.encode(added)) > MAX_BYTES:
        raise InvalidParameter("items", _FULL)


def not_found(name: str, param: str = "conversation_id") -> NotFound:
    return NotFound(f"There is no conversation '{printable(name)}'.", param=param)


def _with_metadata(name: str, value: bytes, metadata: dict[str, str]) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(_decode(name, value), metadata=metadata))


def _without_item(name: str, value: bytes, item: str) -> bytes:
    conversation = _decode(name, value)
    kept = [each for each in conversation.items if each["id"] != item]
    if len(kept) == len(conversation.items):
        raise _no_item(item)
    return msgspec.json.encode(msgspec.structs.replace(conversation, items=kept))


def _no_item(name: str) -> NotFound:
    return NotFound(f"The conversation has no item '{printable(name)}'.", param="item_id")


async def _requested(request: Request) -> StoredConversation:
    name = _name(request)
    value = await server_of(request).store.get(CONVERSATION, name, caller_of(request).name)
    if value is None:
        raise not_found(name)
    return _decode(name, value)


async def _change(request: Request, change: Callable[[bytes], bytes]) -> StoredConversation:
    """The conversation that the path names, after ``change`` of its stored form. Raises ``RequestError``."""
    name = _name(request)
    value = await server_of(request).store.update(CONVERSATION, name, caller_of(request).name, change)
    if value is None:
        raise not_found(name)
    return _decode(name, value)


def _decode(name: str, value: bytes) -> StoredConversation:
    return decode(CONVERSATION, name, value, StoredConversation)


def _name(request: Request) -> str:
    name: str = request.path_params["conversation_id"]
    return name


def _checked(items: list[Item]) -> list[Item]:
    """Items of a request as a conversation has them. Raises ``RequestError``."""
    found = input_items(items)
    if len(found) > MAX_ADDED:
        raise InvalidParameter("items", f"'items' takes at most {MAX_ADDED} items.")
    for place, item in enumerate(found):
        if item["type"] == REFERENCE:
            raise InvalidParameter("items", f"'items[{place}]' refers to another item; give the item itself.")
    ItemMessages(found, LeftOut(), "items")
    return new_items(found)
