"""Identifies everything that decides the tokens of a request besides the request itself."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import msgspec

import octavo
from octavo.config import EngineConfig, ServeConfig, to_flat
from octavo.setting import SECRETS
from octavo.telemetry.logs import PACKAGES
from octavo.types import EngineInfo

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
