"""KV offloading: contents of cached blocks are kept in slower tiers, and restored for later requests.

::

    block evicted        block ──read──> writer threads ──> host memory and disk
    engine idle, ends    block ──read──> writer threads ──> disk, which then has all that is cached
    request arrives      prefetch: disk ──> reader threads ──> host memory
    client gives a hint  disk ──> another thread ──> host memory
    sequence admitted    host memory ──write──> a block of the sequence, published like a computed one

A server that computes prompts for others, or goes on from theirs, has two further ways::

    prompt computed      block ──read──> held for a decode server, until it has fetched it (``HeldBlocks``)
    request arrives      fetch: prefill server ──> fetching thread ──> host memory

Snapshots of recurrent states are kept like blocks, under keys of their own. Of a model that has some, a prefix is as
long as there is a snapshot of: blocks behind the last one are of no use.

The engine's thread never waits for the disk, but for ``CLOSING_SECONDS`` when it ends. Blocks that are not in host
memory when their sequence is admitted are recomputed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, Protocol, cast

import numpy as np

from octavo.cache.held_blocks import BlockToHold, HeldBlocks
from octavo.cache.kv_channel import Fetcher, HoldingServer
from octavo.cache.node import Node, as_digest, folded
from octavo.cache.offload_tiers import Content, CopyRate, DiskTier, HostTier, OffloadStats
from octavo.system.channel import ChannelError
from octavo.system.cpus import num_cpus
from octavo.types import KVTransfer, Sequence, Tokens

MAX_PENDING, PENDING_BYTES = 1024, 2 << 30
"""Most blocks pending to be saved, and when there are so many bytes of them; further evicted blocks are dropped."""
BATCH_BYTES = 64 << 20
"""Most bytes of blocks that are copied together, which takes as much of the device's memory, or twice as much."""
MAX_PENDING_STATES = 16
"""Most recurrent states among them: each is as large as many blocks."""
IDLE_PENDING, IDLE_BYTES = 32, 160 << 20
"""The same while the engine is idle, so that a request never waits for more of them, and little memory is pinned; one
of them may be a state."""
MAX_THREADS = 8
"""Most threads that write, and that read: each takes half of the CPUs, as a checksum takes longer than a copy."""
MAX_HINTS = 8
"""Most sessions of an API key that are read at a time because of hints."""
HINT_SHARE = 0.5
"""Largest share of the host memory's room that one of them may take."""
CLOSING_SECONDS = 6.0
"""How long cached blocks are written to disk when the engine ends or falls asleep."""
CLOSING_POLL_SECONDS = 0.002

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class Identity(NamedTuple):
    """Everything besides tokens that keys and values depend on."""

    weights: str
    settings: str
    """Precision, kernels and device."""


class BlockStore(Protocol):
    """Copies blocks from and to the device's KV storage."""

    num_bytes: int
    """Size of one block's content; 0 for models with recurrent state alone."""
    state_bytes: int
    """Size of a recurrent state; 0 for models without."""

    def read(self, blocks: list[int]) -> Callable[[], Content]:
        """Start to copy ``blocks`` out, before any step that is submitted later.

        The returned function waits for the copy and returns their contents, one behind the other; it may be called in
        any thread. They may lie in memory of which there is little: what is to be kept has to be copied.
        """
        ...

    def write(self, blocks: list[int], contents: list[Content]) -> None:
        """Write ``contents`` to ``blocks``, one each, before any step that is submitted later."""
        ...

    def allocate(self, size: int) -> memoryview:
        """Memory for contents, of which ``write`` copies fastest; thread-safe."""
        ...

    def read_state(self, slot: int) -> Callable[[], Content]:
        """``read`` for the recurrent state in a slot."""
        ...

    def write_state(self, slot: int, content: Content) -> None:
        """``write`` for the recurrent state in a slot, in one order with copies of states."""
        ...


class BlockReads:
    """Reads of single blocks, which ``send`` starts together."""

    def __init__(self, store: BlockStore) -> None:
        self._store, self._blocks, self._waiting = store, list[int](), Future[Callable[[], Content]]()

    def add(self, block: int) -> Callable[[], Content]:
        """``BlockStore.read`` of one block."""
        index, size, waiting = len(self._blocks), self._store.num_bytes, self._waiting
        self._blocks.append(block)
        if len(self._blocks) == blocks_of_batch(self._store):
            self.send()
        return lambda: memoryview(waiting.result()())[index * size : (index + 1) * size]

    def send(self) -> None:
        """To be called when no more are added, also where that failed."""
        if not (blocks := self._blocks):
            return
        waiting, self._blocks, self._waiting = self._waiting, [], Future()
        try:
            waiting.set_result(self._store.read(blocks))
        finally:
            waiting.cancel()  # where it cannot be read, nobody waits for it


def blocks_of_batch(store: BlockStore) -> int:
    return max(1, BATCH_BYTES // store.num_bytes)


class RecalledState(NamedTuple):
    """A prefix of a sequence for which slower tiers have a recurrent state."""

    num_blocks: int
    state: Content
    contents: list[Content]
    """Of its last blocks, which are not in the prefix cache."""


class Wanted(NamedTuple):
    """What is to be read of a prefix, in order, with a recurrent state first."""

    keys: list[bytes]
    path: list[bytes]
    """Those, and the keys of the blocks before each of them."""
    num_blocks: int
    """Of the prefix."""


class Offload:
    """Keeps the contents of evicted blocks in ``host``, unless they shall be dropped, and those of all cached blocks in
    ``disk``."""

    def __init__(
        self,
        store: BlockStore,
        block_size: int,
        identity: Identity,
        host: HostTier,
        disk: DiskTier | None = None,
        keeps_evicted: bool = True,
    ) -> None:
        self.store, self.reads = store, BlockReads(store)
        self.block_size = block_size
        self.host = host
        self.disk = disk
        self.stats = OffloadStats()
        self.reading, self.restoring = CopyRate(), CopyRate()
        """Of the disk, or the memory in which its files are cached, and of the way from host memory to the device."""
        self.held: tuple[HeldBlocks, HoldingServer] | None = None
        """What is kept for decode servers, and how they get it; ``None`` without them."""
        self.fetcher: Fetcher | None = None
        """Fetches what prefill servers hold; ``None`` without them."""
        self._keeps_evicted = keeps_evicted
        self.identify(identity)
        self.blocks_per_state = 0
        """A recurrent state may be kept behind every so many blocks; 0: the model has none."""
        self._pending: dict[bytes, Callable[[], Content]] = {}
        self._pending_states: set[bytes] = set()
        self._unsaved: dict[tuple[Node, bool], None] = {}
        """Nodes of cached blocks that may not be on disk, oldest first, so that each comes after its parent; and, with
        ``True``, those of snapshots."""
        num_threads = max(2, min(MAX_THREADS, num_cpus() // 2))
        self._writers = ThreadPoolExecutor(num_threads, "kv-offload-writer")
        self._readers = ThreadPoolExecutor(num_threads, "kv-offload-reader")
        self._loader = ThreadPoolExecutor(1, "kv-offload-loader")
        """Has the readers read one prompt after the other."""
        self._hint_loader = ThreadPoolExecutor(1, "kv-offload-hints")
        """Reads alone, so that no request waits for what is read because of hints."""
        self._sessions = ThreadPoolExecutor(1, "kv-offload-sessions")
        """Notes sessions' paths, in order."""
        self._is_closing = False
        self._failed = set[tuple[str, type[BaseException]]]()
        """What failed in the threads, and how."""
        self._hints: dict[str, list[Future[None]]] = {}
        """Those that are not done, by API key."""

    def identify(self, identity: Identity) -> None:
        """Keep blocks of another identity from now on; no block of the earlier one is cached any more."""
        sizes = f"{self.block_size}\n{self.store.num_bytes}\n{self.store.state_bytes}"
        self._parts = {"weights": identity.weights, "settings": identity.settings, "block sizes": sizes}
        self._root = hashlib.sha256("\n".join(self._parts.values()).encode()).digest()

    def fingerprint(self) -> dict[str, str]:
        """What another server must have equal to use the blocks of this one, by name."""
        return {name: hashlib.sha256(part.encode()).hexdigest() for name, part in self._parts.items()}

    def note(self, node: Node, is_state: bool = False) -> None:
        """The block of ``node``, or the state behind it, was added to the prefix cache; it shall be on disk, too."""
        if self.disk is not None and (is_state or self.store.num_bytes):
            self._unsaved[node, is_state] = None

    def save(self, node: Node) -> None:
        """Save the content of ``node``'s block, which is being evicted, as soon as ``reads`` are sent."""
        self._unsaved.pop((node, False), None)
        self._unsaved.pop((node, True), None)  # of a snapshot that another took the place of
        if self.store.num_bytes:
            self._save(self._key_of(node), self._reader(node, False))

    def save_state(self, node: Node, slot: int) -> None:
        """Save the snapshot behind ``node``, which is being evicted from a slot."""
        self._unsaved.pop((node, True), None)
        key = _state_key(self._key_of(node))
        if len(self._pending_states) < MAX_PENDING_STATES or key in self._pending_states:
            self._save(key, lambda: self.store.read_state(slot), is_state=True)
        else:
            self.stats.num_dropped += 1

    def _save(self, key: bytes, read: Callable[[], Callable[[], Content]], is_state: bool = False) -> None:
        if not self._keeps_evicted or key in self._pending or key in self.host:
            return
        if not self._may_start(MAX_PENDING, PENDING_BYTES):
            self.stats.num_dropped += 1
            return
        self.stats.num_saved += 1
        self._start(key, read, is_state, self._keep)

    def _start(
        self,
        key: bytes,
        read: Callable[[], Callable[[], Content]],
        is_state: bool,
        keep: Callable[[bytes, Content], object],
    ) -> None:
        """Start to read a content, which a writer's thread waits for and keeps."""
        self._pending[key] = read()
        if is_state:
            self._pending_states.add(key)
        self._submit(self._writers, self._write, key, keep)

    def _submit(
        self, threads: ThreadPoolExecutor | Fetcher, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> Future[None]:
        """Have ``work`` done in a thread. Exceptions are logged here, one of each kind, as nobody waits for a result:
        blocks that a tier does not bring are computed again."""
        done = threads.submit(work, *args, **kwargs)
        done.add_done_callback(lambda done: self._note_failure(work.__name__, done))
        return done

    def _note_failure(self, name: str, done: Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is None or isinstance(error, CancelledError) or (name, type(error)) in self._failed:
            return
        self._failed.add((name, type(error)))
        logger.error("KV blocks are computed, or not kept, as %s failed", name.strip("_"), exc_info=error)

    def _may_start(self, most: int, most_bytes: int) -> bool:
        """Whether fewer blocks and states are pending, and of fewer bytes."""
        num_pending, num_states = len(self._pending), len(self._pending_states)
        num_bytes = (num_pending - num_states) * self.store.num_bytes + num_states * self.store.state_bytes
        return num_pending < most and num_bytes < most_bytes

    def _write(self, key: bytes, keep: Callable[[bytes, Content], object]) -> None:
        try:
            keep(key, self._pending[key]())
        finally:
            del self._pending[key]
            self._pending_states.discard(key)

    def _keep(self, key: bytes, content: Content) -> None:
        content = np.frombuffer(content, np.uint8).copy().data  # other threads run meanwhile, unlike with bytes()
        self.host.put(key, content)
        if self.disk is not None:
            self.disk.put(key, content)

    def save_idle(self) -> bool:
        """Start to write some of what is cached to disk; return whether there is more."""
        while self._unsaved and self._may_start(IDLE_PENDING, IDLE_BYTES) and not self._pending_states:
            node, is_state = next(iter(self._unsaved))
            del self._unsaved[node, is_state]
            if is_state and node.snapshot is None:
                continue  # another took its place
            key = _state_key(self._key_of(node)) if is_state else self._key_of(node)
            if self.disk is not None and key not in self._pending and key not in self.disk:
                self._start(key, self._reader(node, is_state), is_state, self.disk.put)
        self.reads.send()
        return bool(self._unsaved)

    def _reader(self, node: Node, is_state: bool) -> Callable[[], Callable[[], Content]]:
        if is_state:
            return lambda: self.store.read_state(node.snapshot.slot)
        return lambda: self.reads.add(node.block)

    def save_all(self) -> None:
        """Write cached blocks to disk, as many as ``CLOSING_SECONDS`` allow, and what is pending."""
        end = time.monotonic() + CLOSING_SECONDS
        while (self.save_idle() or self._pending) and time.monotonic() < end:
            time.sleep(CLOSING_POLL_SECONDS)

    def prefetch(
        self,
        seq: Sequence,
        num_cached: int,
        num_with_state: int = 0,
        compute_seconds: Callable[[int, int], float] | None = None,
    ) -> Future[None] | None:
        """Start to read the blocks after the first ``num_cached`` of ``seq`` from disk; ``None`` if there are none.
        Where the model has recurrent states, of which the prefix cache has one behind ``num_with_state`` blocks, those
        up to the last other one, and it.

        The future is done when all that could be read is in host memory: as long a prefix as has room there. Nothing is
        read of the disk if that, and writing it to the device, took longer than ``compute_seconds`` of the tokens
        before, and of those to read.
        """
        if self.disk is not None:
            self.disk.refresh()
        keys, transfer = self._keys(seq.keys, seq.salt), seq.request.transfer
        counts = num_cached, num_with_state
        if self.fetcher is not None and transfer is not None and transfer.address:
            return self._submit(self.fetcher, self._fetch, transfer, list(keys), counts)
        if self.disk is None or not (wanted := self._wanted(keys, counts, self.disk)).keys:
            return None
        first = num_with_state if self.blocks_per_state else wanted.num_blocks - len(wanted.keys)
        if compute_seconds is not None:
            seconds = compute_seconds(first * self.block_size, (wanted.num_blocks - first) * self.block_size)
            num_bytes = len(wanted.keys) * self.store.num_bytes + self.store.state_bytes
            if self.reading.seconds(num_bytes) + self.restoring.seconds(num_bytes) > seconds:
                self.reading.grow()
                self.restoring.grow()
                return None
        return self._submit(self._loader, self._load_prompt, wanted)

    def note_session(self, owner: str, name: str, slot: int, end: Node) -> None:
        """Let ``prefetch_session`` find the path to ``end`` by a session's name, also after a restart; ``slot`` is its
        number among those of the session."""
        if self.disk is None:
            return
        self._key_of(end)
        keys = [node.key for node in end.nodes()]
        digest = hashlib.sha256(owner.encode()).digest()
        self._submit(self._sessions, self.disk.put_path, digest, self._session_key(owner, name, slot), keys)

    def prefetch_session(self, owner: str, name: str, counts: list[tuple[int, int]]) -> bool:
        """As ``prefetch``, of the path in each slot, of which the prefix cache has ``counts`` blocks, and blocks with a
        state behind them; return whether the hint was taken. It is not without a disk, and while ``MAX_HINTS`` other
        sessions of ``owner`` are read."""
        pending = [hint for hint in self._hints.pop(owner, ()) if not hint.done()]
        takes_more = self.disk is not None and len(pending) < MAX_HINTS
        if takes_more:
            paths = {self._session_key(owner, name, slot): count for slot, count in enumerate(counts)}
            pending.append(self._submit(self._hint_loader, self._load_session, paths))
        if pending:
            self._hints[owner] = pending
        return takes_more

    def _session_key(self, owner: str, name: str, slot: int) -> bytes:
        return hashlib.sha256(self._root + f"{owner}\0{name}\0{slot}".encode()).digest()

    def _load_session(self, paths: dict[bytes, tuple[int, int]]) -> None:
        assert self.disk is not None
        self.disk.refresh()
        size = max(self.store.num_bytes, self.store.state_bytes)
        left = int(HINT_SHARE * self.host.capacity) // size
        for name, counts in paths.items():
            keys = self.disk.path(name)[: counts[0] + left]
            wanted = self._wanted(keys, counts, self.disk)
            self._load(wanted, map(self._read, wanted.keys))
            left -= max(0, len(keys) - counts[0])

    def _wanted(self, keys: Iterable[bytes], counts: tuple[int, int], there: DiskTier | set[bytes]) -> Wanted:
        """Those of ``keys``, of the blocks of a prompt, and of its states that are ``there``, of use and have room in
        host memory; ``counts`` are the numbers of blocks, and of blocks up to the last state, that the prefix cache
        has."""
        num_cached, num_with_state = counts
        missing: list[bytes] = []
        path: list[bytes] = []
        wanted = Wanted([], [], 0)
        room = self.host.capacity
        num_blocks = 0
        for index, key in enumerate(keys):
            if index >= num_cached and self.store.num_bytes:
                room -= self.store.num_bytes  # also of a block that is there, which must stay
                is_missing = not self._has(key)
                if room < 0 or (is_missing and key not in there):
                    break
                path.append(key)
                if is_missing:
                    missing.append(key)
            num_blocks = index + 1
            state = self._state_behind(index, key, num_with_state)
            if state is not None and room >= self.store.state_bytes and (self._has(state) or state in there):
                wanted = Wanted([*([] if self._has(state) else [state]), *missing], [state, *path], num_blocks)
        return wanted if self.blocks_per_state else Wanted(missing, path, num_blocks)

    def _fetch(self, transfer: KVTransfer, keys: list[bytes], counts: tuple[int, int]) -> None:
        """Bring what a prefill server holds of a prompt, and what is on disk, to host memory; in a thread."""
        assert self.fetcher is not None
        every = self.blocks_per_state
        states = {_state_key(key) for key in keys[every - 1 :: every]} if every else set[bytes]()
        asked = [*keys, *states]
        on_disk = set[bytes]() if self.disk is None else {key for key in asked if key in self.disk}

        def from_disk(wanted: Wanted) -> None:
            if on_disk:
                own = [key for key in wanted.keys if key in on_disk]
                self._load(wanted._replace(keys=own), self._readers.map(self._read, own))

        chosen: Wanted | None = None

        def choose(held: set[bytes]) -> list[bytes]:
            nonlocal chosen
            wanted = chosen = self._wanted(keys, counts, held | on_disk)
            self.host.touch(wanted.path)  # what is there must not make room for the rest
            from_disk(wanted)
            if not held and len(self._wanted(keys, counts, {*asked}).keys) > len(wanted.keys):
                self.stats.num_failures += 1
                logger.warning("%s holds nothing of a prompt any more, which is computed here", transfer.address)
            return [key for key in wanted.keys if key not in on_disk]

        most_bytes = max(self.store.num_bytes, self.store.state_bytes)
        try:
            for key, content in self.fetcher.fetch(transfer, asked, choose, most_bytes):
                self.stats.num_received += 1
                self.host.put(key, content)
        except ChannelError as error:
            self.stats.num_failures += 1
            logger.warning("a prompt is computed here, as %s did not send its blocks: %s", transfer.address, error)
            if chosen is None:
                from_disk(self._wanted(keys, counts, on_disk))
        except BaseException:  # such as of another connector
            self.stats.num_failures += 1
            raise
        if chosen is not None:
            self.host.touch(chosen.path)

    def hold(self, end: Node) -> KVTransfer | None:
        """Keep the blocks of the path to ``end`` for a decode server, and the recurrent state behind it if there is
        one; returns where. ``None`` if this server is none that does so."""
        if self.held is None:
            return None
        size = self.store.num_bytes
        nodes = [node for node in end.nodes() if size and node.block >= 0]
        blocks = [BlockToHold(self._key_of(node), size, self._reader(node, False)) for node in nodes]
        if end.snapshot is not None:
            blocks.append(BlockToHold(_state_key(self._key_of(end)), self.store.state_bytes, self._reader(end, True)))
        held, server = self.held
        ticket = server.ticket()
        try:
            held.hold(ticket, blocks)
        finally:
            self.reads.send()
        return KVTransfer(server.address, ticket, end.depth)

    def _has(self, key: bytes) -> bool:
        return key in self._pending or key in self.host

    def _state_behind(self, index: int, key: bytes, num_with_state: int) -> bytes | None:
        """The key of the recurrent state behind block ``index``, whose key is given, if there can be one that is of
        use."""
        num_blocks = index + 1
        may_be = self.blocks_per_state and num_blocks > num_with_state and num_blocks % self.blocks_per_state == 0
        return _state_key(key) if may_be else None

    def _load_prompt(self, wanted: Wanted) -> None:
        began = time.monotonic()
        num_bytes = self._load(wanted, self._readers.map(self._read, wanted.keys))
        self.reading.learn(num_bytes, time.monotonic() - began)

    def _load(self, wanted: Wanted, contents: Iterable[Content | None]) -> int:
        """Bring ``contents``, which are read while they are taken, to host memory; returns the number of bytes."""
        self.host.touch(wanted.path)
        num_bytes = 0
        for key, content in zip(wanted.keys, contents, strict=True):
            if content is None:
                break  # later blocks are useless without this one
            self.stats.num_prefetched += 1
            self.host.put(key, content)
            num_bytes += len(content)
        self.host.touch(wanted.path)
        return num_bytes

    def _read(self, key: bytes) -> Content | None:
        return None if self._is_closing or self.disk is None else self.disk.get(key)

    def recall(self, seq: Sequence, num_cached: int) -> list[Content]:
        """Contents of the blocks after the first ``num_cached`` of ``seq``, as far as host memory has them."""
        keys = itertools.islice(self._keys(seq.keys, seq.salt), num_cached, None)
        found = (self._content(key, self.store.num_bytes) for key in keys)
        return [content for content in itertools.takewhile(lambda content: content is not None, found) if content]

    def recall_state(self, seq: Sequence, num_cached: int, num_with_state: int) -> RecalledState | None:
        """The longest prefix of ``seq`` of which host memory has a recurrent state, and the blocks after the first
        ``num_cached``; ``None`` if it has none of more than ``num_with_state`` blocks."""
        contents: list[Content] = []
        found = None
        for index, key in enumerate(self._keys(seq.keys, seq.salt)):
            if index >= num_cached:
                content = self._content(key, self.store.num_bytes) if self.store.num_bytes else b""
                if content is None:
                    break
                contents.append(content)
            state = self._state_behind(index, key, num_with_state)
            if state is not None and self._has(state):
                found = index + 1, state, len(contents)
        if found is None:
            return None
        num_blocks, key, count = found
        content = self._content(key, self.store.state_bytes)
        return None if content is None else RecalledState(num_blocks, content, contents[:count])

    def _content(self, key: bytes, size: int) -> Content | None:
        """What host memory has, if it has so many bytes."""
        pending = self._pending.get(key)
        content = self.host.get(key) if pending is None else pending()
        return content if content is not None and len(content) == size else None

    def restore(self, blocks: list[int], contents: list[Content]) -> None:
        """Write ``contents`` to ``blocks``, one each."""
        began = time.monotonic()
        if self.store.num_bytes:
            count = blocks_of_batch(self.store)
            for first in range(0, len(blocks), count):
                self.store.write(blocks[first : first + count], contents[first : first + count])
        self.restoring.learn_at_least(sum(map(len, contents)), time.monotonic() - began)  # copies wait for steps
        self.stats.num_restored += len(blocks)

    def close(self) -> None:
        """Save what is cached, and end the threads; what is still pending then is lost."""
        self._is_closing = True
        self.save_all()
        self._writers.shutdown(cancel_futures=True)
        for executor in (self._loader, self._readers, self._sessions):
            executor.shutdown()
        self._hint_loader.shutdown(cancel_futures=True)
        if self.held is not None:
            self.held[1].close()
        if self.fetcher is not None:
            self.fetcher.close()
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
        encoded, known = salt.encode(), cast(tuple[int, ...], tokens)
        images = [token for token in dict.fromkeys(known) if token < 0] if min(known) < 0 else []
        packed = struct.pack(f"<q{len(known)}q", len(encoded), *(map(folded, known) if images else known))
        packed += b"".join(map(as_digest, images))
        return hashlib.sha256(parent + packed + encoded).digest()


def _state_key(key: bytes) -> bytes:
    """The key of the recurrent state behind a block."""
    return hashlib.sha256(b"state" + key).digest()
