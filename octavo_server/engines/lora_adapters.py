"""LoRA adapters that a server knows: their paths, content digests and cache salts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Container
from dataclasses import dataclass

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import ConfigError, InvalidParameter, ModelNotFound, OctavoError
from octavo.weights.adapter_files import digest
from octavo_server.engines import wire
from octavo_server.engines.engine_link import EngineLink

ALIAS_DIGITS = 16
MAX_DEATHS = 2
"""After this many consecutive engine deaths while loading an adapter, the next process skips it."""

logger = logging.getLogger("octavo.server")


@dataclass
class LoadedAdapter:
    """An adapter's path and content digest at its first load."""

    path: str
    digest: str
    """SHA-256 over the contents of ``FILES``, in hexadecimal."""
    alias: str
    """Its name in the engine: that in the API, for those of the settings, or ``alias_of`` it."""
    deaths: int = 0
    """Engine processes that died while loading it, since its last successful load."""


class AdapterTable:
    """Adapters by name. Raises ``ConfigError`` if a configured adapter cannot be read."""

    def __init__(self, settings: ModelSettings) -> None:
        self.is_enabled = settings.enable_lora
        self.paths = parse_lora_modules(settings.lora_modules) if settings.enable_lora else {}
        """Name to folder of each served adapter; a request selects one by its ``model`` field."""
        self.known = {name: LoadedAdapter(path, digest(path), name) for name, path in self.paths.items()}
        """Adapters in ``paths``, plus those that the current engine process failed to load."""
        self.retired: dict[str, LoadedAdapter] = {}
        """By alias, those that the engine still has for the requests that began with them."""

    def has_loaded(self, alias: str) -> bool:
        """Whether the engine has this one, be it retired."""
        return alias in self.retired or any(self.known[name].alias == alias for name in self.paths)

    def add(self, name: str, path: str, content: str, alias: str = "") -> None:
        """Register a loaded adapter, in place of an earlier one; ``content`` is the digest of its files.

        ``alias`` is that of one which was replaced and comes back, by default ``alias_of`` it.
        """
        if name in self.known:
            self.remove(name)
        self.paths[name] = path
        self.known[name] = added = LoadedAdapter(path, content, alias or alias_of(name, content))
        self.retired.pop(added.alias, None)

    def remove(self, name: str) -> None:
        self.paths.pop(name, None)
        adapter = self.known.pop(name)
        self.retired[adapter.alias] = adapter

    def alias(self, name: str) -> str:
        """What a request for ``name`` names in the engine; "": the base model."""
        return self.known[name].alias if name in self.paths else ""

    async def load(
        self, link: EngineLink, name: str, path: str, content: str, alias: str, used: Collection[str]
    ) -> None:
        """Unload those that are not ``used``, have the engine load this one if it has not, and serve it as for ``add``.

        Raises ``InvalidParameter``.
        """
        alias = alias or alias_of(name, content)
        await self.unload_unused(link, {alias, *used})
        order = wire.LoadAdapter(link.generation, alias, path)
        if not self.has_loaded(alias) and (error := await link.change_adapter(order)):
            raise InvalidParameter("lora_path", error)
        self.add(name, path, content, alias)

    async def unload_unused(self, link: EngineLink, used: Container[str]) -> None:
        """Unload the adapters that were replaced or unloaded, and that no request uses."""
        for alias in self.take_unused(used):
            await link.change_adapter(wire.UnloadAdapter(link.generation, alias))

    def take_unused(self, used: Container[str]) -> list[str]:
        """Forget the retired adapters that no request uses; return their aliases."""
        found = [alias for alias in self.retired if alias not in used]
        for alias in found:
            del self.retired[alias]
        return found

    def take_back(self, name: str) -> None:
        """Serve an adapter again after the current engine process loaded it."""
        self.paths[name] = self.known[name].path

    def leave_out(self, name: str) -> None:
        """Stop serving an adapter that the current engine process could not load."""
        self.paths.pop(name, None)

    async def load_all_again(self, link: EngineLink) -> None:
        """Load what the previous engine process had; leave out what fails. Raises ``OctavoError`` if it ends."""
        for name, adapter in list(self.known.items()):
            error = await _load_again(link, adapter)
            if name not in self.known:  # unloaded meanwhile
                await link.change_adapter(wire.UnloadAdapter(link.generation, adapter.alias))
            elif error:
                logger.error("the adapter %s is left out: %s", name, error)
                self.leave_out(name)
            else:
                self.take_back(name)
        for alias, adapter in list(self.retired.items()):
            if error := await _load_again(link, adapter):
                logger.error("the replaced adapter %s is left out: %s", alias, error)
                del self.retired[alias]

    def check(self, name: str) -> None:
        """Raise ``ModelNotFound`` for an adapter that was left out."""
        if name in self.known and name not in self.paths:
            raise _left_out(name)

    def check_loaded(self, alias: str) -> None:
        """Raise ``ModelNotFound`` for a request that began with an adapter which the engine has no more."""
        if alias and not self.has_loaded(alias):
            raise _left_out(adapter_name(alias))

    def salted(self, name: str, salt: str) -> str:
        """The prefix-cache salt of a request for adapter ``name`` ("" = base model): equal contents share blocks.

        The digest precedes the colon, so no client salt can collide with another adapter's.
        """
        content = self.known[name].digest if name in self.known else ""
        return f"{content}:{salt}" if self.is_enabled else salt


def alias_of(name: str, content: str) -> str:
    """The name in the engine of an adapter with these contents, the same in all engines."""
    return f"{name},{content[:ALIAS_DIGITS]}"


def adapter_name(alias: str) -> str:
    """The name in the API; names have no comma."""
    return alias.partition(",")[0]


def _left_out(name: str) -> ModelNotFound:
    message = f"The adapter `{name}` could not be loaded again when the engine was restarted, and is left out."
    return ModelNotFound(message, param="model")


async def _load_again(link: EngineLink, adapter: LoadedAdapter) -> str:
    """Load an adapter into another engine process if its files are unchanged; return the error message, or "".

    Raises ``OctavoError`` if the process ends.
    """
    if adapter.deaths >= MAX_DEATHS:
        adapter.deaths = 0  # retried at the next restart
        return "engine processes die while they load it"
    try:
        content = await asyncio.to_thread(digest, adapter.path)
    except ConfigError as unreadable:
        return str(unreadable)
    if content != adapter.digest:
        return f"{adapter.path}: its files have changed since it was loaded"
    error = await link.change_adapter(wire.LoadAdapter(link.generation, adapter.alias, adapter.path))
    if link.closed.is_set():
        adapter.deaths += 1
        raise OctavoError(f"the engine process ended while it loaded the adapter {adapter_name(adapter.alias)}")
    if not error:
        adapter.deaths = 0
    return error
