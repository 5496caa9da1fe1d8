"""The link between two hosts: who may join, what is carried, and how a loss is noticed."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.build.serve_stages import OWN, _compute
from octavo.config import EngineConfig, ModelSettings, to_flat
from octavo.errors import CheckpointError, ConfigError, RanksLost
from octavo.runtime.ranks import node_link
from octavo.runtime.ranks.node_link import NodeLink, NodeListener, NodeLost, Order, StageOutput, StartNode, join
from octavo.runtime.ranks.start_messages import RankFailed, RankReady
from octavo.system.channel import ChannelError, RefusedError
from tests.llm.tiny import write_checkpoint
from tests.runtime.thread_ranks import connected
from tests.server.test_keys import certificate


@pytest.fixture
def ends() -> Iterator[tuple[NodeLink, NodeLink]]:
    """That of the first host, and that of another."""
    down, up = connected(2)
    yield down[0], up[0]
    for link in (*down, *up):
        link.close()


@pytest.fixture
def settings() -> ModelSettings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    return ModelSettings(nnodes=2, node_rank=1, node_key="a key", master_port=port)


@contextlib.contextmanager
def listening(settings: ModelSettings) -> Iterator[None]:
    """A first host, for which one that may join is there at last."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(NodeListener(settings).wait)
        yield
        ends = [join(settings), *found.result()]
    for link in ends:
        link.close()


def losses(link: NodeLink) -> queue.SimpleQueue[tuple[str, int]]:
    found: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    link.on_lost = lambda problem, status: found.put((problem, status))
    return found


def test_messages_arrive_in_order_and_outputs_beside_them(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    outputs: queue.SimpleQueue[StageOutput] = queue.SimpleQueue()
    other.on_output = outputs.put
    large = bytes(range(256)) * 20_000
    first.tell(Order(b"a step", [(0, 7), (1, -3)]))
    first.tell(StageOutput((0, 1), large))
    first.tell(Order(b"the next", []))
    assert other.hear(Order) == Order(b"a step", [(0, 7), (1, -3)])
    assert other.hear(Order).message == b"the next"
    assert outputs.get(timeout=30) == StageOutput((0, 1), large)


def test_a_host_that_cannot_load_its_part_says_why(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    other.tell(RankFailed("CheckpointError", "host 1: a tensor is missing"))
    with pytest.raises(CheckpointError, match="host 1: a tensor is missing"):
        first.hear(RankReady)


def test_a_rank_that_has_ended_is_told_with_its_status(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    found = losses(first)
    other.tell(NodeLost("rank 1 of the engine ended", 3))
    assert found.get(timeout=30) == ("host 1: rank 1 of the engine ended", 3)
    with pytest.raises(RanksLost, match="host 1: rank 1 of the engine ended"):
        first.hear(RankReady)


def test_a_host_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a signal has stopped: its connections stay open."""
    monkeypatch.setattr(node_link, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(node_link, "ALIVE_SECONDS", 60.0)
    [first], [other] = connected(2)
    with contextlib.closing(first), contextlib.closing(other):
        with pytest.raises(RanksLost) as of_first:
            first.hear(RankReady)
        with pytest.raises(RanksLost) as of_other:
            other.hear(RankReady)
    assert "timed out" in str(of_first.value) + str(of_other.value)  # whichever finds out first closes the link


def test_a_closed_link_is_no_loss(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    of_first, of_other = losses(first), losses(other)
    first.close()
    assert of_other.get(timeout=30)[1] == -signal.SIGKILL
    assert of_first.empty()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"node_key": "another"}, "the keys differ"), ({"nnodes": 3}, "the fingerprints differ, in nnodes")],
)
def test_a_host_with_another_key_or_number_of_hosts_is_refused(
    changes: dict[str, object], words: str, settings: ModelSettings
) -> None:
    with listening(settings), pytest.raises(RefusedError, match=words):
        join(replace(settings, **changes))  # type: ignore[arg-type]


def test_strangers_hold_up_nobody(settings: ModelSettings) -> None:
    with listening(settings), contextlib.ExitStack() as strangers:
        for sent in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"):
            stranger = strangers.enter_context(
                socket.create_connection((settings.master_addr, settings.master_port), 30)
            )
            stranger.sendall(sent)


def test_hosts_of_other_machines_need_a_certificate(settings: ModelSettings, tmp_path: Path) -> None:
    elsewhere = replace(settings, master_addr="10.0.0.7")
    with pytest.raises(ConfigError, match=r"master_addr: .*10.0.0.7.*needs node_ssl_certfile"):
        NodeListener(elsewhere)
    with pytest.raises(ChannelError, match="node_ssl_ca_certs"):
        join(elsewhere)
    certificates = []
    for name in ("own", "another"):
        (tmp_path / name).mkdir()
        certificates.append(certificate(tmp_path / name))
    (own, key), (another, _) = certificates
    secured = replace(settings, node_ssl_certfile=str(own), node_ssl_keyfile=str(key), node_ssl_ca_certs=str(own))
    with listening(secured), pytest.raises(ChannelError, match="certificate verify failed"):
        join(replace(secured, node_ssl_ca_certs=str(another)))


def test_a_host_with_another_checkpoint_refuses_to_compute(ends: tuple[NodeLink, NodeLink], tmp_path: Path) -> None:
    first, other = ends
    hosts = {"pipeline_parallel_size": 2, "nnodes": 2, "node_key": "a key", "load_format": "dummy", "device": "cpu"}
    own = EngineConfig.from_flat({**hosts, "model": str(write_checkpoint(tmp_path)), "node_rank": 1})
    theirs = EngineConfig.from_flat({**hosts, "model": "/a folder of the first host"})
    flat = to_flat(own, EngineConfig)
    first.tell(StartNode(to_flat(theirs, EngineConfig), "another fingerprint"))
    with pytest.raises(ConfigError, match=f"the checkpoint {tmp_path} is not that of the host with node_rank 0"):
        _compute(other, {name: flat[name] for name in OWN})
