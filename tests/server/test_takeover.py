"""How a server and its successor talk: listening socket, connections, keys, and who may have the socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_server.front.takeover import HasRequest, Predecessor, Successor, TakeoverSocket, find_predecessor


@pytest.fixture
def tmp_path(socket_folder: Path) -> Path:
    return socket_folder


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Running:
    """A server that waits for a successor."""

    def __init__(self, path: Path, listener: socket.socket, has_request: HasRequest = lambda *_: False) -> None:
        self.successors: list[Successor] = []
        self.socket = TakeoverSocket(path, listener, has_request, self.successors.append)


async def found(path: Path) -> Predecessor:
    """The predecessor at ``path``: the search blocks, as it does at a server's start."""
    predecessor = await asyncio.to_thread(find_predecessor, path)
    assert predecessor is not None
    return predecessor


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_listener_and_connections_change_hands(tmp_path: Path, listener: socket.socket) -> None:
    async def main() -> None:
        running = Running(tmp_path / "s", listener)
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        predecessor = await found(tmp_path / "s")
        assert predecessor.listener.getsockname() == listener.getsockname()
        assert not running.successors
        adopted: list[socket.socket] = []
        predecessor.start(adopted.append)
        await until(lambda: running.successors)
        pairs = [socket.socketpair() for _ in range(300)]  # more than are in transit at once
        for ours, _ in pairs:
            running.successors[0].take(ours.fileno())
            ours.close()
        await until(lambda: len(adopted) == len(pairs))
        for number, (connection, (_, client)) in enumerate(zip(adopted, pairs, strict=True)):
            connection.send(b"%d" % number)
            assert client.recv(10) == b"%d" % number
            connection.close()
            client.close()
        ended = asyncio.create_task(predecessor.ended())
        await asyncio.sleep(0.01)
        assert not ended.done()
        running.socket.close()
        await asyncio.wait_for(ended, 30)
        predecessor.close()
        predecessor.listener.close()

    asyncio.run(main())


def test_keys_of_running_requests(tmp_path: Path, listener: socket.socket) -> None:
    async def main() -> None:
        known = (str(tmp_path.resolve()), "owner", "key")
        running = Running(tmp_path / "s", listener, lambda *asked: asked == known)
        predecessor = await found(tmp_path / "s")
        predecessor.start(lambda _: None)
        keys = ["key", "other", "key", "k" * 255]
        answers = await asyncio.gather(*(predecessor.has_request(tmp_path, "owner", key) for key in keys))
        assert answers == [True, False, True, False]
        assert not await predecessor.has_request(tmp_path / "x", "owner", "key")
        running.socket.close()
        await predecessor.ended()
        # The journal knows now.
        assert await predecessor.has_request(tmp_path, "owner", "other")
        predecessor.listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_sent", [True, False])
def test_connections_arrive_although_a_question_does_not(
    tmp_path: Path, listener: socket.socket, is_sent: bool
) -> None:
    async def main() -> None:
        running = Running(tmp_path / "s", listener)
        predecessor = await found(tmp_path / "s")
        adopted: list[socket.socket] = []
        predecessor.start(adopted.append)
        await until(lambda: running.successors)
        ours, client = socket.socketpair()
        running.successors[0].take(ours.fileno())
        ours.close()
        if not is_sent:
            running.socket.close()
        asked = asyncio.create_task(predecessor.has_request(tmp_path, "owner", "key"))
        await asyncio.sleep(0)  # the question is sent, and not read
        running.socket.close()
        assert await asked
        await until(lambda: adopted)
        adopted[0].send(b"here")
        assert client.recv(10) == b"here"
        for end in (predecessor, predecessor.listener, adopted[0], client):
            end.close()

    asyncio.run(main())


def test_a_successor_that_fails_changes_nothing(tmp_path: Path, listener: socket.socket) -> None:
    async def main() -> None:
        running = Running(tmp_path / "s", listener)
        for _ in range(3):
            predecessor = await found(tmp_path / "s")
            predecessor.listener.close()
            predecessor.close()
        await asyncio.sleep(0.01)
        assert not running.successors
        assert listener.getsockname()[1]
        first, second = await found(tmp_path / "s"), await found(tmp_path / "s")
        for each in (first, second):
            each.start(lambda _: None)
        await asyncio.wait_for(second.ended(), 30)  # only one can take over
        assert len(running.successors) == 1
        for each in (first, second):
            each.close()
            each.listener.close()
        running.socket.close()

    asyncio.run(main())


def test_the_successor_waits_at_the_same_path(tmp_path: Path, listener: socket.socket) -> None:
    async def main() -> None:
        first = Running(tmp_path / "s", listener)
        predecessor = await found(tmp_path / "s")
        predecessor.start(lambda _: None)
        await until(lambda: first.successors)
        second = Running(tmp_path / "s", predecessor.listener)
        first.socket.close()  # leaves the path to it
        again = await found(tmp_path / "s")
        again.close()
        second.socket.close()
        assert not list(tmp_path.iterdir())
        again.listener.close()
        predecessor.listener.close()

    asyncio.run(main())


def test_paths_without_a_server(tmp_path: Path, listener: socket.socket) -> None:
    assert find_predecessor(tmp_path / "none") is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ended:
        ended.bind(str(tmp_path / "ended"))
    assert find_predecessor(tmp_path / "ended") is None

    async def main() -> None:
        running = Running(tmp_path / "ended", listener)  # in place of what is there
        running.socket.close()

    asyncio.run(main())
    with pytest.raises(ConfigError, match=r"takeover_socket: cannot take over at .*path too long"):
        find_predecessor(tmp_path / ("x" * 200))
    (tmp_path / "file").write_text("")
    assert find_predecessor(tmp_path / "file") is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        with pytest.raises(ConfigError, match="takeover_socket: cannot take over"):
            find_predecessor(tmp_path / "other")


def test_no_descriptor_is_left_open(tmp_path: Path, listener: socket.socket) -> None:
    async def once() -> None:
        running = Running(tmp_path / "s", listener)
        predecessor = await found(tmp_path / "s")
        predecessor.start(lambda connection: connection.close())
        await until(lambda: running.successors)
        running.successors[0].take(listener.fileno())
        await asyncio.sleep(0.01)
        for end in (predecessor, running.socket, predecessor.listener):
            end.close()

    asyncio.run(once())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(once())
    assert len(os.listdir("/proc/self/fd")) <= before
