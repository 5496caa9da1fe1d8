"""KV offloading: contents of cached blocks are kept in slower tiers, and restored for later requests.

::

    block evicted        block ──read──> writer thread ──> host memory and disk
    engine idle, ends    block ──read──> writer thread ──> disk, which then has all that is cached
    request arrives      prefetch: disk ──> loader thread ──> host memory
    sequence admitted    host memory ──write──> a block of the sequence, published like a computed one

The engine's thread never waits for the disk, but for ``CLOSING_SECONDS`` when it ends. Blocks that are not in host
memory when their sequence is admitted are recomputed.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from octavo.cache.node import Node, as_digest, folded
from octavo.cache.tiers import DiskTier, HostTier
from octavo.types import Request, Sequence, Tokens, keyed

MAX_PENDING = 1024
"""Most blocks pending to be saved; further evicted blocks are dropped."""
IDLE_PENDING = 32
"""Most blocks pending to be saved while the engine is idle, so that a request never waits for more of them."""
CLOSING_SECONDS = 3.0
"""How long cached blocks are written to disk when the engine ends or falls asleep."""
CLOSING_POLL_SECONDS = 0.002


class BlockStore(Protocol):
    """Copies blocks from and to the device's KV storage."""

    num_bytes: int
    """Size of one block's content."""

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out, before any step that is submitted later.

        The returned function waits for the copy and returns the content; it may be called in any thread.
        """
        ...

    def write(self, block: int, content: bytes) -> None:
        """Write ``content`` to ``block``, before any step that is submitted later."""
        ...


@dataclass
class OffloadStats:
    """Counts of blocks."""

    num_saved: int = 0
    num_dropped: int = 0
    """Blocks evicted while ``MAX_PENDING`` were pending."""
    num_prefetched: int = 0
    num_restored: int = 0


class Offload:
    """Keeps the contents of evicted blocks in ``host``, and those of all cached blocks in ``disk``.

    ``identity`` names everything besides tokens that keys and values depend on: the model, its precision, kernels.
    """

    def __init__(
        self, store: BlockStore, block_size: int, identity: str, host: HostTier, disk: DiskTier | None = None
    ) -> None:
        self.store = store
        self.block_size = block_size
        self.host = host
        self.disk = disk
        self.stats = OffloadStats()
        self.identify(identity)
        self._pending: dict[bytes, Callable[[], bytes]] = {}
        self._unsaved: dict[Node, None] = {}
        """Cached blocks that may not be on disk, oldest first, so that each comes after its parent."""
        self._writer = ThreadPoolExecutor(1, "kv-offload-writer")
        self._loader = ThreadPoolExecutor(1, "kv-offload-loader")

    def identify(self, identity: str) -> None:
        """Keep blocks of another identity from now on; no block of the earlier one is cached any more."""
        self._root = hashlib.sha256(f"{identity}\n{self.block_size}\n{self.store.num_bytes}".encode()).digest()

    def note(self, node: Node) -> None:
        """The block of ``node`` was added to the prefix cache; it shall be on disk, too."""
        self._unsaved[node] = None

    def save(self, node: Node) -> None:
        """Save the content of ``node``'s block, which is being evicted."""
        self._unsaved.pop(node, None)
        key = self._key_of(node)
        if key in self._pending or key in self.host:
            return
        if len(self._pending) >= MAX_PENDING:
            self.stats.num_dropped += 1
            return
        self.stats.num_saved += 1
        self._pending[key] = self.store.read(node.block)
        self._writer.submit(self._write, key)

    def _write(self, key: bytes) -> None:
        try:
            self._keep(key, self._pending[key]())
        finally:
            del self._pending[key]

    def _keep(self, key: bytes, content: bytes) -> None:
        self.host.put(key, content)
        if self.disk is not None:
            self.disk.put(key, content)

    def save_idle(self) -> bool:
        """Start to write some cached blocks to disk; return whether there are more."""
        while self._unsaved and len(self._pending) < IDLE_PENDING:
            node = next(iter(self._unsaved))
            del self._unsaved[node]
            key = self._key_of(node)
            if self.disk is not None and key not in self._pending and key not in self.disk:
                self._pending[key] = self.store.read(node.block)
                self._writer.submit(self._write_to_disk, key, self.disk)
        return bool(self._unsaved)

    def _write_to_disk(self, key: bytes, disk: DiskTier) -> None:
        try:
            disk.put(key, self._pending[key]())
        finally:
            del self._pending[key]

    def save_all(self) -> None:
        """Write cached blocks to disk, as many as ``CLOSING_SECONDS`` allow."""
        end = time.monotonic() + CLOSING_SECONDS
        while self.save_idle() and time.monotonic() < end:
            time.sleep(CLOSING_POLL_SECONDS)

    def prefetch(self, request: Request, num_cached: int) -> Future[None] | None:
        """Start to read the blocks after the first ``num_cached`` of ``request`` from disk; ``None`` if there are none.

        The future is done when all that could be read is in host memory.
        """
        if self.disk is None:
            return None
        self.disk.refresh()
        tokens: list[int | None] = [*request.prompt_tokens, *request.output_tokens]
        on_disk = []
        for index, key in enumerate(self._keys(keyed(tokens, request), request.cache_salt)):
            if index < num_cached or key in self._pending or key in self.host:
                continue
            if key not in self.disk:
                break
            on_disk.append(key)
        return self._loader.submit(self._load, on_disk) if on_disk else None

    def _load(self, keys: list[bytes]) -> None:
        assert self.disk is not None
        for key in keys:
            content = self.disk.get(key)
            if content is None:
                break  # later blocks are useless without this one
            self.stats.num_prefetched += 1
            self.host.put(key, content)

    def recall(self, seq: Sequence, num_cached: int) -> list[bytes]:
        """Contents of the blocks after the first ``num_cached`` of ``seq``, as far as host memory has them."""
        contents = []
        for index, key in enumerate(self._keys(seq.keys, seq.request.cache_salt)):
            if index < num_cached:
                continue
            pending = self._pending.get(key)
            content = self.host.get(key) if pending is None else pending()
            if content is None or len(content) != self.store.num_bytes:
                break
            contents.append(content)
        return contents

    def restore(self, blocks: list[int], contents: list[bytes]) -> None:
        """Write ``contents`` to ``blocks``, one each."""
        for block, content in zip(blocks, contents, strict=True):
            self.store.write(block, content)
        self.stats.num_restored += len(blocks)

    def close(self) -> None:
        """Save what is cached, wait for pending reads and writes, and end the threads."""
        self.save_all()
        self._writer.shutdown()
        self._loader.shutdown()
        if self.disk is not None:
            self.disk.close()

    def _keys(self, tokens: Tokens, salt: str) -> Iterator[bytes]:
        """Keys of the full blocks of ``tokens``, without the block of the last token: see ``KVCache.match``."""
        key = self._root
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = self._chain(key, tuple(tokens[start : start + self.block_size]), "" if start else salt)
            yield key

    def _key_of(self, node: Node) -> bytes:
        """The key of a node's prefix, computed once per node."""
        path = []
        above: Node | None = node
        while above is not None and above.parent is not None and not above.key:
            path.append(above)
            above = above.parent
        key = above.key if above is not None and above.key else self._root
        for one in reversed(path):
            is_first = one.depth == 1
            tokens, salt = (one.edge[1:], str(one.edge[0])) if is_first else (one.edge, "")
            key = one.key = self._chain(key, tokens, salt)
        return key

    def _chain(self, parent: bytes, tokens: tuple[int | str | None, ...], salt: str) -> bytes:
        """SHA-256 over the parent's key, the tokens and the salt: collision-resistant, even against crafted prompts."""
        encoded = salt.encode()
        packed = struct.pack(f"<q{len(tokens)}q", len(encoded), *map(folded, tokens))
        packed += b"".join(as_digest(token) for token in dict.fromkeys(tokens) if isinstance(token, int) and token < 0)
        return hashlib.sha256(parent + packed + encoded).digest()
