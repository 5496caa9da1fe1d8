"""Responses that are computed independently of any connection."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.applications import Starlette

from octavo.errors import CANCELLATIONS, RequestError, Unavailable
from octavo_server.dialects.chat_reply import ChatReply, chat_request
from octavo_server.dialects.responses.answer import end_status, ended, failed
from octavo_server.dialects.responses.background_stream import LiveResponse
from octavo_server.dialects.responses.body import PATH, translated
from octavo_server.dialects.responses.events import add_output
from octavo_server.dialects.responses.stored_responses import KIND, PENDING, PendingResponse, Record, item_of, keep
from octavo_server.durable.background_jobs import inner_request, retry_while_unavailable
from octavo_server.durable.own_requests import admit_inner, can_continue, end_inner
from octavo_server.durable.store import StoredItem, decoded
from octavo_server.http.error_responses import UnexpectedError
from octavo_server.http.response import attended
from octavo_server.services import ServerServices
from octavo_server.tenants.api_keys import Caller

logger = logging.getLogger(__name__)


class BackgroundResponses:
    """The unfinished background responses of this server, by id."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: ServerServices = app.state.services
        self.live: dict[str, LiveResponse] = {}
        self._is_resumed = asyncio.Event()
        """Set once what an earlier process left unfinished is in ``live``."""

    async def begin(self, caller: Caller, pending: PendingResponse) -> LiveResponse:
        """Store a new response, and compute it. Raises ``QueueFull``, ``StorageFull`` or ``StorageUnavailable``."""
        self._server.jobs.check_room(caller.name)
        name = pending.record.id
        items = [StoredItem(PENDING, name, msgspec.json.encode(pending)), item_of(pending.record)]
        await self._server.store.put_all(caller.name, items)
        return self._start(caller, pending)

    async def resume(self) -> None:
        """Continue what an earlier process left unfinished."""
        services, own = self._server, set(self.live)  # before the list is read: they may end meanwhile
        for row, pending in decoded(PENDING, await services.store.list(PENDING), PendingResponse):
            if row.id in own or row.id in self.live:
                continue
            caller = services.keys.caller(row.owner)
            value = await services.store.get(KIND, row.id, row.owner)
            latest = [] if value is None else [row._replace(value=value)]
            record = pending.record = next((found for _, found in decoded(KIND, latest, Record)), pending.record)
            if record.is_finished:
                services.jobs.start(record.id, self._keep_end(caller, LiveResponse(record)), row.owner)
            else:
                self._start(caller, pending)
        self._is_resumed.set()

    def _start(self, caller: Caller, pending: PendingResponse) -> LiveResponse:
        live = self.live[pending.record.id] = LiveResponse(pending.record)
        self._server.jobs.start(pending.record.id, self._run(caller, pending, live), caller.name)
        return live

    async def cancel(self, caller: Caller, record: Record) -> Record:
        """End a response with what was computed of it; returns the response as it is then."""
        if not record.is_finished:
            await self._is_resumed.wait()
        live = self.live.get(record.id)
        if live is None or not await self._server.jobs.cancel(record.id):
            return record
        end_inner(self._server, caller, record.id)
        record = live.record
        if not record.is_finished:
            record.deltas = add_output(record.response, live.pieces, "incomplete")
            record.response["status"] = "cancelled"
        await self._server.jobs.settle(record.id, self._keep_end(caller, live), caller.name)
        return record

    async def delete(self, caller: Caller, name: str) -> bool:
        """Forget a response, and stop its computation; returns whether the caller has it."""
        services = self._server
        if name not in self.live:
            await self._is_resumed.wait()

        async def forget() -> bool:
            await services.store.delete(PENDING, name, caller.name)
            return await services.store.delete(KIND, name, caller.name)

        # Delete first, so that the job continues if that fails; then again, as the job may have stored it since.
        if not await forget():
            return False
        if await services.jobs.cancel(name):
            end_inner(self._server, caller, name)
            await forget()
        if (live := self.live.pop(name, None)) is not None:
            live.interrupt()
        return True

    async def _run(self, caller: Caller, pending: PendingResponse, live: LiveResponse) -> None:
        """Compute a response and store it."""
        record = pending.record
        try:
            await self._compute(caller, pending, live)
            await self._keep_end(caller, live)
        except CANCELLATIONS:
            raise
        except BaseException:
            self.live.pop(record.id, None)
            live.interrupt()
            raise

    async def _keep_end(self, caller: Caller, live: LiveResponse) -> None:
        """Store a finished response, retrying until the store has room."""
        services, record = self._server, live.record
        await retry_while_unavailable(lambda: keep(services, caller, record))
        await retry_while_unavailable(lambda: services.store.delete(PENDING, record.id, caller.name))
        end_inner(self._server, caller, record.id)
        live.finish()
        self.live.pop(record.id, None)

    async def _compute(self, caller: Caller, pending: PendingResponse, live: LiveResponse) -> None:
        """Compute the reply, retrying while the server is full or shutting down."""
        record = pending.record

        async def attempt() -> None:
            try:
                await self._attempt(caller, pending, live)
            except Unavailable:
                live.interrupt()
                raise

        try:
            await retry_while_unavailable(attempt)
        except RequestError as error:
            record.deltas = add_output(record.response, live.pieces, "incomplete")
            failed(record.response, error)
        except CANCELLATIONS:
            raise
        except BaseException:
            logger.exception("%s failed", record.id)
            record.deltas = add_output(record.response, live.pieces, "incomplete")
            failed(record.response, UnexpectedError())

    async def _attempt(self, caller: Caller, pending: PendingResponse, live: LiveResponse) -> None:
        services, record = self._server.of_model(pending.body.model), pending.record
        request = inner_request(self._app, PATH, b"", caller)
        if record.response["status"] == "in_progress" and not can_continue(services, caller, record.id):
            record.is_restarted = True
        num_earlier = len(record.history) - record.num_inputs
        chat, names, _ = translated(pending.body, record.history, num_earlier, services.takes_images)
        submitted = chat_request(services, chat, request, names)
        with names.in_errors():
            generation = await admit_inner(services, record.id, submitted)
        services.engine.timelines.name(record.id, [choice.request.id for choice in generation.choices])
        reply = ChatReply(services, chat, generation)
        async with attended(reply.generation, request.receive):
            record.response["status"] = "in_progress"
            live.pieces = pieces = await live.follow(reply, is_shown=await self._keep_start(caller, record))
        record.deltas = add_output(record.response, pieces, end_status(reply.choice))
        ended(record.response, reply.choice)

    async def _keep_start(self, caller: Caller, record: Record) -> bool:
        """Store that clients may see output from now on; returns whether it was possible."""
        try:
            await keep(self._server, caller, record)
        except Unavailable:
            return False
        return True
