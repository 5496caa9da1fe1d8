"""LoRA adapters that a server knows: their paths, content digests and cache salts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import ConfigError, ModelNotFound, OctavoError
from octavo.weights.adapter_files import digest
from octavo_server.engines import wire
from octavo_server.engines.engine_link import EngineLink

MAX_DEATHS = 2
"""After this many consecutive engine deaths while loading an adapter, the next process skips it."""

logger = logging.getLogger("octavo.server")


@dataclass
class LoadedAdapter:
    """An adapter's path and content digest at its first load."""

    path: str
    digest: str
    """SHA-256 over the contents of ``FILES``, in hexadecimal."""
    deaths: int = 0
    """Engine processes that died while loading it, since its last successful load."""


class AdapterTable:
    """Adapters by name. Raises ``ConfigError`` if a configured adapter cannot be read."""

    def __init__(self, settings: ModelSettings) -> None:
        self.is_enabled = settings.enable_lora
        self.paths = parse_lora_modules(settings.lora_modules) if settings.enable_lora else {}
        """Name to folder of each served adapter; a request selects one by its ``model`` field."""
        self.known = {name: LoadedAdapter(path, digest(path)) for name, path in self.paths.items()}
        """Adapters in ``paths``, plus those that the current engine process failed to load."""

    def add(self, name: str, path: str, content: str) -> None:
        """Register a loaded adapter; ``content`` is the digest of its files."""
        self.paths[name] = path
        self.known[name] = LoadedAdapter(path, content)

    def remove(self, name: str) -> None:
        self.paths.pop(name, None)
        del self.known[name]

    def take_back(self, name: str) -> None:
        """Serve an adapter again after the current engine process loaded it."""
        self.known[name].deaths = 0
        self.paths[name] = self.known[name].path

    def leave_out(self, name: str) -> None:
        """Stop serving an adapter that the current engine process could not load."""
        self.paths.pop(name, None)

    async def load_all_again(self, link: EngineLink) -> None:
        """Load what the previous engine process had; leave out what fails. Raises ``OctavoError`` if it ends."""
        for name, adapter in list(self.known.items()):
            error = await _load_again(link, name, adapter)
            if link.closed.is_set():
                adapter.deaths += 1
                raise OctavoError(f"the engine process ended while it loaded the adapter {name}")
            if name not in self.known:  # unloaded meanwhile
                await link.change_adapter(wire.UnloadAdapter(link.generation, name))
            elif error:
                logger.error("the adapter %s is left out: %s", name, error)
                self.leave_out(name)
            else:
                self.take_back(name)

    def check(self, name: str) -> None:
        """Raise ``ModelNotFound`` for an adapter that was left out."""
        if name in self.known and name not in self.paths:
            message = f"The adapter `{name}` could not be loaded again when the engine was restarted, and is left out."
            raise ModelNotFound(message, param="model")

    def salted(self, name: str, salt: str) -> str:
        """The prefix-cache salt of a request for adapter ``name`` ("" = base model): equal contents share blocks.

        The digest precedes the colon, so no client salt can collide with another adapter's.
        """
        content = self.known[name].digest if name in self.known else ""
        return f"{content}:{salt}" if self.is_enabled else salt


async def _load_again(link: EngineLink, name: str, adapter: LoadedAdapter) -> str:
    """Load an adapter into another engine process if its files are unchanged; return the error message, or ""."""
    if adapter.deaths >= MAX_DEATHS:
        adapter.deaths = 0  # retried at the next restart
        return "engine processes die while they load it"
    try:
        content = await asyncio.to_thread(digest, adapter.path)
    except ConfigError as error:
        return str(error)
    if content != adapter.digest:
        return f"{adapter.path}: its files have changed since it was loaded"
    return await link.change_adapter(wire.LoadAdapter(link.generation, name, adapter.path))
