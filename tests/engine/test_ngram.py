"""N-gram drafts."""

from __future__ import annotations

import random

import pytest

from octavo.engine.speculative.proposer import NgramProposer, Seen
from octavo.engine.speculative.speculation import Speculation
from octavo.speculative_config import Ngram
from tests.engine.making import make_engine, make_request, run_to_end, tokens_of
from tests.operations import count_lines
from tests.oracle import expected_output


@pytest.mark.parametrize(
    ("tokens", "count", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 9, [3, 4, 5, 1, 2, 3, 4, 5, 1]),
        ([7, 1, 2, 9, 8, 1, 2, 3, 7, 1, 2], 2, [9, 8]),  # three tokens go before two
        ([1, 2, 9, 1, 2, 3, 1, 2], 1, [3]),  # the latest of two places
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
    ],
)
def test_drafts_are_what_followed_the_last_ngram(tokens: list[int | None], count: int, want: list[int]) -> None:
    assert Seen(2, 3).continuation(tokens, len(tokens), count) == want


def slow_drafts(tokens: list[int], count: int, least: int, most: int) -> list[int]:
    for length in range(most, least - 1, -1):
        run = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(tokens) > length and tokens[start : start + length] == run:
                grown = list(tokens)
                for place in range(count):
                    grown.append(grown[start + length + place])
                return grown[len(tokens) :]
    return []


def test_drafts_equal_those_of_a_linear_search() -> None:
    rng = random.Random(2)
    for _ in range(200):
        least = rng.randrange(1, 4)
        most = rng.randrange(least, 5)
        seen, tokens = Seen(least, most), [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        for _ in range(12):
            assert seen.continuation(list(tokens), len(tokens), 4) == slow_drafts(tokens, 4, least, most)
            tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]


def test_each_token_is_looked_at_once() -> None:
    costs = []
    for length in (50, 5000):
        seen, tokens = Seen(2, 3), [i % 7 for i in range(length)]
        seen.continuation(list(tokens), length, 4)
        grown: list[int | None] = [*tokens, 3]
        costs.append(count_lines(lambda seen=seen, grown=grown: seen.continuation(grown, len(grown), 4)))  # type: ignore[misc]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_no_token_changes(depth: int, num_blocks: int) -> None:
    """Over a model whose text has few words, so that some drafts are accepted."""
    rng = random.Random(num_blocks)
    engine, _ = make_engine(num_blocks=num_blocks, depth=depth)
    engine.scheduler.speculation = Speculation(NgramProposer(Ngram(prompt_lookup_min=1)), 4)
    requests = []
    for request_id in range(12):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        answer, _ = expected_output(make_request(request_id, prompt=prompt, max_tokens=8))
        requests.append(make_request(request_id, prompt=[*prompt, *answer, *prompt], max_tokens=8))
        engine.add(requests[-1])
    outputs = run_to_end(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == expected_output(request)[0]
    stats = engine.stats()
    assert 0 <= stats.num_accepted_drafts <= stats.num_drafts
    assert stats.num_drafts > 0
    assert (stats.num_preemptions > 0) is (num_blocks == 12)


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    engine, runner = make_engine()
    proposer = NgramProposer(Ngram(prompt_lookup_min=1))
    engine.scheduler.speculation = Speculation(proposer, 4)
    engine.add(make_request(0, prompt=[1, 2, 1, 2], max_tokens=6))
    run_to_end(engine)
    for kept in (runner.tables, runner.digests, runner.plans):
        kept.clear()
    assert not proposer._seen
