"""Builds the slower tiers of the prefix cache, and its ways to other servers, from the settings."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo import plugins
from octavo.cache.held_blocks import HeldBlocks
from octavo.cache.offload import BlockStore, Identity, Offload
from octavo.cache.offload_tiers import DiskTier, HostTier
from octavo.config import CacheSettings
from octavo.weights.gguf.split_files import parts_of

GIB = 1 << 30
DEFAULT_DISK_GIB = 32.0
FREE_SHARE = 8
"""Of the free host memory, one part in so many is the most that is taken by default: there may be several engines."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES, SAMPLE_EVERY = 4 << 10, 1 << 20
"""Of each file of weights, so many bytes of each part of that length are hashed, and all of the last part."""


def make_offload(
    settings: CacheSettings, store: BlockStore, block_size: int, model: Path, forms: str, room: int
) -> Offload | None:
    """The offload tiers for blocks of ``store``; ``None`` if offloading is disabled.

    ``forms`` names the precision, kernels and device of ``model`` and the dtype of its KV cache: blocks left on disk by
    another model, or by the same one with other ``forms``, are never found. ``room``: bytes of host memory, where no
    setting says how many. Raises ``ConfigError`` if the folder cannot be used.
    """
    if not settings.has_tiers:
        return None
    disk = None
    if settings.kv_offload_dir is not None:
        capacity = settings.kv_offload_disk or DEFAULT_DISK_GIB
        disk = DiskTier(Path(settings.kv_offload_dir).expanduser(), int(capacity * GIB))
    memory = settings.kv_offload_memory or (None if settings.role == "both" else settings.kv_transfer_memory)
    host = HostTier(room if memory is None else int(memory * GIB))
    own = identity(model, forms, settings.role)
    offload = Offload(store, block_size, own, host, disk, keeps_evicted=settings.keeps_evicted)
    if settings.role == "both":
        return offload
    server, fetcher = plugins.load(plugins.KV_CONNECTORS, settings.kv_connector)
    if settings.role == "prefill":
        held = HeldBlocks(int(settings.kv_transfer_memory * GIB), settings.kv_transfer_ttl)
        offload.held = held, server(settings, held, offload.fingerprint)
    else:
        offload.fetcher = fetcher(settings, offload.fingerprint, store.allocate)
    return offload


def default_room(store: BlockStore, num_blocks: int, free: int) -> int:
    """Bytes of host memory for the longest prompt, of ``num_blocks``, where so many are ``free``."""
    return min(max(GIB, num_blocks * store.num_bytes + store.state_bytes), free // FREE_SHARE)


def identity(model: Path, forms: str, role: str = "both") -> Identity:
    """What keys and values depend on besides tokens; see ``make_offload``. With a ``role``, that is the same on all
    machines with the same weights."""
    return Identity(fingerprint(model) if role == "both" else content_fingerprint(model), forms)


def fingerprint(model: Path) -> str:
    """Identifies a checkpoint, a file or folder, by path, file sizes and modification times."""
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else parts_of(model)
    stats = [(path.name, path.stat()) for path in files]
    return f"{model.resolve()}\n{[(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]}"


def content_fingerprint(model: Path) -> str:
    """Identifies a checkpoint by its configuration and samples of its weights, wherever its files are: any change of a
    matrix of ``SAMPLE_EVERY`` bytes or more is in one of them, unless it spares most of its rows."""
    files = sorted(model.iterdir()) if model.is_dir() else sorted(parts_of(model))
    digest = hashlib.sha256()
    for path in files:
        is_whole = path.name == "config.json"
        if not is_whole and path.suffix not in WEIGHT_FILES:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name if model.is_dir() else ''}\n{size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, SAMPLE_EVERY):
                file.seek(start)
                is_last = start + SAMPLE_EVERY >= size
                digest.update(file.read(SAMPLE_EVERY if is_whole or is_last else SAMPLE_BYTES))
    return digest.hexdigest()
