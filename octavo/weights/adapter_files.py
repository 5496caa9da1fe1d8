"""The files of a LoRA adapter, and the digest that tells whether two adapters are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo.errors import ConfigError

FILES = ("adapter_config.json", "adapter_model.safetensors")


def digest(path: str) -> str:
    """SHA-256 of an adapter's content. Raises ``ConfigError`` when it cannot be read."""
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
        except ValueError as error:  # invalid path, such as one with a NUL byte
            raise ConfigError(f"{path!r}: {error}") from None
    return found.hexdigest()
