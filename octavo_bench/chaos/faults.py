"""The faults. Each is done to a server that is in use, and is over when its function returns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from octavo_bench.chaos import processes
from octavo_bench.chaos.careful_client import BUSY
from octavo_bench.chaos.target import ServerUnderTest
from octavo_fleet.proxy.connections import ConnectionFailed, Connections

JSON = [(b"content-type", b"application/json")]
MOST_START_SECONDS = 4.0
"""Moments of a start at which it ends are drawn up to here."""
STORM_REQUESTS = 150
HALF_REQUESTS = 60
POISONS = [
    b'{"prompt": "Hi", "max_tokens": NaN}',
    b'{"prompt": "Hi", "max_tokens": 1e400}',
    b'{"prompt": "Hi", "temperature": -1}',
    b'{"prompt": [99999999], "max_tokens": 1}',
    b'{"prompt": "\\ud800", "max_tokens": 1}',
    b'{"prompt": "Hi", "logit_bias": {"-1": 5}}',
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "' + b"x" * 300_000 + b'"}',
    b'{"prompt": "Hi", "structured_outputs": {"regex": "(((a{1,999}){1,999}){1,999})*"}}',
    b'{"prompt": "Hi", "structured_outputs": {"grammar": "root ::= root root"}}',
    b'{"prompt": "Hi", "structured_outputs": {"json": {"$ref": "#"}}}',
    b"\xff\xfe\x00",
    b'{"prompt": "Hi", "n": 1000000}',
    b'{"prompt": "Hi", "best_of": 5, "stop": [""]}',
]


class Wrong(Exception):
    """The server did something under a fault that it must not do."""


class Fault(NamedTuple):
    """A fault, and how often it is drawn beside the others."""

    run: Callable[[ServerUnderTest, random.Random], Awaitable[None]]
    weight: int
    breaks: bool = False
    """Whether connections may break by it."""
    loses: bool = False
    """Whether records of the journal may be lost by it."""


# --- processes ---


async def kill_engine(target: ServerUnderTest, rng: random.Random) -> None:
    """The engine process is killed, as by an out-of-memory killer of the host."""
    target.send(await target.next_engine(), signal.SIGKILL)


async def crash_engine(target: ServerUnderTest, rng: random.Random) -> None:
    """The engine process ends as with a bug in a kernel."""
    target.send(await target.next_engine(), rng.choice([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS]))


async def kill_engines(target: ServerUnderTest, rng: random.Random) -> None:
    """Several engine processes in a row are killed, some while they start."""
    for _ in range(rng.randrange(2, 5)):
        target.send(await target.next_engine(), signal.SIGKILL)
        await asyncio.sleep(rng.uniform(0.05, 1.5))


async def pause_engine(target: ServerUnderTest, rng: random.Random) -> None:
    """The engine process stands still for a while, shorter or longer than a hang is allowed to be."""
    pid = await target.next_engine()
    target.send(pid, signal.SIGSTOP)
    await asyncio.sleep(rng.choice([rng.uniform(0.2, 1.5), rng.uniform(4, 6)]))
    target.send(pid, signal.SIGCONT)


async def pause_front(target: ServerUnderTest, rng: random.Random) -> None:
    """The front process stands still for a while."""
    target.send(target.front, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(0.2, 4))
    target.send(target.front, signal.SIGCONT)


async def kill_front(target: ServerUnderTest, rng: random.Random) -> None:
    """The whole server is killed, and started again at once."""
    await target.end(signal.SIGKILL)
    target.launch()
    await target.wait_ready()


async def kill_child(target: ServerUnderTest, rng: random.Random) -> None:
    """The front process of a supervised server is killed."""
    await target.end_child(signal.SIGKILL)


async def hang_child(target: ServerUnderTest, rng: random.Random) -> None:
    """The front process of a supervised server stands still until its supervisor kills it."""
    await target.end_child(signal.SIGSTOP)


async def kill_starts(target: ServerUnderTest, rng: random.Random) -> None:
    """The server is killed, and so are the next ones at some moment of their start."""
    for _ in range(rng.randrange(1, 4)):
        await target.end(signal.SIGKILL)
        target.launch()
        await asyncio.sleep(rng.uniform(0, MOST_START_SECONDS))
    await target.wait_ready()


async def restart(target: ServerUnderTest, rng: random.Random) -> None:
    """The server is asked to end, and started again."""
    await target.end(signal.SIGTERM)
    target.launch()
    await target.wait_ready()


async def restart_starts(target: ServerUnderTest, rng: random.Random) -> None:
    """The server is asked to end, and so are the next ones at some moment of their start."""
    for _ in range(rng.randrange(1, 4)):
        await target.end(signal.SIGTERM)
        target.launch()
        await asyncio.sleep(rng.uniform(0, MOST_START_SECONDS))
    await target.wait_ready()


# --- resources ---


async def full_disk(target: ServerUnderTest, rng: random.Random) -> None:
    """The disk of journal and state is full for a while."""
    with _no_room(target):
        await asyncio.sleep(rng.uniform(0.5, 3))


async def full_disk_and_kill(target: ServerUnderTest, rng: random.Random) -> None:
    """The server is killed and started again while the disk is full, where it may end because it cannot open its
    database; then there is room, and it is killed again."""
    with _no_room(target):
        await asyncio.sleep(rng.uniform(0.2, 1))
        await target.end(signal.SIGKILL)
        target.launch()
        await asyncio.sleep(rng.uniform(0.2, MOST_START_SECONDS))
    await target.wait_ready_again()
    await asyncio.sleep(rng.uniform(0, 2))
    await kill_front(target, rng)


@contextlib.contextmanager
def _no_room(target: ServerUnderTest) -> Iterator[None]:
    """A full file system; where none could be mounted, files that cannot grow."""
    if target.disk.is_mounted:
        target.disk.fill()
        try:
            yield
        finally:
            target.disk.free()
        return
    before = resource.prlimit(target.front, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(target.front, resource.RLIMIT_FSIZE, before)


async def no_descriptors(target: ServerUnderTest, rng: random.Random) -> None:
    """The front process can open hardly any file or connection; sometimes its engine process ends then."""
    soft, hard = resource.prlimit(target.front, resource.RLIMIT_NOFILE)
    some = processes.last_descriptor(target.front) + 1 + rng.randrange(3)
    resource.prlimit(target.front, resource.RLIMIT_NOFILE, (some, hard))
    try:
        if rng.random() < 0.5:
            target.send(await target.next_engine(), signal.SIGKILL)
        await asyncio.sleep(rng.uniform(0.5, 3))
    finally:
        resource.prlimit(target.front, resource.RLIMIT_NOFILE, (soft, hard))


async def damage(target: ServerUnderTest, rng: random.Random) -> None:
    """The server is killed, and a bit of its journal changes before the next one reads it."""
    await target.end(signal.SIGKILL)
    for path in sorted(target.journal.glob("*.journal")):
        content = bytearray(path.read_bytes())
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
    target.launch()
    await target.wait_ready()


# --- clients ---


async def poison(target: ServerUnderTest, rng: random.Random) -> None:
    """Bodies that crash careless servers. Raises ``Wrong`` if one is answered with a server error."""
    connections = Connections(target.url + "/")
    headers = [(b"content-type", b"application/json")]
    try:
        for body in rng.sample(POISONS, 6):
            path = rng.choice(["v1/completions", "v1/chat/completions", "v1/responses"])
            async with connections.request("POST", path, headers, body) as connection:
                said = await connection.read_all()
                if connection.status >= 500 and connection.status not in BUSY:
                    raise Wrong(f"{path} {body[:80]!r}: {connection.status} {said[:200]!r}")
    except ConnectionFailed as error:
        raise Wrong(f"a poisoned request ended with {error}") from None
    finally:
        connections.close()


async def storm(target: ServerUnderTest, rng: random.Random) -> None:
    """Many clients at once, half of which go away at once. Raises ``Wrong`` for an answer but 200 and refusals."""
    connections = Connections(target.url + "/")
    data = b'{"prompt": [5, 6, 7], "max_tokens": 4, "stream": true}'

    async def one(goes: bool) -> int:
        try:
            async with connections.request("POST", "v1/completions", JSON, data) as c:
                if not goes:
                    await c.read_all()
                return c.status
        except ConnectionFailed:
            return 0

    try:
        statuses = await asyncio.gather(*(one(rng.random() < 0.5) for _ in range(STORM_REQUESTS)))
    finally:
        connections.close()
    if strange := {status for status in statuses if status not in (0, 200, *BUSY)}:
        raise Wrong(f"a storm of requests was answered with {strange}")


async def half_requests(target: ServerUnderTest, rng: random.Random) -> None:
    """Clients that send a part of a request, of which most go away."""
    head = (b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", b"content-length: 900")
    whole = b"\r\n".join((*head, b"", b"{"))
    writers = []
    for _ in range(HALF_REQUESTS):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(whole[: rng.randrange(1, len(whole))])
            writers.append(writer)
    await asyncio.sleep(rng.uniform(0, 1))
    for writer in writers:
        writer.transport.abort()


FAULTS: dict[str, Fault] = {
    "kill_engine": Fault(kill_engine, 5),
    "crash_engine": Fault(crash_engine, 2),
    "kill_engines": Fault(kill_engines, 1),
    "pause_engine": Fault(pause_engine, 2),
    "pause_front": Fault(pause_front, 2),
    "kill_front": Fault(kill_front, 5, breaks=True),
    "kill_starts": Fault(kill_starts, 1, breaks=True),
    "restart": Fault(restart, 2, breaks=True),
    "restart_starts": Fault(restart_starts, 1, breaks=True),
    "full_disk": Fault(full_disk, 2, loses=True),
    "full_disk_and_kill": Fault(full_disk_and_kill, 1, breaks=True, loses=True),
    "no_descriptors": Fault(no_descriptors, 2, breaks=True),
    "damage": Fault(damage, 1, breaks=True, loses=True),
    "poison": Fault(poison, 2),
    "storm": Fault(storm, 1),
    "half_requests": Fault(half_requests, 1),
}
"""By name."""
OF_SUPERVISED = {
    **{name: FAULTS[name] for name in ("kill_engine", "crash_engine", "kill_engines", "kill_front")},
    "kill_child": Fault(kill_child, 5, breaks=True),
    "hang_child": Fault(hang_child, 5, breaks=True),
}
"""Faults for a server with ``--supervise``. Others stop its front process for as long as that is killed for."""
