"""Padded shapes of steps with drafts: they fit into the executor's buffers, and those without prompts have graphs."""

from __future__ import annotations

import random

import pytest

from octavo.engine.runner.persistent_batch import PersistentBatch
from octavo.engine.runner.step_encoder import StepEncoder
from octavo.steps.graph_shapes import (
    GraphLimits,
    StepKind,
    StepShape,
    exact_shape,
    graph_shapes,
    padded_shape,
    verification_shape,
)
from octavo.steps.layout import num_bytes
from octavo.steps.limits import StepLimits
from octavo.types import ON_DEVICE, GroupBlocks, Plan, Scheduled, Sequence
from tests.engine.making import make_request
from tests.tiers import nightly_after, one_in


@one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", nightly_after(6, range(20)))
def test_no_step_exceeds_the_largest(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs, max_drafts = rng.choice([1, 3, 8, 40, 256]), rng.choice([1, 2, 4, 7, 32])
    max_rows = max_num_seqs + rng.choice([0, 5, 100, 2000, 8000])
    limits = StepLimits(max_num_seqs, max_rows, 10, max_drafts, rng.choice([0, max_drafts]))
    largest, has_drafter = limits.largest(), limits.num_drafts > 0
    room = num_bytes(largest, limits.max_blocks, 2) + 4 * largest.num_rows
    for _ in range(300):
        num_seqs = rng.randrange(1, max_num_seqs + 1)
        num_drafts = rng.randrange(min(num_seqs * max_drafts, max_rows - num_seqs) + 1)
        num_prompt = rng.choice([0, rng.randrange(max_rows - num_seqs - num_drafts + 1)])
        num_rows = num_seqs + num_drafts + num_prompt
        longest = 1 if num_rows == num_seqs else 2
        num_proposed = rng.choice([1, 2, 4]) * (has_drafter and (num_drafts > 0 or rng.random() < 0.5))
        kind = StepKind(rng.random() < 0.5, rng.random() < 0.5, has_drafter, num_proposed)
        shape, _ = padded_shape(num_rows, num_seqs, longest, max_num_seqs, kind, num_drafts)
        assert shape.num_rows >= num_rows
        assert shape.num_seqs >= num_seqs
        assert shape.num_drafts >= num_drafts
        assert shape.is_verification is (num_drafts > 0 and not num_prompt)
        assert num_bytes(shape, limits.max_blocks, 2) <= room
        assert shape.num_samples <= largest.num_samples
        assert shape.num_seqs <= largest.num_seqs
        assert shape.num_rows >= shape.num_samples or not num_drafts
        assert shape.holds(shape)
        if shape.is_verification:
            of_graphs = GraphLimits(max_num_seqs, max_rows, kind.has_adapters, max_drafts, has_drafter)
            assert shape in graph_shapes(of_graphs)


def test_a_shape_holds_smaller_ones_of_its_kind() -> None:
    small, large = verification_shape(3, 5, 256), verification_shape(20, 60, 256)
    assert large.holds(small)
    assert not small.holds(large)
    decode, mixed = StepShape(64, 64, 1), StepShape(512, 64, 512, num_drafts=64)
    assert not large.holds(decode)
    assert not decode.holds(small)
    assert not mixed.holds(small)
    assert not large.holds(mixed)
    assert not large.holds(small._replace(has_extras=True))
    fills_cache = decode._replace(has_drafter=True)
    drafting = fills_cache._replace(num_proposed=2)
    assert drafting.holds(fills_cache)
    assert not fills_cache.holds(drafting)
    assert not drafting.holds(decode)


@pytest.mark.parametrize(
    ("num_proposed", "num_drafts", "of_step"), [(-1, 0, None), (0, 0, 0), (3, 0, 3), (0, 2, 2), (4, 2, 4)]
)
def test_a_step_makes_the_drafts_that_were_planned(num_proposed: int, num_drafts: int, of_step: int | None) -> None:
    """``None``: the drafter rests. A step that verifies drafts makes as many at least."""
    encoder = StepEncoder(PersistentBatch(4, 8, 1), 4, 100, exact_shape, has_drafter=True)
    seq = Sequence(make_request(0, prompt=[1, 2, 3], max_tokens=9))
    seq.groups = [GroupBlocks([0, 1, 2])]
    plan: Plan = [Scheduled(seq, 2, (3,), (ON_DEVICE,) * num_drafts, True, 0, num_proposed=num_proposed)]
    shape = encoder.encode(plan, encoder.batch.of_plan(plan)).shape
    assert (shape.num_proposed if shape.has_drafter else None) == of_step
