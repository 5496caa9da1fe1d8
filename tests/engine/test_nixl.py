"""Blocks read by NIXL out of the memory of another server: by the package if it is there, else by an imitation."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.cache import kv_channel
from octavo.cache.held_blocks import HeldBlocks
from octavo.errors import ConfigError
from octavo.system.channel import Channel, ChannelError
from octavo.types import KVTransfer
from octavo_fleet import nixl_channel
from octavo_fleet.nixl_channel import NixlAgent, NixlFetcher, NixlServer, Placed
from tests.engine.test_transfer import SETTINGS, Half, ask, handed_over, make_half, wait_for_none

NIXL = dataclasses.replace(SETTINGS, kv_connector="nixl")


class Imitation:
    """``nixl_agent`` within a process: reads are copies, of memory that both agents have registered."""

    agents: dict[str, Imitation] = {}

    def __init__(self, name: str, config: object) -> None:
        self.name, self.registered = name, list[tuple[int, int]]()
        self.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [(address, size) for address, size, _, _ in regions]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return self.agents[metadata.decode()].name.encode()

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> tuple[int, int]:
        ((address, size, _),) = regions
        return address, size

    def initialize_xfer(self, way: str, ours: tuple[int, int], theirs: tuple[int, int], name: str) -> Any:
        for agent, (address, size) in ((self, ours), (self.agents[name], theirs)):
            if not any(at <= address and address + size <= at + room for at, room in agent.registered):
                raise KeyError("memory that is not registered")
        return ours[0], theirs[0], ours[1]

    def transfer(self, transfer: tuple[int, int, int]) -> str:
        return "PROC"

    def check_xfer_state(self, transfer: tuple[int, int, int]) -> str:
        ctypes.memmove(*transfer)
        return "DONE"

    def release_xfer_handle(self, transfer: object) -> None:
        pass


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("nixl") is None:
        api = SimpleNamespace(nixl_agent=Imitation, nixl_agent_config=lambda backends: backends)
        monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
        monkeypatch.setitem(sys.modules, "nixl._api", api)
        monkeypatch.setattr(Imitation, "agents", {})


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Half, Half]]:
    """A prefill server and a decode server, of which one reads the other's memory a few blocks at a time."""
    prefill, decode = make_half(), make_half()
    monkeypatch.setattr(nixl_channel, "STAGE_BYTES", 3 * prefill.store.num_bytes)
    held = HeldBlocks(1 << 20, 60.0)
    prefill.offload.held = held, NixlServer(NIXL, held, prefill.offload.fingerprint)
    decode.offload.fetcher = NixlFetcher(NIXL, decode.offload.fingerprint)
    yield prefill, decode
    prefill.engine.close()
    decode.engine.close()


def test_a_prompt_is_computed_once_and_nothing_is_held_after_it_was_read(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    for number in range(3):
        request = handed_over(prefill, ask(None, number + 1, salt=str(number)))
        assert decode.compute(request).num_cached_tokens == 36
        wait_for_none(prefill)
    assert decode.offload.stats.num_received == 27
    assert decode.engine.stats().num_transfer_failures == 0


def test_prompts_are_read_at_the_same_time(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    requests = [handed_over(prefill, ask(None, number + 1, salt=str(number))) for number in range(8)]
    for request in requests:
        decode.engine.add(request)
    cached = [output.num_cached_tokens for output in run(decode) if output.finish_reason]
    assert cached == [36] * 8
    wait_for_none(prefill)


def run(half: Half) -> Iterator[Any]:
    while half.engine.has_work:
        yield from half.engine.step()


@pytest.mark.parametrize("what", ["digests", "address", "agent", "sizes", "most together"])
def test_what_is_not_as_it_was_placed_is_computed(
    what: str, halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = halves
    tell = Channel.tell

    def changed(channel: Channel, message: Any) -> None:
        if isinstance(message, Placed) and what == "most together":  # each of them may be as large
            message.sizes, message.digests = [prefill.store.num_bytes] * 4, [bytes(32)] * 4
        elif isinstance(message, Placed):
            other = {"address": message.address + 1, "digests": message.digests[::-1], "agent": b"nobody"}
            setattr(message, what, {**other, "sizes": [1 << 40]}[what])
        tell(channel, message)

    def allocate(size: int) -> memoryview:
        assert size <= nixl_channel.STAGE_BYTES
        return kv_channel.plain_memory(size)

    monkeypatch.setattr(Channel, "tell", changed)
    monkeypatch.setattr(decode.offload.fetcher, "_allocate", allocate)
    assert decode.compute(handed_over(prefill, ask(None))).num_cached_tokens == 0
    assert decode.engine.stats().num_transfer_failures == 1
    monkeypatch.undo()


def test_memory_into_which_is_still_read_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, server = NixlAgent(), NixlAgent()
    with server.memory(1000) as theirs, agent.memory(1000) as ours:
        placed = Placed(server.told(), theirs.ctypes.data, [1000], [b""], True)
        with monkeypatch.context() as patch:
            patch.setattr(type(agent._agent), "check_xfer_state", lambda *_: "PROC")
            patch.setattr(type(agent._agent), "transfer", lambda *_: "PROC")
            with pytest.raises(ChannelError, match=r"did not read its memory within 0.01 s"):
                agent.read(placed, 1000, ours, 0.01)
            with agent.memory(1000) as other:
                assert other is not ours
        theirs[:1000] = 7
        agent.read(placed, 1000, other, 30.0)
        assert (other[:1000] == 7).all()


class NixlError(Exception):
    """Failures of NIXL have classes of its own."""


def fails(*_: object) -> Any:
    raise NixlError("no")


@pytest.mark.parametrize("name", ["register_memory", "get_xfer_descs", "transfer", "check_xfer_state"])
def test_a_prompt_is_computed_where_nixl_fails_and_fetched_where_it_does_not(
    name: str, halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = halves
    agent = decode.offload.fetcher._agent  # type: ignore[union-attr]
    monkeypatch.setattr(kv_channel, "REST_SECONDS", 0.0)
    first = handed_over(prefill, ask(None, salt="first"))
    with monkeypatch.context() as patch:
        patch.setattr(agent._agent, name, fails)
        assert decode.compute(first).num_cached_tokens == 0
        assert decode.engine.stats().num_transfer_failures == 1
    assert decode.compute(handed_over(prefill, ask(None, 2, salt="second"))).num_cached_tokens == 36
    assert not agent._busy
    assert agent._free


def test_what_nixl_does_not_release_is_forgotten(halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = halves
    agent = decode.offload.fetcher._agent  # type: ignore[union-attr]
    monkeypatch.setattr(type(agent._agent), "release_xfer_handle", fails)
    with agent.memory(1000) as piece:
        agent._busy.append((piece, (0, 0, 0)))
    assert decode.compute(handed_over(prefill, ask(None))).num_cached_tokens == 36
    assert not agent._busy


def test_without_nixl_or_where_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["nixl._api"], "nixl_agent", fails)
    with pytest.raises(ConfigError, match="kv_connector: NIXL cannot be started: NixlError: no"):
        NixlAgent()
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"kv_connector: nixl needs: pip install 'octavo\[nixl\]'"):
        NixlAgent()


def test_a_server_with_another_connector_is_refused(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    assert decode.offload.fetcher is not None
    decode.offload.fetcher.close()
    decode.fetch()
    request = handed_over(prefill, ask(None))
    assert isinstance(request.transfer, KVTransfer)
    assert decode.compute(request).num_cached_tokens == 0
