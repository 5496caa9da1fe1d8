"""The journal of durable requests, ``--journal``: records them, finds them by key, continues them after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import platform
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request

import octavo
from octavo.config import EngineConfig, ServeConfig, to_flat
from octavo.errors import ConfigError, InvalidParameter, ModelNotFound, RequestError, Unavailable
from octavo.setting import SECRETS
from octavo.system.garbage_collection import without_collections
from octavo.telemetry.logs import PACKAGES
from octavo.text.tokenizer import Tokenizer
from octavo.types import EngineInfo
from octavo_server.admission import Admission, ClientRequest
from octavo_server.durable import reader
from octavo_server.durable.records import UNREADABLE, Forgotten, Note, RecordBatch, RequestHead
from octavo_server.durable.recovery import read_logs
from octavo_server.durable.requests import DurableRequest, begin_of, head_of
from octavo_server.durable.synced_log import Damage, LogFile, LogWriter, log_files
from octavo_server.engines.engine_client import EngineClient
from octavo_server.engines.lora_adapters import adapter_name
from octavo_server.engines.request_table import GRAMMARS
from octavo_server.front.takeover import Predecessor
from octavo_server.generation import IDEMPOTENCY_KEY, Generation
from octavo_server.tenants.api_keys import Caller, caller_of

MAX_KEY = 255
ROLL_BYTES = 64 << 20
"""A file that is larger, and larger than twice what it must hold, is replaced by a new one."""
MAX_RETAINED_BYTES = 256 << 20
"""When ended requests take more memory, the oldest of the API key with the most is forgotten early."""
REQUEST_BYTES = 1200
"""What an ended request takes in memory besides its prompts and outputs."""
RECORD_SECONDS = 0.1
"""How long tokens are collected for a record: a thread that writes at each step would compete with its streams."""
REPAIR_SECONDS = 5.0
"""Interval of attempts to write everything again after a write has failed."""
LOCK_SECONDS = 0.05
"""Interval of attempts to claim the folder of a predecessor that ends."""

logger = logging.getLogger("octavo.server")


class KeyReused(RequestError):
    """The idempotency key belongs to a request with another body."""

    status = 422
    code = "idempotency_key_reused"


class StreamUnknown(RequestError):
    """There is nothing to continue under this idempotency key."""

    status = 409
    code = "stream_unknown"


class ServerChanged(RequestError):
    """The request was begun by a server whose tokens may be others."""

    status = 409
    code = "server_changed"


class Journal:
    """All durable requests of this server. Used on the event loop, except ``__init__`` and ``close``."""

    def __init__(
        self,
        folder: Path,
        retention: float,
        config: ServeConfig,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """Read the journal in ``folder``; if a predecessor still uses it, ``take_over`` does later.

        Raises ``ConfigError`` if that fails, or if another server uses it.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self._counts = engine.metrics.journal
        self._config = config
        self._retention = retention
        self._fingerprint = ""
        self._requests: dict[int, DurableRequest] = {}
        self._by_key: dict[tuple[str, str], DurableRequest] = {}
        self._unusable: set[int] = set()
        """Requests that an earlier process began and that this one cannot continue: their tokens may be others."""
        self._ended: dict[str, OrderedDict[int, DurableRequest]] = {}
        """Ended requests by API key, oldest first; a dict would be slow to find its first entry after many removals
        there."""
        self._has_timer = False
        """Whether ``_forget_old`` will be called."""
        self._retained: Counter[str] = Counter()
        """Bytes of ended requests by API key."""
        self._batch: RecordBatch | None = None
        """What was noted since the last record."""
        self._snapshot_bytes = 0
        self._had_grammars = False
        self.folder = folder
        self._predecessor = predecessor
        try:
            self._writer = LogWriter(folder, is_shared=predecessor is not None)
            # A predecessor begins no more than 2**32 requests, and has begun a file since its own start.
            self._number = (self._writer.number + 1) << 32
            if self._writer.is_locked:
                self._requests = self._recover(log_files(folder))
        except BlockingIOError:
            raise ConfigError(f"journal: another server uses {folder}") from None
        except OSError as error:
            raise ConfigError(f"journal: {folder} cannot be used: {error.strerror or error}") from None
        self._is_complete = asyncio.Event()
        """Set once all requests of the folder are known: there is no predecessor, or it ended."""

    # --- recovery ---

    def _recover(self, files: Sequence[LogFile]) -> dict[int, DurableRequest]:
        """The requests in ``files``. Raises ``OSError``."""
        requests: dict[int, DurableRequest] = {}
        damage = Damage()
        with without_collections():  # millions of new objects would make it run all the time
            for found in read_logs(files, damage):
                try:
                    requests[found.head.number] = DurableRequest.restored(self, found, damage)
                except UNREADABLE as error:
                    logger.error("a request of the journal cannot be read and is left out: %s", error)
                    damage.records += 1
        self._counts["damage"] += damage.records
        if damage.records:
            logger.error("the journal in %s is damaged: %d gaps between records", self.folder, damage.records)
        if damage.tail_bytes:
            logger.warning("%d bytes at the end of the journal were not written completely", damage.tail_bytes)
        return requests

    async def resume(self) -> None:
        """Continue the requests that an earlier process left unfinished. The engine must be up."""
        self._fingerprint = await asyncio.to_thread(fingerprint, self._config, self.engine.info)
        self._continue(self._requests.copy())
        if self._writer.is_locked:
            self._is_complete.set()
        self._roll()
        self._repair()

    async def take_over(self) -> None:
        """Continue the requests that the predecessor left unfinished, which has ended or is about to."""
        while not self._writer.is_locked and not self._writer.lock():
            await asyncio.sleep(LOCK_SECONDS)
        if self._is_complete.is_set():
            return
        try:
            files = self._writer.files_of_others()
            self._continue(await asyncio.to_thread(self._recover, files))
            self._roll(files)
        except OSError as error:  # the files stay, for the next server
            logger.error("the journal of the server before this one cannot be read: %s", error)
        self._is_complete.set()

    def _continue(self, recovered: dict[int, DurableRequest]) -> None:
        self._requests |= recovered
        unusable: set[int] = set()
        for number, request in sorted(recovered.items(), key=lambda pair: pair[1].ended_at):
            head = request.head
            self._by_key[head.owner, head.key] = request
            if head.fingerprint != self._fingerprint:
                unusable.add(number)
                continue
            try:
                self._check_adapter(head)
                if not request.submit():
                    unusable.add(number)
                    continue
            except Unavailable:  # this server ends already: the next one continues it
                continue
            except RequestError as error:
                logger.error("a request of the journal cannot be continued: %s", error)
                self._forget(number)
                continue
            self._counts["resumed_request"] += not request.is_ended
        if unusable:
            logger.warning(
                "%d requests are not continued: code, model, weights or settings have changed", len(unusable)
            )
            self._unusable |= unusable
            asyncio.get_running_loop().call_later(self._retention, self._forget_all, unusable)
        if count := self._counts["resumed_request"]:
            logger.info("%d requests of the journal continue", count)

    def has_request(self, owner: str, key: str) -> bool:
        """Whether there is a request with this key."""
        return (owner, key) in self._by_key

    async def _ask_predecessor(self, owner: str, key: str) -> None:
        """If a request of the predecessor has this key, wait until it is among those of this journal."""
        if self._is_complete.is_set() or self._predecessor is None or self.has_request(owner, key):
            return
        if await self._predecessor.has_request(self.folder, owner, key):
            await self._is_complete.wait()

    def _check_adapter(self, head: RequestHead) -> None:
        """Raise ``ModelNotFound`` unless the request's adapter is served, with the same content."""
        adapters, name = self.engine.adapters, adapter_name(head.adapter)
        is_served = not name or name in adapters.paths
        if not is_served or not head.cache_salt.startswith(adapters.salted(name, "")):
            raise ModelNotFound(f"The adapter `{name}` is not served now, or has changed.", param="model")

    # --- requests ---

    async def admit(
        self, request: Request, body: msgspec.Struct, client_request: ClientRequest, admission: Admission
    ) -> Generation:
        """A generation for a client's request with an idempotency key: a new one, or one that reads an earlier one.

        The caller must call ``Reader.begin`` of the result's ``reader``. Raises ``RequestError``.
        """
        key = _checked(request.headers[IDEMPOTENCY_KEY])
        content = request.url.path.encode() + b"\0" + msgspec.json.encode(body)
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        is_resumed = reader.HEADER in request.headers
        await self._ask_predecessor(caller_of(request).name, key)
        found = self._by_key.get((caller_of(request).name, key))
        if found is None and is_resumed:
            message = "The server has no request with this 'Idempotency-Key' any more, whose stream it could continue."
            raise StreamUnknown(message, param="Idempotency-Key")
        if found is not None and found.head.body != digest:
            raise _reused()
        return await self.admit_once(caller_of(request), key, digest, client_request, admission)

    async def admit_once(
        self, caller: Caller, key: str, digest: str, client_request: ClientRequest, admission: Admission
    ) -> Generation:
        """A generation that reads the request of this key, which is begun if there is none."""
        found = self._by_key.get((caller.name, key))
        if found is None:

            def begin(prepared: Generation) -> Generation:
                nonlocal found
                found = self._by_key.get((caller.name, key))  # another connection may have been faster
                if found is not None and found.head.body != digest:
                    raise _reused()
                if found is not None:
                    return found.new_reader().generation
                found = self._begin(caller, key, digest, client_request, prepared)
                return found.first_reader(prepared).generation

            if client_request.grammar is not None and not self._had_grammars:
                self._had_grammars = True
                with contextlib.suppress(OSError):  # it only makes the next start slower
                    (self.folder / GRAMMARS).touch()
            generation = await admission.admit(client_request, begin)
            await self.synced()
            return generation
        if found.head.number in self._unusable:
            message = (
                "This request was begun by a server with another version, model, weights or settings, whose text may "
                "differ, so it cannot be continued. Send it again with another 'Idempotency-Key'."
            )
            raise ServerChanged(message, param="Idempotency-Key")
        return found.new_reader().generation

    def _begin(
        self, caller: Caller, key: str, digest: str, client_request: ClientRequest, prepared: Generation
    ) -> DurableRequest:
        self._number += 1
        head = head_of(self._number, caller.name, key, digest, self._fingerprint, prepared)
        begin = begin_of(prepared, client_request)
        request = DurableRequest(self, head, begin, caller.account)
        self._requests[head.number] = self._by_key[caller.name, key] = request
        self.note((head, begin))
        try:
            request.submit()
        except BaseException:
            self._forget(head.number)
            raise
        return request

    def can_continue(self, caller: Caller, key: str) -> bool:
        """Whether ``admit_once`` continues a request of this key; one of a server that has changed is dropped."""
        found = self._by_key.get((caller.name, key))
        if found is None or found.head.number not in self._unusable:
            return found is not None
        self.cancel(caller, key)
        return False

    def cancel(self, caller: Caller, key: str) -> bool:
        """End the request of a key, and forget it; return whether there was one."""
        if (request := self._by_key.get((caller.name, key))) is None:
            return False
        request.cancel()
        self._forget(request.head.number)
        return True

    async def cancel_of_client(self, caller: Caller, key: str) -> bool:
        """``cancel`` with the header's key, also if a predecessor computes it. Raises ``InvalidParameter``."""
        key = _checked(key)
        await self._ask_predecessor(caller.name, key)
        is_known = self.cancel(caller, key)
        if is_known:
            await self.synced()  # no server continues it
        return is_known

    def cancel_all(self, caller: Caller, prefix: str) -> None:
        """End all requests of the caller whose keys begin with ``prefix``."""
        for owner, key in list(self._by_key):
            if owner == caller.name and key.startswith(prefix):
                self.cancel(caller, key)

    def _forget_all(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._forget(number)

    def _forget(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        self._unusable.discard(number)
        self.note(Forgotten(number))
        head = request.head
        if self._by_key.get((head.owner, head.key)) is request:
            del self._by_key[head.owner, head.key]
        ended = self._ended.get(head.owner)
        if ended is not None and ended.pop(number, None) is not None:
            self._retained[head.owner] -= request.size + REQUEST_BYTES
            if not ended:
                del self._ended[head.owner], self._retained[head.owner]

    def ended(self, request: DurableRequest) -> None:
        """A request ended: it is kept for the retention time."""
        number = request.head.number
        if number not in self._requests:
            return
        loop = asyncio.get_running_loop()
        age = max(0.0, time.time() - request.ended_at)
        request.forget_at = loop.time() + max(0.0, self._retention - age)
        owner = request.head.owner
        self._ended.setdefault(owner, OrderedDict())[number] = request
        self._retained[owner] += request.size + REQUEST_BYTES
        while self._retained.total() > MAX_RETAINED_BYTES:
            largest = max(self._ended, key=self._retained.__getitem__)
            self._forget(next(iter(self._ended[largest])))
        if not self._has_timer:
            self._has_timer = True
            loop.call_at(request.forget_at, self._forget_old)

    def _forget_old(self) -> None:
        """Forget what was kept long enough. One timer does it, as all are kept equally long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for ended in list(self._ended.values()):
            while ended and next(iter(ended.values())).forget_at <= now:
                self._forget(next(iter(ended)))
        self._has_timer = bool(self._ended)
        if self._ended:
            loop.call_at(min(next(iter(ended.values())).forget_at for ended in self._ended.values()), self._forget_old)

    def failed(self, request: DurableRequest) -> None:
        """A request failed: its key can be used again."""
        self._forget(request.head.number)

    # --- the log ---

    def note(self, note: Note) -> None:
        """Record ``note``; see ``RECORD_SECONDS``."""
        (self._batch or self._begin_batch()).add(note)

    def note_tokens(self, number: int, place: int, index: int, tokens: list[int]) -> None:
        """Record a plain output of some tokens."""
        (self._batch or self._begin_batch()).add_tokens(number, place, index, tokens)

    def _begin_batch(self) -> RecordBatch:
        self._batch = batch = RecordBatch()
        asyncio.get_running_loop().call_later(RECORD_SECONDS, self._flush)
        return batch

    def _flush(self) -> None:
        self._write_batch()
        if self._writer.num_bytes > max(ROLL_BYTES, 2 * self._snapshot_bytes):
            self._roll()

    def _write_batch(self) -> None:
        if self._batch is not None:
            self._writer.append(self._batch.encode)
            self._batch = None

    async def synced(self) -> None:
        """Wait until all that was noted before is on disk, or failed to be."""
        self._flush()
        await self._writer.synced()

    def _roll(self, replaced: Sequence[LogFile] = ()) -> None:
        """Begin a new file with what is known now, so that the older ones and ``replaced`` can be deleted."""
        self._batch = None
        records: list[Callable[[], bytes]] = [request.snapshot() for request in self._requests.values()]
        self._snapshot_bytes = sum(request.size for request in self._requests.values())
        self._writer.roll(records, replaced)

    def _repair(self) -> None:
        """From time to time: make the log complete again after a write failed, as on a full disk."""
        self._counts["failed_write"] = self._writer.num_failures
        if self._writer.is_incomplete:
            self._roll()
        asyncio.get_running_loop().call_later(REPAIR_SECONDS, self._repair)

    def close(self) -> None:
        """Write what is pending."""
        self._write_batch()
        self._writer.close()


def of_client(key: str) -> str:
    """The journal's key for a header's: no client has a key of the server's own requests."""
    return ":" + key


def _checked(key: str) -> str:
    """The journal's key for a header's. Raises ``InvalidParameter``."""
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        message = f"'Idempotency-Key' must have 1 to {MAX_KEY} printable ASCII characters."
        raise InvalidParameter("Idempotency-Key", message)
    return of_client(key)


def _reused() -> KeyReused:
    message = "Another request was sent with this 'Idempotency-Key'; each request needs its own."
    return KeyReused(message, param="Idempotency-Key")


CONTENT_BYTES = 64 << 10
"""Of each model file so many bytes at both ends are read, besides its size and time of change."""


def fingerprint(config: ServeConfig, info: EngineInfo) -> str:
    """A digest of the packages' code, the model's files, the settings of engine and texts, and the device."""
    server = config.server
    parts = {
        "code": _code_digest(),
        "model": _files_digest(config.model.model),
        "tokenizer": _files_digest(config.model.tokenizer or ""),
        "settings": {name: value for name, value in to_flat(config, EngineConfig).items() if name not in SECRETS},
        "template": _files_digest(config.model.chat_template or ""),
        "parsers": [server.tool_call_parser, server.reasoning_parser],
        "engine": [info.architecture, info.num_parameters, info.vocab_size, info.dtype, info.device, info.kernels],
        "machine": [platform.machine(), platform.python_version()],
    }
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def _code_digest() -> str:
    root = Path(octavo.__file__).parents[1]
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _files_digest(name: str) -> str:
    """Names, sizes, times of change and both ends of the files at path ``name``, if there are any."""
    path = Path(name)
    files = [path] if path.is_file() else sorted(path.iterdir()) if name and path.is_dir() else []
    found = hashlib.blake2b(name.encode(errors="replace"), digest_size=16)
    for file in filter(Path.is_file, files):
        status = file.stat()
        found.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="replace"))
        with file.open("rb") as content:
            found.update(content.read(CONTENT_BYTES))
            content.seek(max(0, status.st_size - CONTENT_BYTES))
            found.update(content.read(CONTENT_BYTES))
    return found.hexdigest()
