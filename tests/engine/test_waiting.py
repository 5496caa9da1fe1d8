"""The queue of sequences that wait."""

from __future__ import annotations

import random

from octavo.engine.waiting import WaitingQueue
from octavo.types import Sequence
from tests.engine.making import make_request


def make_sequence(number: int) -> Sequence:
    return Sequence(make_request(number), order=(number,))


def pop(queue: WaitingQueue) -> Sequence:
    return queue.remove(queue.first().id)


def test_in_order_whatever_the_order_of_arrival() -> None:
    queue = WaitingQueue()
    for number in (3, 1, 2):
        queue.push(make_sequence(number))
    assert queue.first().id == 1
    assert [pop(queue).id for _ in range(3)] == [1, 2, 3]
    assert not queue


def test_removed_ones_are_passed_over() -> None:
    queue = WaitingQueue()
    for number in range(4):
        queue.push(make_sequence(number))
    queue.remove(0)
    assert 0 not in queue
    assert queue.remove(2).id == 2
    assert len(queue) == 2
    assert [pop(queue).id for _ in range(2)] == [1, 3]


def test_the_same_id_may_come_again() -> None:
    queue = WaitingQueue()
    for number in (1, 2, 3):
        queue.push(make_sequence(number))
    queue.remove(2)
    again = Sequence(make_request(2), order=(9,))
    queue.push(again)
    assert [pop(queue).order for _ in range(3)] == [(1,), (3,), (9,)]


def test_leftovers_do_not_pile_up() -> None:
    rng = random.Random(3)
    queue = WaitingQueue()
    waiting: list[int] = []
    for number in range(5000):
        queue.push(make_sequence(number))
        waiting.append(number)
        if rng.random() < 0.9:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif rng.random() < 0.5:
            assert pop(queue).id == waiting.pop(0)
        queue.check()
    while waiting:
        assert pop(queue).id == waiting.pop(0)
    assert not queue._heap
