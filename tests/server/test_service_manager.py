"""What systemd is told, and that it is told nothing while the front process hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from octavo_server.front import service_manager
from octavo_server.front.service_manager import ServiceManager
from tests.conftest import Server


@pytest.fixture
def tmp_path(socket_folder: Path) -> Path:
    return socket_folder


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(30)
        yield receiver


def drain(receiver: socket.socket) -> list[bytes]:
    """All that has been told so far."""
    found = []
    receiver.setblocking(False)
    try:
        while True:
            found.append(receiver.recv(100))
    except BlockingIOError:
        return found
    finally:
        receiver.settimeout(30)


def fill(receiver: socket.socket) -> None:
    """Send to it until its queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.sendto(b"WATCHDOG=1", receiver.getsockname())


@pytest.mark.slow
def test_a_server_that_hangs_gives_no_sign_of_life(
    serve: Callable[..., Server], manager: socket.socket, tmp_path: Path
) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    server = serve("--backend", "instant", env=environment)
    starting = list(iter(lambda: manager.recv(100), b"READY=1"))
    assert set(starting) == {b"WATCHDOG=1"}
    assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    os.kill(server.process.pid, signal.SIGSTOP)
    while psutil.Process(server.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    drain(manager)
    time.sleep(0.5)
    assert not drain(manager)
    os.kill(server.process.pid, signal.SIGCONT)
    assert manager.recv(100) == b"WATCHDOG=1"
    assert server.stop() == 0
    assert b"STOPPING=1" in drain(manager)


def test_outside_systemd_nothing_is_told(monkeypatch: pytest.MonkeyPatch, manager: socket.socket) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    ServiceManager().stopping()
    assert not drain(manager)


def test_abstract_addresses_and_the_watch_on_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0octavo-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@octavo-test-{os.getpid()}")
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        monkeypatch.setenv("WATCHDOG_PID", "1")
        ServiceManager().ready()  # needs no event loop, as nothing is repeated
        assert drain(receiver) == [b"READY=1"]


@pytest.mark.parametrize("watch", ["40000", ""])
def test_a_change_is_told_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, manager: socket.socket, tmp_path: Path, watch: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", watch)
    monkeypatch.setattr(service_manager, "RETRY_SECONDS", 0.01)

    async def serve() -> list[bytes]:
        fill(manager)
        teller = ServiceManager()
        teller.starting()
        teller.ready()
        teller.stopping()
        drain(manager)
        await asyncio.sleep(0.1)
        return drain(manager)

    assert [message for message in asyncio.run(serve()) if message != b"WATCHDOG=1"] == [b"READY=1", b"STOPPING=1"]


def test_without_an_event_loop_a_change_is_told_at_the_next_sign(
    monkeypatch: pytest.MonkeyPatch, manager: socket.socket, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    fill(manager)
    teller = ServiceManager()
    teller.tell(b"READY=1")
    drain(manager)
    teller.be_alive_now()
    assert drain(manager) == [b"READY=1"]


def test_a_manager_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    ServiceManager().stopping()
