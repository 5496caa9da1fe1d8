"""Conversations as a workload of the simulator."""

from __future__ import annotations

import pytest

from tests.ray.conversations import Conversations, ConversationShape

SHAPE = ConversationShape(num_clients=3, conversations_each=2, turns=4, first=100, more=10, answer=5, pause=2.0)


def test_turns_repeat_all_before_them_and_conversations_share_nothing() -> None:
    workload = Conversations(SHAPE)
    starts = []
    while (job := workload.next_job()) is not None:
        starts.append(job)
    assert len(starts) == SHAPE.num_clients
    assert [job.arrival for job in starts] == sorted(job.arrival for job in starts)
    texts: set[int] = set()
    for job in starts:
        seen = [job]
        while (following := workload.after(seen[-1], seen[-1].arrival + 1.0)) is not None:
            assert following.arrival == pytest.approx(seen[-1].arrival + 1.0 + SHAPE.pause)
            seen.append(following)
        assert len(seen) == SHAPE.turns * SHAPE.conversations_each
        for number, each in enumerate(seen):
            turn = number % SHAPE.turns
            assert len(each.tokens()) == SHAPE.first + turn * (SHAPE.more + SHAPE.answer)
            if turn:
                before = seen[number - 1]
                begin = [*before.tokens(), *[before.output_token] * before.output_len]
                assert each.tokens()[: len(begin)] == begin
            else:
                assert not texts & set(each.tokens())
            texts |= set(each.tokens())
