"""Builds the offload tiers of the prefix cache from the settings."""

from __future__ import annotations

from pathlib import Path

from octavo.cache.offload import BlockStore, Offload
from octavo.cache.tiers import DiskTier, HostTier
from octavo.config import CacheSettings
from octavo.weights.gguf.gguf_parts import parts_of

GIB = 1 << 30
DEFAULT_DISK_GIB = 32.0


def make_offload(
    settings: CacheSettings, store: BlockStore, block_size: int, model: Path, forms: str
) -> Offload | None:
    """The offload tiers for blocks of ``store``; ``None`` if offloading is disabled.

    ``forms`` names the precision, kernels and device of ``model`` and the dtype of its KV cache: blocks left on disk by
    another model, or by the same one with other ``forms``, are never found. Raises ``ConfigError`` if the folder cannot
    be used.
    """
    if settings.offload_memory is None:
        return None
    disk = None
    if settings.kv_offload_dir is not None:
        capacity = settings.kv_offload_disk or DEFAULT_DISK_GIB
        disk = DiskTier(Path(settings.kv_offload_dir).expanduser(), int(capacity * GIB))
    host = HostTier(int(settings.offload_memory * GIB))
    return Offload(store, block_size, identity(model, forms), host, disk)


def identity(model: Path, forms: str) -> str:
    """What keys and values depend on besides tokens; see ``make_offload``."""
    return f"{fingerprint(model)}\n{forms}"


def fingerprint(model: Path) -> str:
    """Identifies a checkpoint, a file or folder, by path, file sizes and modification times."""
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else parts_of(model)
    stats = [(path.name, path.stat()) for path in files]
    return f"{model.resolve()}\n{[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"
