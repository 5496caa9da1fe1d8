"""Stored responses."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from octavo_server.dialects.responses.body import ResponseBody
from octavo_server.dialects.responses.conversations import CONVERSATION, with_items
from octavo_server.dialects.responses.tools import Item
from octavo_server.durable.store import StoredItem, decode
from octavo_server.http.error_responses import NotFound, Unreadable, printable
from octavo_server.services import ServerServices, server_of
from octavo_server.tenants.api_keys import Caller, caller_of

KIND = "response"
PENDING = "pending_response"
"""Store kind of unfinished background responses."""


USED = {"id": str, "status": str, "model": str, "background": bool, "store": bool, "output": list}
"""Fields of a response that are used again, with their types."""


class Record(msgspec.Struct):
    """A stored response with its input items."""

    response: dict[str, Any]
    history: list[Item]
    deltas: list[int] | None = None
    """Length of each delta of the output's texts, in order; ``None`` with log-probabilities, and in records of earlier
    versions."""
    is_restarted: bool = False
    """Whether the output was begun again after a client may have seen some that differs."""
    num_inputs: int = 0
    """Items at the end of ``history`` that came with the request."""

    def __post_init__(self) -> None:
        """Raises ``ValueError``, which makes a stored record that lacks something unreadable."""
        for name, kind in USED.items():
            if not isinstance(self.response.get(name), kind):
                raise ValueError(f"response: {name}: must be a {kind.__name__}")
        if not all(isinstance(item, dict) for item in self.response["output"]):
            raise ValueError("response: output: must have objects only")

    @property
    def id(self) -> str:
        name: str = self.response["id"]
        return name

    @property
    def is_finished(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")


class PendingResponse(msgspec.Struct):
    """An unfinished background response, stored so that another process can resume it."""

    body: ResponseBody
    record: Record


async def keep(server: ServerServices, caller: Caller, record: Record) -> None:
    """Store ``record``, if it is to be stored, and once it has ended, add input and output to its conversation, unless
    that cannot be read.

    To do it twice is the same as once. Raises ``StorageFull`` or ``StorageUnavailable``.
    """
    items = [item_of(record)] if record.response["store"] else []
    conversation = record.response.get("conversation")
    if conversation is None or record.response["status"] not in ("completed", "incomplete"):
        await server.store.put_all(caller.name, items)
        return
    inputs = record.history[len(record.history) - record.num_inputs :]
    added = partial(with_items, conversation["id"], items=[*inputs, *record.response["output"]])
    try:
        await server.store.update(CONVERSATION, conversation["id"], caller.name, added, also=items)
    except Unreadable:
        await server.store.put_all(caller.name, items)


def item_of(record: Record) -> StoredItem:
    return StoredItem(KIND, record.id, msgspec.json.encode(record))


async def find(server: ServerServices, caller: Caller, name: str) -> Record | None:
    """The caller's response of this id. Raises ``Unreadable``."""
    value = await server.store.get(KIND, name, caller.name)
    return None if value is None else decode(KIND, name, value, Record)


async def requested(request: Request) -> Record:
    """The response that the path names. Raises ``NotFound`` or ``Unreadable``."""
    name = request.path_params["response_id"]
    record = await find(server_of(request), caller_of(request), name)
    if record is None:
        raise not_found(name)
    return record


def not_found(name: str) -> NotFound:
    return NotFound(f"There is no response '{printable(name)}'.", param="response_id")
