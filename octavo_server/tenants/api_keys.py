"""API keys: one in the settings, or several in a file that holds only their digests; their limits, and their shares.

Each line of the file is a key: a name, the SHA-256 of the key in hexadecimal, and optional limits::

    alice 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8 requests_per_minute=60 tokens_per_minute=9000

Keys are long random strings, so an unsalted digest does not reveal them. A key with the word ``admin`` after its digest
has the same rights as that of the setting ``admin_key``.

Limits of requests and tokens per minute are token buckets, as in ITU-T I.371. The cost of a request is known only
afterwards, so an account may go into debt; it is then blocked until the debt is paid, so that the average rate never
exceeds the limit.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from octavo.errors import AuthenticationError, ConfigError, QueueFull
from octavo.server_settings import ServerSettings
from octavo_server.http.error_responses import HTTPRefusal

ADMIN_PREFIX = "/admin/"
REPORTS_PREFIX = "/v1/requests/"
SESSIONS_PATH = "/v1/sessions"
"""Reports on single requests, and on sessions: a key reads those of its own, the admin key those of all."""
SHARED_PATHS = frozenset(
    (
        *("/metrics", "/stats", "/stats/live", "/stats/pace", "/v1/kv_events", "/sleep", "/wake_up"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
        *("/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"),
        *("/v1/unload_lora_adapter", "/unload_lora_adapter"),
        *("/pause", "/resume", "/update_weights", "/reset_prefix_cache", "/abort_requests"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
        *("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"),
        *("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/flush_cache", "/abort_request"),
    )
)
"""What concerns all keys' requests: with several keys, only the admin key may use it."""
CALLER = "octavo.caller"
"""Key of the ASGI scope; the middleware sets it."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_ADMIN = "admin"


MINUTE = 60.0
LEAST_SHARE = 8
"""Items that each API key may hold, even if there are more keys than items."""


def share_of(limit: int, num_holders: int) -> int:
    """What an API key may hold beyond a ``limit`` of all, when ``num_holders`` keys hold something."""
    return min(limit, max(LEAST_SHARE, limit // max(1, num_holders)))


def has_share(held: Mapping[str, int], owner: str, count: int, limit: int) -> bool:
    """Whether ``owner`` may hold ``count`` more, when each API key holds ``held``.

    A key may hold all of ``limit`` while there is room. When there is none, each key still gets its share, so that one
    that took everything delays no other. So with ``n`` keys, all hold at most ``limit * (1 + 1/2 + ... + 1/n)``, or
    ``LEAST_SHARE`` each if that is more.
    """
    num_holders = len(held.keys() | {owner})
    return sum(held.values()) + count <= limit or held.get(owner, 0) + count <= share_of(limit, num_holders)


class Bucket:
    """A token bucket with a capacity of one minute; initially full."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._time = 0.0

    def wait(self, now: float, needed: float) -> float:
        """Seconds until the level reaches ``needed``; 0 if it already has."""
        self._fill(now)
        return max(0.0, (needed - self._level) * MINUTE / self.per_minute)

    def take(self, now: float, amount: float) -> None:
        """Remove ``amount``; the level may become negative."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        if self._time:
            self._level = min(self.per_minute, self._level + (now - self._time) * self.per_minute / MINUTE)
        self._time = now


class Account:
    """Usage and rate limits of one API key."""

    def __init__(self, requests_per_minute: int | None = None, tokens_per_minute: int | None = None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.limit(requests_per_minute, tokens_per_minute)

    def limit(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Set the rates; ``None`` = unlimited."""
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)

    def admit(self) -> None:
        """Count one request. Raises ``QueueFull`` with ``retry_after`` when over a limit."""
        now = time.monotonic()
        for bucket, what, needed in ((self._requests, "requests", 1.0), (self._tokens, "tokens", 1.0)):
            wait = 0.0 if bucket is None else bucket.wait(now, needed)
            if bucket is not None and wait > 0:
                message = f"This API key may use {bucket.per_minute:g} {what} a minute; try again later."
                raise QueueFull(message, retry_after=math.ceil(wait))
        if self._requests is not None:
            self._requests.take(now, 1)
        self.num_requests += 1

    def charge(self, num_tokens: int) -> None:
        """Count tokens of a prompt or of an output."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(time.monotonic(), num_tokens)


@dataclass(frozen=True)
class Caller:
    """An API key's owner. A server without keys has one caller, with an empty name."""

    name: str = ""
    sees_all: bool = False
    """Whether it may read reports on other callers' requests."""
    account: Account = field(default_factory=Account)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(CALLER) or Caller()
    return caller


@dataclass(frozen=True)
class Entry:
    """One line of the key file."""

    name: str
    digest: bytes
    limits: dict[str, int]
    is_admin: bool


class Keys:
    """The API keys of a server. Without keys all requests are allowed, except to admin paths."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises ``ConfigError`` for a key file that cannot be read or has an invalid line."""
        self._file = None if settings.api_key_file is None else Path(settings.api_key_file).expanduser()
        self._admin = None if settings.admin_key is None else _digest(settings.admin_key.encode())
        self._admins: list[bytes] = []
        self._own = None if settings.api_key is None else _digest(settings.api_key.encode())
        self._callers: dict[str, Caller] = {"": Caller(sees_all=not self.are_asked_for)}
        self._entries: list[tuple[bytes, Caller]] = []
        self.load()

    def load(self) -> None:
        """Load or reload the file; names still in it keep their usage counts. Raises ``ConfigError``."""
        found = [] if self._file is None else _read(self._file)
        entries = [] if self._own is None else [(self._own, self._callers[""])]
        for entry in found:
            caller = self._callers.setdefault(entry.name, Caller(entry.name))
            caller.account.limit(entry.limits.get(_LIMITS[0]), entry.limits.get(_LIMITS[1]))
            entries.append((entry.digest, caller))
        self._entries = entries
        self._admins = [entry.digest for entry in found if entry.is_admin]
        if self._admin is not None:
            self._admins.append(self._admin)

    @property
    def are_asked_for(self) -> bool:
        return self._own is not None or self._file is not None

    @property
    def has_admin(self) -> bool:
        """Whether there is a key with the rights of ``admin_key``."""
        return bool(self._admins)

    def caller(self, name: str) -> Caller:
        """The caller of this name, for background work on its behalf."""
        return self._callers.get(name) or Caller(name)

    def usage(self) -> list[dict[str, str | int]]:
        """Requests and tokens of each caller since the start."""
        return [
            {"name": name, "num_requests": caller.account.num_requests, "num_tokens": caller.account.num_tokens}
            for name, caller in sorted(self._callers.items())
        ]

    def check(self, path: str, secret: bytes | None) -> Caller:
        """The caller with the key ``secret``. Raises ``RequestError`` unless it may use ``path``."""
        if path.startswith(ADMIN_PREFIX):
            return self._check_admin(secret)
        is_shared = path.rstrip("/") in SHARED_PATHS
        is_report = path.startswith(REPORTS_PREFIX) or path.rstrip("/") == SESSIONS_PATH
        if (is_shared or is_report) and self._is_admin(secret):
            return Caller(sees_all=True)
        if not self.are_asked_for:
            return self._callers[""]
        if secret is None:
            raise AuthenticationError("You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.")
        digest = _digest(secret)
        found = None
        # Compare digests, with every key, so that timing reveals nothing about the keys.
        for known, caller in self._entries:
            if hmac.compare_digest(digest, known):
                found = caller
        if found is None:
            raise AuthenticationError("Incorrect API key provided.")
        if is_shared and len(self._entries) > 1:
            message = f"{path} concerns the requests of all keys, so it needs the admin key."
            raise HTTPRefusal(403, message, "permission_denied")
        return found

    def _check_admin(self, secret: bytes | None) -> Caller:
        if not self._admins:
            raise HTTPRefusal(403, "This server has no admin key, so this is disabled.", "permission_denied")
        if not self._is_admin(secret):
            raise AuthenticationError("This needs the admin key.")
        return Caller(sees_all=True)

    def _is_admin(self, secret: bytes | None) -> bool:
        if secret is None:
            return False
        digest = _digest(secret)
        return sum(hmac.compare_digest(digest, known) for known in self._admins) > 0


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _read(path: Path) -> list[Entry]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path} cannot be read: {error}") from None
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            entries.append(_entry(words, f"api_key_file: {path}, line {number}"))
    if len({entry.name for entry in entries}) < len(entries):
        raise ConfigError(f"api_key_file: {path} has a name twice")
    return entries


def _entry(words: list[str], where: str) -> Entry:
    """Parse a line; error messages never repeat its content, which might be a plain key."""
    if len(words) < 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
        raise ConfigError(f"{where}: must be a name, a space, and the SHA-256 of the key as 64 hexadecimal digits")
    limits = {}
    for word in words[2:]:
        if word == _ADMIN:
            continue
        name, _, value = word.partition("=")
        if name not in _LIMITS or not value.isdigit() or not 1 <= int(value) <= 10**12:
            allowed = f"{_ADMIN}, and {' and '.join(_LIMITS)}, each =NUMBER from 1"
            raise ConfigError(f"{where}: after the digest there may be {allowed}")
        limits[name] = int(value)
    return Entry(words[0], bytes.fromhex(words[1]), limits, _ADMIN in words[2:])
