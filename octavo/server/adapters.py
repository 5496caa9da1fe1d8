"""The adapters that a server takes requests for: what the engine process is told, and who may use whose blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import ConfigError

FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterTable:
    """Adapters by name. Raises ``ConfigError`` for one of the settings that cannot be read."""

    def __init__(self, settings: ModelSettings) -> None:
        self.is_enabled = settings.enable_lora
        self.paths = parse_lora_modules(settings.lora_modules) if settings.enable_lora else {}
        """Where each is; a request whose ``model`` is one of these names gets it."""
        self._digests = {name: digest(path) for name, path in self.paths.items()}

    def add(self, name: str, path: str, content: str) -> None:
        """``content`` is the digest of the files."""
        self.paths[name] = path
        self._digests[name] = content

    def remove(self, name: str) -> None:
        del self.paths[name], self._digests[name]

    def salted(self, name: str, salt: str) -> str:
        """The cache salt of a request for this adapter, or for none: blocks are shared by those of equal content.

        What a client calls its salt cannot make it another adapter's, as the part before the colon is not its own.
        """
        return f"{self._digests.get(name, '')}:{salt}" if self.is_enabled else salt

    def as_setting(self) -> str | None:
        """What ``lora_modules`` has to be for the next engine process to have the same adapters."""
        return ",".join(f"{name}={path}" for name, path in self.paths.items()) or None


def digest(path: str) -> str:
    """Of an adapter's content. Raises ``ConfigError`` when it cannot be read."""
    found = hashlib.sha256()
    for name in FILES:
        try:
            with (Path(path) / name).open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{Path(path) / name}: {error.strerror or error}") from None
    return found.hexdigest()
