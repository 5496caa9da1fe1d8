"""Blocks between two servers of one machine, copied out of the memory of the one that holds them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.cache import held_blocks, kv_channel
from octavo.cache.held_blocks import BlockToHold, HeldBlocks
from octavo.cache.kv_channel import Batch, Copied, Fetch, Fetcher, Have, HoldingServer
from octavo.cache.offload_tiers import Content
from octavo.system import shared_arena
from octavo.system.channel import Channel, ChannelError
from octavo.system.shared_arena import ArenaHandle
from octavo.types import KVTransfer
from tests.cache.test_shared_arena import used_bytes
from tests.engine.test_transfer import SETTINGS
from tests.tiers import nightly

SIZE = 1024


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content_of(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def block(number: int, size: int = SIZE) -> BlockToHold:
    return BlockToHold(key_of(number), size, lambda: lambda: content_of(number, size))


class Pair(NamedTuple):
    """A server that holds blocks, and one that fetches them."""

    held: HeldBlocks
    server: HoldingServer
    fetcher: Fetcher

    def hold(self, numbers: range) -> KVTransfer:
        ticket = self.server.ticket()
        assert self.held.hold(ticket, map(block, numbers)) == len(numbers)
        return KVTransfer(self.server.address, ticket)

    def fetch(self, transfer: KVTransfer, numbers: range, most_bytes: int = SIZE) -> Iterator[tuple[bytes, Content]]:
        keys = list(map(key_of, numbers))
        return self.fetcher.fetch(transfer, keys, lambda have: [key for key in keys if key in have], most_bytes)

    def wait_until_free(self) -> None:
        """Until no slot is in use; a server's thread may still be about to hear that the last is not needed."""
        assert self.held.arena is not None
        end = time.monotonic() + 30
        while used_bytes(self.held.arena) or len(self.held):
            assert time.monotonic() < end, "memory is in use that nothing is held in"
            time.sleep(0.001)


def make_pair(capacity: int = 64 * SIZE, seconds: float = 60.0) -> Pair:
    held = HeldBlocks(capacity, seconds)
    return Pair(held, HoldingServer(SETTINGS, held, dict), Fetcher(SETTINGS, dict))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(kv_channel, "BATCH_BYTES", 3 * SIZE)
    monkeypatch.setattr(kv_channel, "REST_SECONDS", 0.0)
    made = make_pair()
    yield made
    made.fetcher.close()
    made.server.close()


class Ways:
    """Counts batches by the way they come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_by_memory = self.num_framed = 0
        tell = Channel.tell

        def counted(channel: Channel, message: Any) -> None:
            if isinstance(message, Batch) and message.sizes:
                self.num_by_memory += bool(message.offsets)
                self.num_framed += not message.offsets
            tell(channel, message)

        monkeypatch.setattr(Channel, "tell", counted)


def fetched(pair: Pair, transfer: KVTransfer, numbers: range) -> list[int]:
    """Numbers of what came, whose contents must be right."""
    found = {key: bytes(content) for key, content in pair.fetch(transfer, numbers)}
    assert found == {key: content_of(int.from_bytes(key, "little")) for key in found}
    return [int.from_bytes(key, "little") for key in found]


def test_what_is_held_is_copied_out_of_memory_and_let_go(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways(monkeypatch)
    for start in range(5):
        numbers = range(10 * start, 10 * start + 10)
        assert fetched(pair, pair.hold(numbers), numbers) == [*numbers]
        pair.wait_until_free()
    assert (ways.num_by_memory, ways.num_framed) == (20, 0)


@pytest.mark.parametrize("what", ["another machine's", "no memfd", "no memory", "nonce"])
def test_what_cannot_be_shared_comes_as_frames(what: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways(monkeypatch)
    if what == "another machine's":
        monkeypatch.setattr(shared_arena, "SHOWN", "")
    elif what == "no memfd":
        pair.held.arena = None
    elif what == "no memory":
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
    else:
        arena: Any = pair.held.arena
        arena.handle = ArenaHandle(arena.handle.pid, arena.handle.fd, bytes(32))
    assert fetched(pair, pair.hold(range(10)), range(10)) == [*range(10)]
    assert (ways.num_by_memory, ways.num_framed) == (0, 4)


def stop_once(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object], after: int = 0) -> list[bytes]:
    """Let a client be stopped when it has copied ``after`` bytes, while something happens; returns all it copies."""
    copied = list[bytes]()

    def read_into(memory: memoryview, fd: int, offset: int) -> None:
        if sum(map(len, copied)) == after:
            meanwhile()
        shared_arena.read_into(memory, fd, offset)
        copied.append(bytes(memory))

    monkeypatch.setattr(kv_channel, "read_into", read_into)
    return copied


@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_client_that_was_stopped_does_not_use_what_came_there_later(
    count: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the blocks of the batches before."""
    pair.server._seconds = 1.0  # longer than the batches before take, and shorter than that of the client
    transfer = pair.hold(range(9))
    later = range(100, 164)

    def meanwhile() -> None:
        pair.held.release(transfer.ticket)
        pair.wait_until_free()  # the server has waited in vain
        pair.hold(later)
        for number in later:
            pair.held.content(next(iter(pair.held._tickets)), key_of(number))

    copied = stop_once(monkeypatch, meanwhile, count * SIZE)
    used = list[tuple[bytes, bytes]]()
    with pytest.raises(ChannelError, match=r"closed the connection|does not answer|does not read"):
        used += ((key, bytes(content)) for key, content in pair.fetch(transfer, range(9)))
    together = b"".join(copied)[count * SIZE :]
    pieces = {together[start : start + SIZE] for start in range(0, len(together), SIZE)}
    assert pieces, "nothing was copied"
    assert pieces <= set(map(content_of, later)), "what was there before was not used again"
    assert used == [(key_of(number), content_of(number)) for number in range(count)]


def test_slots_stay_while_a_client_copies_from_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although their ticket is over."""
    transfer = pair.hold(range(3))

    def meanwhile() -> None:
        pair.held.release(transfer.ticket)
        pair.hold(range(100, 161))

    copied = stop_once(monkeypatch, meanwhile)
    assert fetched(pair, transfer, range(3)) == [0, 1, 2]
    assert b"".join(copied) == b"".join(map(content_of, range(3)))


MAD = {
    "beyond": lambda batch: {"offsets": [1 << 40] * len(batch.sizes)},
    "negative": lambda batch: {"offsets": [-1] * len(batch.sizes)},
    "huge": lambda batch: {"offsets": [(1 << 64) - 1] * len(batch.sizes)},
    "at the end": lambda batch: {"offsets": [4096 + 64 * SIZE - 1] * len(batch.sizes)},
    "fewer offsets": lambda batch: {"offsets": batch.offsets[1:]},
    "more offsets": lambda batch: {"offsets": [*batch.offsets, 4096]},
    "large": lambda batch: {"sizes": [SIZE + 1] * len(batch.sizes)},
    "many": lambda batch: {"sizes": [1] * 20, "offsets": [4096] * 20},
    "empty": lambda batch: {"sizes": [0] * len(batch.sizes)},
    "negative sizes": lambda batch: {"sizes": [-1] * len(batch.sizes)},
    "large together": lambda batch: {"sizes": [SIZE] * 4, "offsets": [4096] * 4},
}


@pytest.mark.parametrize("how", MAD)
def test_a_mad_server_is_left_alone(how: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Channel.tell

    def changed(channel: Channel, message: Any) -> None:
        if isinstance(message, Batch) and message.sizes:
            for name, value in MAD[how](message).items():
                setattr(message, name, value)
        tell(channel, message)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "tell", changed)
        with pytest.raises(ChannelError, match=r"asked for|cannot be read"):
            list(pair.fetch(pair.hold(range(10)), range(10)))
    assert fetched(pair, pair.hold(range(10)), range(10)) == [*range(10)]


def test_contents_are_placed_for_those_alone_who_asked_for_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Channel.tell

    def without(channel: Channel, message: Any) -> None:
        tell(channel, Have(message.keys, None) if isinstance(message, Have) else message)

    monkeypatch.setattr(Channel, "tell", without)
    assert fetched(pair, pair.hold(range(3)), range(3)) == [0, 1, 2]

    def unable(channel: Channel, message: Any) -> None:
        if isinstance(message, Fetch):
            message.by_memory = True
        without(channel, message)

    monkeypatch.setattr(Channel, "tell", unable)
    with pytest.raises(ChannelError, match="placed where they were not asked for"):
        list(pair.fetch(pair.hold(range(3)), range(3)))


@pytest.mark.parametrize("message", [Copied(), Batch([], []), Have([], None)])
def test_a_server_closes_the_connection_of_who_speaks_out_of_turn(message: Any, pair: Pair) -> None:
    channel = pair.fetcher._connect(pair.server.address)
    channel.wait_for(5.0)
    channel.tell(message)
    with pytest.raises(ChannelError, match="closed the connection"):
        channel.receive(100)
    transfer = pair.hold(range(3))
    channel = pair.fetcher._connect(pair.server.address)
    channel.tell(Fetch(transfer.ticket, list(map(key_of, range(3))), True))
    channel.hear(kv_channel._batch, 1000)
    channel.tell(Batch([], []))  # in place of ``Copied``
    with pytest.raises(ChannelError):
        channel.hear(kv_channel._batch, 1000)
    pair.held.release(transfer.ticket)
    pair.wait_until_free()


def test_a_server_that_stops_answering_gives_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here when it should say what comes next, of what was copied."""
    tell, batches = Channel.tell, list[Batch]()

    def silent(channel: Channel, message: Any) -> None:
        if isinstance(message, Batch):
            batches.append(message)
            if len(batches) == 2:
                raise ChannelError("gone")
        tell(channel, message)

    monkeypatch.setattr(Channel, "tell", silent)
    transfer = pair.hold(range(10))
    with pytest.raises(ChannelError):
        next(pair.fetch(transfer, range(10)))
    pair.held.release(transfer.ticket)
    pair.wait_until_free()


def num_descriptors(pair: Pair) -> int:
    """Of the memory in which contents are held."""
    assert pair.held.arena is not None
    own, files = os.fstat(pair.held.arena.handle.fd), [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.samestat(own, os.stat(file)) for file in files if os.path.exists(file))


def test_what_is_fetched_no_further_is_let_go(pair: Pair) -> None:
    before = num_descriptors(pair)
    transfer = pair.hold(range(10))
    contents = pair.fetch(transfer, range(10))
    assert bytes(next(contents)[1]) == content_of(0)
    assert num_descriptors(pair) == before + 1
    contents.close()  # type: ignore[attr-defined]
    assert num_descriptors(pair) == before
    pair.held.release(transfer.ticket)
    pair.wait_until_free()


def test_a_client_that_is_closed_ends_what_it_fetches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while most copies of a batch wait for the thread of the first, and of the connection nothing is kept."""
    monkeypatch.setattr(kv_channel, "LEAST_SHARE_BYTES", SIZE)
    monkeypatch.setattr(kv_channel, "BATCH_BYTES", 12 * SIZE)
    pair.fetcher._copiers = ThreadPoolExecutor(1)
    transfer, found = pair.hold(range(12)), list[Any]()

    def close() -> None:
        while pair.fetcher._copiers._work_queue.qsize() < kv_channel.NUM_COPIERS - 1:
            time.sleep(0.001)
        pair.fetcher.close()

    stop_once(monkeypatch, close)

    def fetch() -> None:
        found.extend(pair.fetch(transfer, range(12)))

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for a copy that was cancelled"
    assert [key for key, _ in found] == [key_of(number) for number in range(12)]
    assert not any(pair.fetcher._idle.values())


def test_memory_comes_back_when_the_time_of_a_prompt_is_over() -> None:
    pair = make_pair(seconds=0.05)
    pair.hold(range(10))
    time.sleep(0.06)
    assert len(pair.held) == 0
    pair.wait_until_free()
    pair.server.close()
    pair.fetcher.close()


def test_a_prompt_that_cannot_be_read_to_its_end_is_let_go(pair: Pair) -> None:
    def fail() -> Any:
        raise held_blocks.OctavoError("the device fails")

    with pytest.raises(held_blocks.OctavoError):
        pair.held.hold("ticket", [block(0), block(1), BlockToHold(key_of(2), SIZE, fail)])
    assert len(pair.held) == 2
    pair.held.release("ticket")
    pair.wait_until_free()


def test_fetched_contents_lie_in_memory_that_was_allocated_for_them(pair: Pair) -> None:
    slabs = list[memoryview]()

    def allocate(size: int) -> memoryview:
        slabs.append(memoryview(bytearray(size)))
        return slabs[-1]

    fetcher = Fetcher(SETTINGS, dict, allocate)
    for shares_memory in (True, False):
        slabs.clear()
        pair.server.shares_memory = shares_memory
        own = pair._replace(fetcher=fetcher)
        contents = [content for _, content in own.fetch(pair.hold(range(7)), range(7))]
        assert [len(slab) for slab in slabs] == [3 * SIZE, 3 * SIZE, SIZE]
        assert b"".join(contents) == b"".join(slabs) == b"".join(map(content_of, range(7)))
        assert all(memoryview(content).obj is slabs[i // 3].obj for i, content in enumerate(contents))
    fetcher.close()


@pytest.mark.parametrize("seed", [*range(4), *(nightly(seed) for seed in range(4, 60))])
def test_random_prompts_are_held_fetched_and_let_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks and states, in less memory than they need, so that some lie elsewhere, and with reads that fail."""
    rng = random.Random(seed)
    monkeypatch.setattr(shared_arena, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(kv_channel, "BATCH_BYTES", 4 * SIZE)
    ways = Ways(monkeypatch)
    pair = make_pair(capacity=100 * SIZE)
    assert pair.held.arena is not None
    pair.held.arena.close()
    pair.held.arena = shared_arena.SharedArena(60 * SIZE)
    monkeypatch.setattr(pair.server, "_seconds", 5.0)

    def size_of(number: int) -> int:
        return 5 * SIZE + 8 if number % 10 == 9 else SIZE

    def read(number: int) -> Content:
        if number % 37 == 36:
            raise held_blocks.OctavoError("cannot be read")
        return content_of(number, size_of(number))

    def blocks(numbers: range) -> list[BlockToHold]:
        return [BlockToHold(key_of(n), size_of(n), lambda n=n: lambda: read(n)) for n in numbers]  # type: ignore[misc]

    def fetch(transfer: KVTransfer, numbers: range, count: int) -> int:
        found = {key: bytes(content) for key, content in pair.fetch(transfer, numbers, 5 * SIZE + 8)}
        whole = numbers[:count]
        broken = next((i for i, n in enumerate(whole) if n % 37 == 36), count)
        assert found == {key_of(n): read(n) for n in whole[:broken]}
        return len(found)

    open_tickets: list[tuple[KVTransfer, range, int]] = []
    fetches: list[Future[int]] = []
    for _ in range(60):
        if open_tickets and rng.random() < 0.45:
            fetches.append(pair.fetcher.submit(fetch, *open_tickets.pop(rng.randrange(len(open_tickets)))))
        elif open_tickets and rng.random() < 0.2:
            pair.held.release(open_tickets.pop()[0].ticket)
        else:
            start = rng.randrange(80)
            numbers, ticket = range(start, start + rng.randrange(1, 20)), pair.server.ticket()
            count = pair.held.hold(ticket, blocks(numbers))
            open_tickets.append((KVTransfer(pair.server.address, ticket), numbers, count))
        assert used_bytes(pair.held.arena) <= 60 * SIZE
    assert sum(done.result(30) for done in fetches)
    for transfer, *_ in open_tickets:
        pair.held.release(transfer.ticket)
    assert ways.num_by_memory
    pair.wait_until_free()
    assert pair.held.num_bytes == 0
    pair.fetcher.close()
    pair.server.close()


def test_a_server_that_is_closed_ends_its_connections(pair: Pair) -> None:
    """Rather than a minute later, with what their threads refer to."""
    assert fetched(pair, pair.hold(range(3)), range(3)) == [0, 1, 2]
    (channel,) = pair.fetcher._idle[pair.server.address]
    pair.server.close()
    end = time.monotonic() + 30
    while pair.server._connections or not channel.is_stale:
        assert time.monotonic() < end, "the connection is kept"
        time.sleep(0.001)


HOLDER = """
import sys
from tests.engine.test_transfer_by_memory import make_pair
pair = make_pair()
transfer = pair.hold(range(10))
print(transfer.address, transfer.ticket, flush=True)
sys.stdin.readline()
pair.held.release(transfer.ticket)
pair.wait_until_free()
print("free", flush=True)
"""
CLIENT = """
import os, signal, sys
from octavo.cache import kv_channel
from octavo.types import KVTransfer
from tests.engine.test_transfer_by_memory import make_pair
pair = make_pair()
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
kv_channel.read_into = killed
list(pair.fetch(KVTransfer(*sys.argv[1:]), range(10)))
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], KVTransfer]]:
    """A process that holds ten blocks, and lets them go when it is told to."""
    command, pipe = [sys.executable, "-c", HOLDER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address, ticket = process.stdout.readline().split()
        yield process, KVTransfer(address, ticket)
        process.kill()


def test_another_process_that_dies_in_between(
    holder: tuple[subprocess.Popen[str], KVTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is there as long as it is copied, and is not used."""
    process, transfer = holder
    pair = make_pair()

    def meanwhile() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    copied = stop_once(monkeypatch, meanwhile)
    with pytest.raises(ChannelError):
        next(pair.fetch(transfer, range(10)))
    assert b"".join(copied) == b"".join(map(content_of, range(10)))
    pair.fetcher.close()
    pair.server.close()


def test_connections_to_servers_that_ended_are_let_go(holder: tuple[subprocess.Popen[str], KVTransfer]) -> None:
    """With the next prompt, which is of another server: one that starts again may have another port."""
    (process, transfer), pair = holder, make_pair()
    assert fetched(pair, transfer, range(10)) == [*range(10)]
    (channel,) = pair.fetcher._idle[transfer.address]
    process.kill()
    process.wait()
    assert fetched(pair, pair.hold(range(3)), range(3)) == [0, 1, 2]
    assert not pair.fetcher._idle[transfer.address]
    assert channel._socket.fileno() == -1
    pair.fetcher.close()
    pair.server.close()


def test_memory_comes_back_from_a_client_that_died(holder: tuple[subprocess.Popen[str], KVTransfer]) -> None:
    process, transfer = holder
    command = [sys.executable, "-c", CLIENT, transfer.address, transfer.ticket]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert process.communicate("go\n")[0] == "free\n"
