"""Messages to the sockets on which KV events are published and replayed: other clients get theirs.

The first byte says what the others are: frames of a message, each behind its length in a byte, or, if it is odd, bytes
on a connection that need not be of ZeroMQ.
"""

from __future__ import annotations

import contextlib
import socket

import zmq

from octavo_server.engines.kv_publisher import END, KVEventPublisher, KVEventsConfig
from tests.fuzz.target import Fault, Target
from tests.server.test_kv_publisher import free_port

FIRST = b"\x00" + b"\x00" + b"\x08" + bytes(8)
GREETING = b"\x01" + b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
SECONDS = 5.0


def make() -> Target:
    return KVEventSockets()


class KVEventSockets(Target):
    seeds = [FIRST, FIRST + b"\x03abc", b"\x00" + b"\x08" + bytes(8), GREETING, GREETING + b"\x04\x05READY"]
    words = (b"\x00", b"\x08" + b"\xff" * 8, b"\x04\x19\x05READY", b"\x01\x00", b"\xff" * 9)

    def __init__(self) -> None:
        super().__init__()
        self._port = free_port()
        replay = f"tcp://127.0.0.1:{self._port}"
        config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"ipc://{self.folder}/events", replay_endpoint=replay, buffer_steps=8
        )
        self._publisher = KVEventPublisher(config, 0)
        for _ in range(4):
            self._publisher.clear()
        self._context = zmq.Context()
        self._client = self._context.socket(zmq.DEALER)
        self._client.set(zmq.RCVTIMEO, int(SECONDS * 1000))
        self._client.connect(replay)

    def read(self, data: bytes) -> None:
        if data[:1] and data[0] % 2:
            with (
                socket.create_connection(("127.0.0.1", self._port), SECONDS) as connection,
                contextlib.suppress(OSError),
            ):
                connection.sendall(data[1:])
        else:
            with self._context.socket(zmq.DEALER) as other:
                other.connect(f"tcp://127.0.0.1:{self._port}")
                other.send_multipart(_frames(data[1:]) or [b""])
                other.close(linger=100)
        self._client.send_multipart((b"", bytes(8)))
        with contextlib.suppress(zmq.Again):
            while True:
                _, number, _ = self._client.recv_multipart()
                if number == END:
                    return
        raise Fault(f"no replay within {SECONDS} s afterwards")

    def close(self) -> None:
        self._client.close(0)
        self._context.destroy(0)
        self._publisher.close()
        super().close()


def _frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        length = data[0]
        frames.append(data[1 : 1 + length])
        data = data[1 + length :]
    return frames
