"""Second lives of blocks: what the prefix cache gives up is kept in slower memory, and comes back when it is asked for.

::

    given up     block ──read──> writer thread ──> host memory ──(full)──> disk
    asked for    prefetch: disk ──> loader thread ──> host memory
    admitted     host memory ──write──> a block of the sequence, published like one that was computed

The engine's thread never waits for a disk. A content that is not at hand when its sequence is admitted, for whatever
reason, is computed again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from octavo.cache.node import Node
from octavo.cache.tiers import DiskTier, HostTier
from octavo.types import Request, Sequence

MAX_PENDING = 1024
"""Blocks on their way to memory; while there are so many, what is given up is lost."""


class BlockStore(Protocol):
    """Copies blocks out of and into the device's storage. The executing half implements it."""

    num_bytes: int
    """Of one block's content."""

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out, before any step that is submitted from now on.

        What it returns waits for the copy and gives the content, in any thread.
        """
        ...

    def write(self, block: int, content: bytes) -> None:
        """Put ``content`` into ``block``, before any step that is submitted from now on reads it."""
        ...


@dataclass
class OffloadStats:
    """Counts of blocks."""

    num_saved: int = 0
    num_dropped: int = 0
    """Given up while too many were on their way."""
    num_prefetched: int = 0
    num_restored: int = 0


class Offload:
    """Keeps the contents of given-up blocks in ``host`` and, when that is full, in ``disk``.

    ``identity`` names all that keys and values depend on besides tokens: the model, its precision, the block's shape.
    """

    def __init__(
        self, store: BlockStore, block_size: int, identity: str, host: HostTier, disk: DiskTier | None = None
    ) -> None:
        self.store = store
        self.block_size = block_size
        self.host = host
        self.disk = disk
        self.stats = OffloadStats()
        self._root = hashlib.sha256(f"{identity}\n{block_size}\n{store.num_bytes}".encode()).digest()
        self._pending: dict[bytes, Callable[[], bytes]] = {}
        self._writer = ThreadPoolExecutor(1, "kv-offload-writer")
        self._loader = ThreadPoolExecutor(1, "kv-offload-loader")

    def save(self, node: Node) -> None:
        """Keep the content of ``node``'s block, which is given up right now."""
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
        for older in self.host.put(key, content):
            if self.disk is not None:
                self.disk.put(*older)

    def prefetch(self, request: Request, num_cached: int) -> Future[None] | None:
        """Start to fetch what follows the first ``num_cached`` blocks of ``request`` from the disk, if it is there.

        Done when it is in host memory, so far as it could be read.
        """
        if self.disk is None:
            return None
        tokens: list[int | None] = [*request.prompt_tokens, *request.output_tokens]
        wanted = []
        for index, key in enumerate(self._keys(tokens, request.cache_salt)):
            if index < num_cached or key in self._pending or key in self.host:
                continue
            if key not in self.disk:
                break
            wanted.append(key)
        return self._loader.submit(self._load, wanted) if wanted else None

    def _load(self, keys: list[bytes]) -> None:
        assert self.disk is not None
        for key in keys:
            content = self.disk.get(key)
            if content is None:
                break  # what comes after it cannot be used
            self.stats.num_prefetched += 1
            self._keep(key, content)

    def recall(self, seq: Sequence, num_cached: int) -> list[bytes]:
        """Contents of the blocks after the first ``num_cached`` of ``seq``, as far as host memory has them."""
        contents = []
        for index, key in enumerate(self._keys(seq.tokens, seq.request.cache_salt)):
            if index < num_cached:
                continue
            pending = self._pending.get(key)
            content = self.host.get(key) if pending is None else pending()
            if content is None or len(content) != self.store.num_bytes:
                break
            contents.append(content)
        return contents

    def restore(self, blocks: list[int], contents: list[bytes]) -> None:
        """Put ``contents`` into ``blocks``, one each."""
        for block, content in zip(blocks, contents, strict=True):
            self.store.write(block, content)
        self.stats.num_restored += len(blocks)

    def close(self) -> None:
        """Wait for what is on its way, and end the threads."""
        self._writer.shutdown()
        self._loader.shutdown()
        if self.disk is not None:
            self.disk.close()

    def _keys(self, tokens: list[int | None], salt: str) -> Iterator[bytes]:
        """Names of the full blocks of ``tokens`` that may be taken from a cache: never all, see ``KVCache.match``."""
        key = self._root
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = self._chain(key, tuple(tokens[start : start + self.block_size]), "" if start else salt)
            yield key

    def _key_of(self, node: Node) -> bytes:
        """The name of a node's prefix; each node's is found once."""
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
        """SHA-256 over the parent's name, the salt and the tokens: nobody can make two prefixes share a name."""
        encoded = salt.encode()
        packed = struct.pack(f"<q{len(tokens)}q", len(encoded), *tokens)
        return hashlib.sha256(parent + packed + encoded).digest()
