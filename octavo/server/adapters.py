"""The adapters that a server takes requests for: what engine processes are told, and who may use whose blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import ConfigError, ModelNotFound

FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_DEATHS = 2
"""Engine processes in a row that may die while they load an adapter; the next one does without it."""


@dataclass
class Adapter:
    """An adapter, as it was when it was first loaded."""

    path: str
    digest: str
    """Of the files' content."""
    deaths: int = 0
    """Engine processes that died while they loaded it, since the last one that did."""


class AdapterTable:
    """Adapters by name. Raises ``ConfigError`` for one of the settings that cannot be read."""

    def __init__(self, settings: ModelSettings) -> None:
        self.is_enabled = settings.enable_lora
        self.paths = parse_lora_modules(settings.lora_modules) if settings.enable_lora else {}
        """Where each is; a request whose ``model`` is one of these names gets it."""
        self.known = {name: Adapter(path, digest(path)) for name, path in self.paths.items()}
        """Those of ``paths``, and those that the engine process of now has to do without."""

    def add(self, name: str, path: str, content: str) -> None:
        """``content`` is the digest of the files."""
        self.paths[name] = path
        self.known[name] = Adapter(path, content)

    def remove(self, name: str) -> None:
        self.paths.pop(name, None)
        del self.known[name]

    def take_back(self, name: str) -> None:
        """The engine process of now has it again."""
        self.known[name].deaths = 0
        self.paths[name] = self.known[name].path

    def leave_out(self, name: str) -> None:
        """The engine process of now could not load it."""
        self.paths.pop(name, None)

    def check(self, name: str) -> None:
        """Raise ``ModelNotFound`` for an adapter that was left out."""
        if name in self.known and name not in self.paths:
            message = f"The adapter `{name}` could not be loaded again when the engine was restarted, and is left out."
            raise ModelNotFound(message, param="model")

    def salted(self, name: str, salt: str) -> str:
        """The cache salt of a request for this adapter, or for none: blocks are shared by those of equal content.

        What a client calls its salt cannot make it another adapter's, as the part before the colon is not its own.
        """
        content = self.known[name].digest if name in self.known else ""
        return f"{content}:{salt}" if self.is_enabled else salt


def digest(path: str) -> str:
    """Of an adapter's content. Raises ``ConfigError`` when it cannot be read."""
    found = hashlib.sha256()
    for name in FILES:
        file = Path(path) / name
        try:
            if not file.is_file() and file.exists():
                raise ConfigError(f"{file}: not a regular file")
            with file.open("rb") as content:
                found.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}") from None
        except ValueError as error:  # a path that no file can have
            raise ConfigError(f"{path!r}: {error}") from None
    return found.hexdigest()
