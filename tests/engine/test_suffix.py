"""Suffix decoding: matches and drafts against a linear search, bounded memory, and the text, which never changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.engine.speculative.speculation import Speculation
from octavo.engine.speculative.suffix import CONTEXT, MOST_MATCHES, NOTHING, MatchChains, RecentAnswers, SuffixProposer
from octavo.speculative_config import Suffix
from octavo.types import Sequence
from tests.engine.making import make_engine, make_request, run_to_end, tokens_of
from tests.operations import count_lines
from tests.oracle import expected_output


def slow_matches(texts: list[list[int]], context: list[int], most: int) -> list[tuple[int, int]]:
    """Text and position of each occurrence of the context's end, latest first, with the matched length."""
    found = []
    for number, text in reversed(list(enumerate(texts))):
        for place in range(len(text) - 1, CONTEXT - 1, -1):
            length = 0
            while length < min(len(context), place) and text[place - 1 - length] == context[-1 - length]:
                length += 1
            if length >= CONTEXT and text[place] != NOTHING:
                found.append((number, place, length))
    return [(number * 1000 + place, length) for number, place, length in found[:most]]


def slow_walk(texts: list[list[int]], matches: list[tuple[int, int]], count: int, settings: Suffix) -> list[int]:
    """The draft with the largest score, one length of context after the other."""
    best: list[int] = []
    best_score = 0.0
    for length in range(settings.suffix_decoding_max_tree_depth, CONTEXT - 1, -1):
        places = [divmod(place, 1000) for place, matched in matches if matched >= length]
        most = min(count, int(length * settings.suffix_decoding_max_spec_factor))
        tokens, survival, score = list[int](), 1.0, 0.0
        while places and len(tokens) < most:
            ahead = len(tokens)
            found = []
            for number, place in places:
                text = [*texts[number], *tokens] if number == len(texts) - 1 else [*texts[number], NOTHING]
                found.append(text[place + ahead])
            token = max(found, key=lambda token, found=found: (found.count(token), -found.index(token)))  # type: ignore[misc]
            survival *= found.count(token) / len(found)
            if token == NOTHING or survival < settings.suffix_decoding_min_token_prob:
                break
            tokens.append(token)
            score += survival
            places = [place for place, other in zip(places, found, strict=True) if other == token]
        if score > best_score:
            best, best_score = tokens, score
    return best


@pytest.mark.parametrize("vocab", [2, 3, 8])
def test_matches_and_drafts_equal_those_of_a_linear_search(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(150):
        settings = Suffix(
            suffix_decoding_max_tree_depth=rng.randrange(2, 12),
            suffix_decoding_max_spec_factor=rng.choice([0.5, 1.0, 2.0]),
            suffix_decoding_min_token_prob=rng.choice([0.0, 0.1, 0.5]),
        )
        proposer, own, text = SuffixProposer(settings), MatchChains(), list[int]()
        for _ in range(12):
            new = [rng.randrange(vocab) for _ in range(rng.randrange(1, 6))]
            text += new
            own.add(new)
            context = text[-settings.suffix_decoding_max_tree_depth :]
            want = slow_matches([text], context, MOST_MATCHES)
            assert own.matches(context, MOST_MATCHES) == want
            draft = proposer._draft(own, context, 6, "")
            assert draft.tokens == slow_walk([text], want, 6, settings)
            assert len(draft.shares) == len(draft.tokens)


def test_earlier_answers_are_searched_by_salt_and_dropped_oldest_first() -> None:
    rng, answers = random.Random(4), RecentAnswers(most=5, most_tokens=60)
    kept: list[tuple[list[int], str]] = []
    for _ in range(300):
        answer, salt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))], rng.choice(["", "a"])
        answers.add(answer, salt)
        kept.append((answer, salt))
        while len(kept) > 5 or sum(len(text) + 1 for text, _ in kept) > 60:
            kept.pop(0)
        assert answers.chains.end - answers.chains.first == sum(len(text) + 1 for text, _ in kept)
        assert len(answers.chains._tokens) <= 2 * 60 + 3 * CONTEXT
        context = [rng.randrange(3) for _ in range(8)]
        for salt in ("", "a", "b"):
            texts = [[*text, NOTHING] if own == salt else [] for text, own in kept]
            starts = [sum(len(text) + 1 for text, _ in kept[:number]) for number in range(len(kept))]
            want = [
                (answers.chains.first + starts[place // 1000] + place % 1000, length)
                for place, length in slow_matches(texts, context, MOST_MATCHES)
            ]
            assert answers.chains.matches(context, MOST_MATCHES, salt) == want
    pairs = sum(len({tuple(text[i : i + 2]) for i in range(len(text) - 1)}) for text, _ in kept)
    assert len(answers.chains._last) <= pairs + len(kept), "dropped tokens are still indexed"


def test_no_answers_are_kept_where_none_are_wanted() -> None:
    answers = RecentAnswers(most=0)
    answers.add([1, 2, 3], "")
    assert answers.chains.end == 0


def test_a_draft_follows_the_majority_and_says_how_sure_it_is() -> None:
    proposer, own = SuffixProposer(Suffix()), MatchChains()
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    own.add(text)
    draft = proposer._draft(own, text, 4, "")
    assert draft.tokens == [3, 8]
    assert draft.shares == [2 / 3, 1 / 2]


def test_each_token_is_looked_at_once() -> None:
    costs = []
    for length in (50, 5000):
        rng = random.Random(1)
        proposer, seq = SuffixProposer(Suffix()), Sequence(make_request(0, prompt=[1, 2], max_tokens=9999))
        seq.tokens = [rng.randrange(50_000) for _ in range(length)]
        proposer.propose(seq, 4)
        seq.tokens.append(3)
        costs.append(count_lines(lambda proposer=proposer, seq=seq: proposer.propose(seq, 4)))  # type: ignore[misc]
    assert costs[0] == costs[1]


def test_chances_are_learnt_from_drafts_that_nobody_verified() -> None:
    """Contexts that repeat are followed by noise at first, and by copies later; the answers never accept a draft."""
    rng, proposer = random.Random(3), SuffixProposer(Suffix())
    for number in range(100):
        seq = Sequence(make_request(number, prompt=[1, 2, rng.randrange(10, 1000), 1, 2], max_tokens=10))
        proposer.propose(seq, 1)
        seq.tokens.append(rng.randrange(10, 1000))
        proposer.propose(seq, 1)
    noise = proposer.propose(Sequence(make_request(1, prompt=[1, 2, 500, 1, 2], max_tokens=10)), 1)
    assert noise.tokens == (500,)
    assert noise.chances[0] < 0.1
    seq = Sequence(make_request(2, prompt=[1, 2], max_tokens=9999))
    for _ in range(600):
        seq.tokens.append(seq.tokens[-2])
        proposal = proposer.propose(seq, 4)
    assert len(proposal.tokens) == 4
    assert min(proposal.chances) > 0.9


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_no_token_changes(depth: int, num_blocks: int) -> None:
    """Over a model whose text has few words, so that some drafts are accepted; the second half repeats the first."""
    rng = random.Random(num_blocks)
    engine, _ = make_engine(num_blocks=num_blocks, depth=depth)
    proposer = SuffixProposer(Suffix())
    engine.scheduler.speculation = Speculation(proposer, 4)
    prompts = [[rng.randrange(4) for _ in range(rng.randrange(1, 12))] for _ in range(8)] * 2
    requests = [make_request(number, prompt=prompt, max_tokens=12) for number, prompt in enumerate(prompts)]
    for half in (requests[:8], requests[8:]):
        for request in half:
            engine.add(request)
        outputs = run_to_end(engine)
        for request in half:
            assert tokens_of(outputs[request.id]) == expected_output(request)[0]
    stats = engine.stats()
    assert 0 < stats.num_accepted_drafts <= stats.num_drafts
    assert not proposer.rates._open
    assert Counter(length - 1 for length, _ in proposer.earlier._kept) == Counter(
        len(expected_output(request)[0]) for request in requests
    )
