"""Blocks read by NIXL out of the memory of another server: needs the package, and no device or network of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cache.held_blocks import HeldBlocks
from octavo.system.channel import Channel, ChannelError
from octavo.types import KVTransfer
from tests.engine.test_transfer import SETTINGS, Half, ask, handed_over, make_half, wait_for_none

pytest.importorskip("nixl._api", reason="pip install nixl")
from octavo_fleet import nixl_channel
from octavo_fleet.nixl_channel import NixlAgent, NixlFetcher, NixlServer, Placed

NIXL = dataclasses.replace(SETTINGS, kv_connector="nixl")


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


@pytest.mark.parametrize("what", ["digests", "address", "agent", "sizes"])
def test_what_is_not_as_it_was_placed_is_computed(
    what: str, halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = halves
    tell = Channel.tell

    def changed(channel: Channel, message: Any) -> None:
        if isinstance(message, Placed):
            other = {"address": message.address + 1, "digests": message.digests[::-1], "agent": b"nobody"}
            setattr(message, what, {**other, "sizes": [1 << 40]}[what])
        tell(channel, message)

    monkeypatch.setattr(Channel, "tell", changed)
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


def test_a_server_with_another_connector_is_refused(halves: tuple[Half, Half]) -> None:
    prefill, decode = halves
    assert decode.offload.fetcher is not None
    decode.offload.fetcher.close()
    decode.fetch()
    request = handed_over(prefill, ask(None))
    assert isinstance(request.transfer, KVTransfer)
    assert decode.compute(request).num_cached_tokens == 0
