"""Slots of recurrent state and their snapshots, with what other engines got wrong about them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence_images import ImageSettings
from octavo.engine.speculative.proposer import Proposal
from octavo.engine.speculative.speculation import Speculation
from octavo.errors import InvalidParameter
from octavo.steps.limits import StateSize
from octavo.types import ImageInput, Request, Sequence
from tests.engine.making import make_request, run_to_end, serve, tokens_of
from tests.oracle import OracleRunner, ToyProposer, Trouble, digest, empty_digest, expected_output, guess_tokens
from tests.tiers import nightly_after, one_in

BLOCK = 16
PLACEHOLDER = 49


class RightOrWrong(ToyProposer):
    """As many drafts as are asked for."""

    def propose(self, seq: Sequence, count: int) -> Proposal:
        prefix = empty_digest("")
        for token in seq.tokens:
            assert token is not None
            prefix = digest(prefix, token)
        return Proposal(tuple(guess_tokens(self.rng, prefix, count)))


def made(
    num_snapshots: int = 50,
    num_seqs: int = 4,
    tokens: int = 256,
    *,
    every: int = 100_000,
    depth: int = 1,
    speculation: Speculation | None = None,
    images: ImageSettings | None = None,
    marks: bool = False,
    **cache: int,
) -> tuple[Engine, OracleRunner]:
    num_held = num_seqs if speculation is None else 2 * num_seqs
    flags = {"has_drafts": speculation is not None, "has_marks": marks}
    size = StateSize(num_held + num_snapshots, num_held, every, **flags)
    found = KVCache(cache.get("num_blocks", 2000), cache.get("block_size", BLOCK), states=size)
    runner = OracleRunner(found.block_size, Trouble())
    assert found.states is not None
    found.states.copy = runner.copy_state
    limits: dict[str, Any] = {"max_num_seqs": num_seqs, "max_num_batched_tokens": tokens}
    scheduler = Scheduler(found, **limits, speculation=speculation, images=images)
    return Engine(scheduler, runner, depth=depth), runner


def answer(engine: Engine, request: Request) -> int:
    """Serve a request, whose text the oracle checks; returns the tokens that came from the cache."""
    outputs = serve(engine, [request])[request.id]
    assert [token for output in outputs for token in output.tokens] == expected_output(request)[0]
    return outputs[-1].num_cached_tokens


with_and_without_marks = pytest.mark.parametrize("marks", [False, True], ids=["cut", "marked"])


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


def snapshots(engine: Engine) -> list[int]:
    """Positions of all snapshots."""
    cache = engine.scheduler.cache
    return sorted(node.depth * cache.block_size for node in cache.groups[0].tree.walk() if node.snapshot is not None)


@with_and_without_marks
def test_a_turn_begins_where_the_last_one_ended_less_an_interval(marks: bool) -> None:
    engine, _ = made(marks=marks)
    prompt = words(200)
    assert answer(engine, make_request(0, prompt, 150)) == 0
    assert engine.stats().num_used_states == 0
    assert snapshots(engine) == [192, 320]  # 192 ends the prompt; of those in the output only the newest is left
    turn = [*prompt, *expected_output(make_request(0, prompt, 150))[0], *words(30, 1)]
    assert answer(engine, make_request(1, turn, 5)) == 320
    assert answer(engine, make_request(2, [*prompt, *words(90, 2)], 5)) == 192  # another answer to the same prompt
    engine.add(make_request(3, [*prompt, *words(90, 3)], 5))
    engine.step()
    told = engine.stats()
    assert (told.num_state_slots, told.num_used_states, told.num_snapshots) == (54, 1, 5)
    assert (told.num_snapshot_hits, told.num_snapshot_evictions) == (3, 0)


@with_and_without_marks
def test_a_shared_prefix_is_found_from_the_third_request_on(marks: bool) -> None:
    engine, _ = made(marks=marks)
    shared = words(1500)
    hits = [answer(engine, make_request(i, [*shared, *words(700, 7 + i)], 4)) for i in range(4)]
    assert hits == [0, 0, 1472, 1472]


@with_and_without_marks
def test_a_long_prompt_has_snapshots_within(marks: bool) -> None:
    engine, _ = made(every=300, marks=marks)
    prompt = words(1000)
    answer(engine, make_request(0, prompt, 2))
    assert snapshots(engine) == [320, 640, 960]
    assert answer(engine, make_request(1, [*prompt[:700], *words(200, 3)], 2)) == 640


def test_the_same_prompt_again_leaves_less_than_an_interval_and_one_token() -> None:
    engine, _ = made()
    for index, length in enumerate((65, 128, 129, 250)):
        assert answer(engine, make_request(2 * index, words(length, index), 1)) == 0
        assert answer(engine, make_request(2 * index + 1, words(length, index), 1)) == (length - 1) // 64 * 64


def steps(runner: OracleRunner) -> list[tuple[int, list[int]]]:
    """Of each step of a single sequence: its tokens, and the positions before which it keeps the state."""
    return [(len(item.tokens), [position for position, _ in item.marks]) for [item] in runner.plans]


def test_a_device_that_keeps_marked_states_computes_a_prompt_in_one_step() -> None:
    for length, marks in ((64, []), (65, [64]), (100, [64]), (128, [64]), (250, [192])):
        engine, runner = made(marks=True)
        assert answer(engine, make_request(0, words(length), 1)) == 0
        assert steps(runner) == [(length, marks)]
        assert snapshots(engine) == sorted({*marks, length // 64 * 64})
        assert answer(engine, make_request(1, words(length), 1)) == (length - 1) // 64 * 64
    engine, runner = made(marks=True, every=64, tokens=400)
    answer(engine, make_request(0, words(390), 1))
    assert steps(runner) == [(390, [64, 128, 192, 256, 320, 384])]


def test_one_step_holds_at_most_a_quarter_of_the_snapshots() -> None:
    engine, runner = made(8, 1, marks=True, every=64, tokens=1000)
    answer(engine, make_request(0, words(600), 1))
    assert steps(runner) == [(192, [64, 128]), (192, [256, 320]), (192, [448, 512]), (24, [])]
    assert snapshots(engine) == list(range(64, 577, 64))[-8:]


def test_prompts_shorter_than_an_interval_are_found_with_their_answers() -> None:
    engine, _ = made()
    first = make_request(0, words(40), 60)
    answer(engine, first)
    assert answer(engine, make_request(1, [*words(40), *expected_output(first)[0], 1, 2], 1)) == 64


def test_a_hit_needs_no_block_as_large_as_a_state() -> None:
    engine, _ = made(every=4096)
    answer(engine, make_request(0, words(130), 1))
    assert answer(engine, make_request(1, words(130), 1)) == 128


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 96, 128])
def test_snapshots_lie_at_ends_of_blocks_of_any_size(block_size: int) -> None:
    engine, _ = made(block_size=block_size)
    answer(engine, make_request(0, words(900), 1))
    interval = {96: 192, 128: 128}.get(block_size, 64)
    assert answer(engine, make_request(1, words(900), 1)) == 899 // interval * interval


def test_what_was_not_computed_is_not_found() -> None:
    """The blocks and the state of a prompt that was aborted in a chunk are not in the cache."""
    engine, _ = made(tokens=64)
    engine.add(make_request(0, words(500), 4))
    for _ in range(3):
        engine.step()
    engine.abort(0)
    engine.check()
    assert answer(engine, make_request(1, words(500), 4)) <= 192
    assert all(position % 64 == 0 for position in snapshots(engine))


def test_keys_and_values_without_a_state_are_computed_again() -> None:
    engine, _ = made(num_snapshots=1, num_seqs=1)
    answer(engine, make_request(0, words(300), 1))
    answer(engine, make_request(1, words(300, 1), 1))  # takes the only snapshot
    assert answer(engine, make_request(2, words(300), 1)) == 0


def test_without_memory_for_snapshots_all_is_computed() -> None:
    engine, runner = made(num_snapshots=0)
    answer(engine, make_request(0, words(250), 1))
    assert [len(item.tokens) for [item] in runner.plans] == [250], "a step ended where no snapshot can be taken"
    assert answer(engine, make_request(1, words(250), 1)) == 0
    assert snapshots(engine) == []


def test_a_snapshot_goes_with_its_block() -> None:
    engine, _ = made(num_blocks=30)
    answer(engine, make_request(0, words(300), 1))
    assert snapshots(engine) == [256]
    answer(engine, make_request(1, words(470, 1), 1))
    assert snapshots(engine) == [448]
    engine.scheduler.cache.clear()
    engine.check()
    assert snapshots(engine) == []


def test_what_saves_most_stays() -> None:
    engine, _ = made(num_snapshots=2)
    long, short = words(2000), words(200, 1)
    answer(engine, make_request(0, long, 1))
    for index in range(5):
        answer(engine, make_request(10 + index, words(200, 20 + index), 1))
        answer(engine, make_request(20 + index, short, 1))
    assert answer(engine, make_request(1, long, 1)) == 1984


def test_a_sequence_beside_the_limit_of_the_pool_is_served() -> None:
    engine, _ = made(num_blocks=32)
    answer(engine, make_request(0, words(500), 12))
    assert answer(engine, make_request(1, words(500), 12)) == 448


def test_drafts_of_a_step_take_one_copy_of_a_state_however_many_they_are() -> None:
    """A state behind each draft would cost as much as as many tokens; what is accepted is computed again instead."""
    for count in (2, 16):
        engine, runner = made(0, speculation=Speculation(RightOrWrong(random.Random(5)), count))
        states, copies = engine.scheduler.cache.states, list[tuple[int, int]]()
        assert states is not None

        def copy(source: int, target: int, copies: Any = copies, plain: Any = states.copy) -> None:
            copies.append((source, target))
            plain(source, target)

        states.copy = copy
        requests = [make_request(i, words(30, i), 120) for i in range(3)]
        found = serve(engine, requests)
        assert all(tokens_of(found[request.id]) == expected_output(request)[0] for request in requests)
        assert 0 < engine.stats().num_accepted_drafts < engine.stats().num_drafts
        assert len(copies) == sum(bool(item.drafts) for plan in runner.plans for item in plan)


def an_image(start: int, num_tokens: int, number: int) -> ImageInput:
    return ImageInput(start, num_tokens, PLACEHOLDER, bytes([number]), (1, 1, 1), b"")


def with_images(request_id: int, parts: list[list[int] | int], max_tokens: int = 4) -> Request:
    """A request whose prompt has these parts; a number is an image of as many tokens."""
    prompt, images = list[int](), list[ImageInput]()
    for part in parts:
        if isinstance(part, int):
            images.append(an_image(len(prompt), part, part))
            prompt += [PLACEHOLDER] * part
        else:
            prompt += part
    return make_request(request_id, prompt, max_tokens, images=images)


@one_in(3)
@pytest.mark.parametrize("is_bidirectional", [False, True], ids=["may be cut", "is one chunk"])
@pytest.mark.parametrize("tokens", [4, 63, 64, 100])
@with_and_without_marks
def test_snapshots_and_images_together_leave_tokens_for_every_step(
    tokens: int, is_bidirectional: bool, marks: bool
) -> None:
    """Both end chunks: a step ends at multiples of 64, and before an image whose embeddings have to wait."""
    settings = ImageSettings(600, 0, is_bidirectional, longest=200)
    engine, runner = made(tokens=tokens, every=64, images=settings, marks=marks)
    sizes = [[60, 100, 130, 65], [60, 130], [200, 64], [100, 99]]
    requests = [with_images(i, [words(50 + i, i), *own, words(9, i)]) for i, own in enumerate(sizes)]
    found = serve(engine, requests)
    assert all(tokens_of(found[request.id]) == expected_output(request)[0] for request in requests)
    ends = [(item.seq, item.settled_start + len(item.tokens)) for plan in runner.plans for item in plan]
    are_cut = any(of.start < end < of.start + of.num_tokens for seq, end in ends for of in seq.request.images)
    assert are_cut != is_bidirectional
    assert snapshots(engine)


def test_what_attends_to_itself_is_no_longer_than_a_chunk() -> None:
    """Which may be an image and words, where all of a prompt does."""
    engine, _ = made(images=ImageSettings(600, 0, True, longest=20))
    with pytest.raises(InvalidParameter, match="An image, with the words that attend to it, may have 20 tokens; one"):
        serve(engine, [with_images(0, [30, words(3)])])


def test_turns_that_add_an_image_begin_where_the_last_one_ended_less_an_interval() -> None:
    engine, _ = made(images=ImageSettings(600))
    parts: list[list[int] | int] = [words(30), 80, words(20, 1)]
    for turn, num_found in enumerate((0, 128, 256, 384)):
        request = with_images(turn, parts, 20)
        length = len(request.prompt_tokens)
        assert length // 64 * 64 == 128 * (turn + 1)
        assert answer(engine, request) == num_found
        parts = [*parts, expected_output(request)[0], words(8, turn), 90 + turn, words(10, turn)]
    other = [79 if part == 80 else part for part in parts[:3]]
    assert answer(engine, with_images(9, other)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", nightly_after(1, (75, 150)))
def test_every_slot_is_accounted_for_in_a_long_churn(num_requests: int) -> None:
    """Conversations of which some are aborted, with hardly room for their states."""
    engine, _ = made(num_snapshots=6, num_seqs=3, tokens=40, every=128, num_blocks=90)
    rng, histories = random.Random(1), [words(90, seed) for seed in range(5)]
    for request_id in range(num_requests):
        history = rng.choice(histories)
        request = make_request(request_id, [*history, *words(rng.randrange(1, 20), request_id)], rng.randrange(1, 90))
        engine.add(request)
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(request_id)
        elif len(history) < 500:
            history += [*request.prompt_tokens[len(history) :], *expected_output(request)[0]]
    run_to_end(engine)
    states = engine.scheduler.cache.states
    assert states is not None
    assert states.num_pending == 0
    assert states.num_evicted > 20
    engine.scheduler.cache.clear()
    engine.check()
    assert states.num_snapshots == 0


@with_and_without_marks
def test_a_preempted_sequence_goes_on_from_its_last_snapshot(marks: bool) -> None:
    engine, runner = made(num_blocks=40, num_seqs=2, marks=marks)
    requests = [make_request(i, words(200, i), 200) for i in range(2)]
    outputs = serve(engine, requests)
    for request in requests:
        assert [t for output in outputs[request.id] for t in output.tokens] == expected_output(request)[0]
    stats = engine.stats()
    assert stats.num_preemptions
    plain = sum(len(request.prompt_tokens) + request.max_tokens - 1 for request in requests)
    assert runner.num_computed - plain < 2 * 64 * stats.num_preemptions
