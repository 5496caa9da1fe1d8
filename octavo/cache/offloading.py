"""Puts the tiers behind the prefix cache together, as the settings ask."""

from __future__ import annotations

from pathlib import Path

from octavo.cache.offload import BlockStore, Offload
from octavo.cache.tiers import DiskTier, HostTier
from octavo.config import CacheSettings

GIB = 1 << 30
DEFAULT_DISK_GIB = 32.0


def make_offload(
    settings: CacheSettings, store: BlockStore, block_size: int, model: Path, forms: str
) -> Offload | None:
    """The tiers behind ``store``. ``None`` when the settings ask for none.

    ``forms`` says in what precision, by which kernels and on what device ``model`` computes, and in what type its keys
    and values are kept: blocks that another model, or the same in another form, left on the disk are never found.
    Raises ``ConfigError`` when the folder cannot be used.
    """
    if settings.kv_offload_memory is None:
        return None
    disk = None
    if settings.kv_offload_dir is not None:
        capacity = settings.kv_offload_disk or DEFAULT_DISK_GIB
        disk = DiskTier(Path(settings.kv_offload_dir).expanduser(), int(capacity * GIB))
    host = HostTier(int(settings.kv_offload_memory * GIB))
    return Offload(store, block_size, f"{fingerprint(model)}\n{forms}", host, disk)


def fingerprint(model: Path) -> str:
    """Names a checkpoint: a file or a folder as it is now."""
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else [model]
    stats = [(path.name, path.stat()) for path in files]
    return f"{model.resolve()}\n{[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"
