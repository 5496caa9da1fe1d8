"""KV events over ZeroMQ, read as a client of vLLM reads them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from octavo.cache.kv_events import Removed, Stored
from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo_server.engines import kv_publisher
from octavo_server.engines.kv_publisher import KVEventPublisher, KVEventsConfig, parse_kv_events_config, shifted

zmq = pytest.importorskip("zmq")

WAIT_MS = 30_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Client:
    """A subscriber and a client of the replay."""

    def __init__(self, publisher: KVEventPublisher, config: KVEventsConfig) -> None:
        self.publisher = publisher
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(config.endpoint)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kv")
        self.replay = self.context.socket(zmq.REQ)
        self.replay.connect(config.replay_endpoint)
        deadline = time.monotonic() + 30
        self.first = 0
        while not self.events.poll(20):  # until the subscription has arrived
            assert time.monotonic() < deadline
            publisher.add([Removed(1, 99)])
            self.first += 1
        while int.from_bytes(self.events.recv_multipart()[1], "big") < self.first - 1:
            pass

    def receive(self) -> tuple[int, Any]:
        assert self.events.poll(WAIT_MS)
        topic, number, payload = self.events.recv_multipart()
        assert topic == b"kv-cache"
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)


@pytest.fixture
def client() -> Iterator[Client]:
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    config = KVEventsConfig(endpoint=addresses[0], replay_endpoint=addresses[1], topic="kv-cache", buffer_steps=1000)
    publisher = KVEventPublisher(config, 0)
    client = Client(publisher, config)
    yield client
    publisher.close()
    client.context.destroy(linger=0)


def test_a_step_is_a_batch_in_vllms_layout(client: Client) -> None:
    client.publisher.add(
        [
            Stored(1, 11, 0, [1, 2], "salt"),
            Stored(2, 12, 11, [3, 4]),
            Stored(3, 13, 11, [5, 6]),
            Removed(4, 11),
            Removed(5, 12),
        ]
    )
    number, (when, events, rank) = client.receive()
    assert number == client.first
    assert abs(when - time.time()) < 60
    assert rank == 0
    same = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "type": "BlockStored"}
    assert events == [
        {
            "block_hashes": [11, 12],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "extra_keys": [["salt"], None],
            **same,
        },
        {"block_hashes": [13], "parent_block_hash": 11, "token_ids": [5, 6], **same},
        {"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "GPU"},
    ]
    client.publisher.clear()
    assert client.receive()[1][1] == [{"type": "AllBlocksCleared"}]


def test_what_was_missed_is_replayed(client: Client) -> None:
    for number in range(5):
        client.publisher.add([Removed(number, 100 + number)])
    start = client.first + 2
    while client.receive()[0] < start + 2:
        pass
    client.replay.send(start.to_bytes(8, "big"))
    replayed = []
    assert client.replay.poll(WAIT_MS)
    number, payload = client.replay.recv_multipart()
    replayed.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1][0]["block_hashes"]))
    assert replayed == [(start, [102])]


def test_the_replay_ends_with_a_marker(client: Client) -> None:
    dealer = client.context.socket(zmq.DEALER)
    dealer.connect(client.replay.getsockopt_string(zmq.LAST_ENDPOINT))
    client.publisher.add([Removed(1, 7)])
    last = client.receive()[0]
    dealer.send_multipart((b"", last.to_bytes(8, "big")))
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart()[1] == last.to_bytes(8, "big")
    assert dealer.recv_multipart() == [b"", (-1).to_bytes(8, "big", signed=True), b""]
    for bad in ((b"",), (b"", b"x" * 9), (b"no", b"1")):  # no request at all: not answered, and no harm done
        dealer.send_multipart(bad)
    dealer.send_multipart((b"", (last + 1).to_bytes(8, "big")))
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart()[1:] == [(-1).to_bytes(8, "big", signed=True), b""]


def test_unread_replays_are_not_kept(client: Client) -> None:
    """A peer has one replay queued, and what the buffers of the two sockets hold; others are served meanwhile."""
    endpoint = client.replay.getsockopt_string(zmq.LAST_ENDPOINT)
    tokens = [200_000 + i for i in range(20_000)]
    for number in range(50):
        client.publisher.add([Stored(number, number + 1, 0, tokens)])
    idle = client.context.socket(zmq.DEALER)
    idle.set_hwm(100_000)
    idle.setsockopt(zmq.RCVHWM, 1)
    idle.connect(endpoint)
    for _ in range(400):
        idle.send_multipart((b"", bytes(8)))
    last = client.first + 49
    while client.receive()[0] < last:
        pass
    client.replay.send(last.to_bytes(8, "big"))
    assert client.replay.poll(WAIT_MS), "another peer"
    client.replay.recv_multipart()
    num_received = 0
    while num_received < 50 or idle.poll(300):
        idle.recv_multipart()
        num_received += 1
        assert num_received < 20_000, "400 replays have more"


def test_the_buffer_is_bounded_in_bytes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_BUFFER_BYTES", 100_000)
    for number in range(10):
        client.publisher.add([Stored(number, number + 1, 0, [200_000] * 6000)])  # 30 kB each
    last = client.first + 9
    while client.receive()[0] < last:
        pass
    dealer = client.context.socket(zmq.DEALER)
    dealer.connect(client.replay.getsockopt_string(zmq.LAST_ENDPOINT))
    dealer.send_multipart((b"", bytes(8)))
    numbers = []
    while dealer.poll(WAIT_MS) and (frames := dealer.recv_multipart())[2]:
        numbers.append(int.from_bytes(frames[1], "big"))
    assert numbers == [last - 2, last - 1, last]


def test_a_peer_that_sends_much_is_cut(client: Client) -> None:
    dealer = client.context.socket(zmq.DEALER)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(client.replay.getsockopt_string(zmq.LAST_ENDPOINT))
    dealer.send_multipart((b"", b"x" * 1_000_000))
    assert monitor.poll(WAIT_MS)
    client.publisher.add([Removed(1, 7)])
    assert client.receive()


def test_settings_are_checked() -> None:
    assert parse_kv_events_config('{"publisher": "null"}') is None
    assert parse_kv_events_config('{"enable_kv_cache_events": false}') is None
    for text in (
        '{"endpoint": 5}',
        '{"port": 5557}',
        '{"publisher": "kafka"}',
        '{"hwm": 0}',
        '{"hwm": 2147483647}',
        "no",
    ):
        with pytest.raises(ConfigError, match="kv_events_config"):
            parse_kv_events_config(text)
    with pytest.raises(ConfigError, match="prompts of other keys"):
        ServeConfig.from_flat({"kv_events_config": "{}", "isolate_keys": True})
    with pytest.raises(ConfigError, match="cannot listen"):
        KVEventPublisher(KVEventsConfig(endpoint="tcp://203.0.113.1:5557"), 0)


def test_each_rank_has_its_own_port() -> None:
    assert shifted("tcp://*:5557", 3) == "tcp://*:5560"
    assert shifted("ipc:///tmp/events", 0) == "ipc:///tmp/events"
    assert shifted("ipc:///tmp/events", 1) == "ipc:///tmp/events-1"
    with pytest.raises(ConfigError, match="no port"):
        shifted("tcp://127.0.0.1", 0)
