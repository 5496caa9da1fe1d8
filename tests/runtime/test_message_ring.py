"""The ring of messages: every reader gets every message, whatever its length and whenever it looks."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from octavo.errors import RanksLost
from octavo_kernels.cpu.message_ring import HEAD, Ring, RingReader, RingWriter, ring_bytes


class Given(Exception):
    """Waiting was given up."""


def make_ring(num_readers: int, capacity: int) -> Ring:
    return Ring(np.zeros(ring_bytes(num_readers, capacity), np.uint8), num_readers)


def never() -> None:
    pass


@pytest.mark.parametrize("capacity", [64, 1000, 1 << 16])
def test_every_reader_gets_every_message(capacity: int) -> None:
    ring, rng = make_ring(3, capacity), random.Random(capacity)
    messages = [rng.randbytes(rng.choice([0, 1, 7, 100, 3000])) for _ in range(300)]
    found: list[list[bytes]] = [[] for _ in range(3)]

    def read(index: int) -> None:
        reader, delays = RingReader(ring, index, never), random.Random(index)
        for _ in messages:
            found[index].append(reader.next())
            if delays.random() < 0.05:
                time.sleep(delays.random() * 0.003)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    writer = RingWriter(ring, never)
    for message in messages:
        writer.write(message)
        if rng.random() < 0.05:
            time.sleep(rng.random() * 0.003)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert found == [messages] * 3


def test_a_sleeping_reader_wakes_at_once() -> None:
    ring = make_ring(1, 1000)
    seconds: list[float] = []

    def read() -> None:
        reader = RingReader(ring, 0, never)
        for _ in range(20):
            sent = float(reader.next())
            seconds.append(time.perf_counter() - sent)

    thread = threading.Thread(target=read)
    thread.start()
    writer = RingWriter(ring, never)
    for _ in range(20):
        time.sleep(0.01)
        writer.write(str(time.perf_counter()).encode())
    thread.join(timeout=60)
    assert sorted(seconds)[10] < 0.5  # a nap takes a second


def test_waiting_ends_when_it_is_in_vain() -> None:
    def give_up() -> None:
        raise Given

    ring = make_ring(1, 100)
    with pytest.raises(Given):
        RingReader(ring, 0, give_up).next()
    with pytest.raises(Given):
        RingWriter(ring, give_up).write(bytes(200))


def test_a_message_out_of_order_is_refused() -> None:
    ring = make_ring(1, 1000)
    writer = RingWriter(ring, never)
    writer._write(HEAD.pack(1, 0))
    with pytest.raises(RanksLost, match="message 1 came in place of message 0"):
        RingReader(ring, 0, never).next()
