"""Blocks that are reused in part, by real tensors: the tokens are those of a model that computes everything."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.cache.offload import Identity, Offload
from octavo.cache.offload_tiers import HostTier
from octavo.engine.engine import Engine
from octavo.engine.runner.step_runner import BlockMessages
from octavo.engine.scheduler import Scheduler
from octavo.models.layer_cache import kv_groups
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Request
from tests.cache.test_kv_cache import compute, make_sequence
from tests.runtime.making import CPU, host_runner, stream_runner
from tests.runtime.test_model_runner import MIXED, VOCAB, Loaded, run, tokens_of
from tests.tiers import one_in

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


def test_the_first_positions_are_copied_in_every_layer_and_nothing_else_changes(loaded: Loaded) -> None:
    storage = KVStorage(loaded.config.cache, kv_groups(loaded.config.cache), [4], BLOCK_SIZE, torch.bfloat16, CPU)
    storage.pools[0][0].copy_(torch.randn(storage.pools[0][0].shape))
    before = storage.pools[0][0].clone()
    storage.copy_slots(0, 1, 3, 5)
    want = before.clone()
    want[:, :, 3, :, :5] = before[:, :, 1, :, :5]
    assert torch.equal(storage.pools[0][0], want)


@one_in(3)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [16, 60])
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_tokens_are_those_of_whole_prompts(loaded: Loaded, streams: bool, num_blocks: int, depth: int) -> None:
    """Some rows are sampled by the host, so that steps wait for each other; every block begins with no numbers."""
    rng = random.Random(num_blocks + depth)
    shared = rng.choices(range(VOCAB), k=40)
    some = [
        Request(
            i,
            [*shared[: rng.randrange(1, 40)], *rng.choices(range(VOCAB), k=rng.randrange(1, 6))],
            SamplingParams(**rng.choice(MIXED)),
            6,
            seed=i,
        )
        for i in range(16)
    ]
    expected = {request.id: tokens_of(run(loaded.engine(), [request]))[request.id] for request in some}
    storage = KVStorage(
        loaded.config.cache, kv_groups(loaded.config.cache), [num_blocks], BLOCK_SIZE, torch.float32, CPU
    )
    storage.pools[0][0].fill_(torch.nan)
    make_runner = stream_runner if streams else host_runner
    runner = make_runner(loaded.model, storage, VOCAB, StepLimits(4, 32, 120 // BLOCK_SIZE))
    cache = KVCache(num_blocks, BLOCK_SIZE)
    cache.copy_slots = BlockMessages(runner, storage.bytes_per_block).copy_slots
    engine = Engine(Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=32), runner, depth=depth)
    assert tokens_of(run(engine, some)) == expected
    assert cache.num_copied > 30


def test_a_block_that_was_copied_from_may_be_filled_from_a_tier_at_once(loaded: Loaded) -> None:
    """Both may be asked for before the same step."""
    storage = KVStorage(loaded.config.cache, kv_groups(loaded.config.cache), [4], BLOCK_SIZE, torch.float32, CPU)
    storage.pools[0][0].copy_(torch.randn(storage.pools[0][0].shape))
    runner = host_runner(loaded.model, storage, VOCAB, StepLimits(4, 32, 120 // BLOCK_SIZE))
    copies = BlockMessages(runner, storage.bytes_per_block)
    cache = KVCache(4, BLOCK_SIZE)
    cache.copy_slots = copies.copy_slots
    cache.use_offload(Offload(copies, BLOCK_SIZE, Identity("", ""), HostTier(1 << 30)))
    first = [1] * (3 * BLOCK_SIZE)
    cache.release(compute(cache, first))
    second = compute(cache, [2] * (4 * BLOCK_SIZE))  # takes the place of the first
    storage.pools[0][0].copy_(torch.randn(storage.pools[0][0].shape))
    source = second.groups[0].block_table[0]
    content = storage.pools[0][0][:, :, source].clone()
    cache.release(second)
    part, whole = make_sequence([2, 2, 2, 7]), make_sequence(first)
    cache.start(part, cache.match(part), True, 99)
    cache.start(whole, cache.match(whole), True, 99)
    assert (part.num_computed_tokens, whole.num_computed_tokens) == (3, 2 * BLOCK_SIZE)
    assert source in whole.groups[0].block_table[:2]
    assert not torch.equal(storage.pools[0][0][:, :, source], content)
    assert torch.equal(storage.pools[0][0][:, :, part.groups[0].block_table[0], :, :3], content[:, :, :, :3])
    assert cache.offload is not None
    cache.offload.close()
