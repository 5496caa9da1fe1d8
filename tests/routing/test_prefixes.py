"""What routers believe is cached, against the cache itself."""

from __future__ import annotations

import random

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents, Removed, Stored
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Sequence
from octavo_fleet.routing import prefixes
from octavo_fleet.routing.prefixes import CachedPrefixes, PromptQuery, RemotePrefixes

BLOCK_SIZE = 2


def test_events_and_digests_tell_exactly_what_is_cached() -> None:
    rng, events, known, remote = random.Random(4), KVEvents(), CachedPrefixes(), RemotePrefixes(1.0)
    cache = KVCache(30, BLOCK_SIZE, events=events)
    for _ in range(300):
        salt = rng.choice(["", "x"])
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 14))]
        request = Request(0, tokens, SamplingParams(), 1, cache_salt=salt)
        seq = Sequence(request, order=(0,))
        known.add(events.take())
        remote.update(known.digest(), 0.0)
        depth = cache.match(seq)[0].depth
        assert known.num_cached_blocks(PromptQuery.of(request), BLOCK_SIZE) == depth
        assert remote.num_cached_blocks(PromptQuery.of(request), BLOCK_SIZE) == depth
        cache.adopt(seq, cache.match(seq))
        cache.reserve(seq, len(tokens))
        cache.num_filled += len(tokens) - seq.num_computed_tokens
        seq.num_computed_tokens = len(tokens)
        cache.publish(seq, len(tokens))
        cache.release(seq)
    known.clear()
    remote.update(known.digest(), 0.0)
    assert remote.num_cached_blocks(PromptQuery([0] * 9), BLOCK_SIZE) == 0


def test_a_prompt_that_was_sent_counts_until_its_time_is_over() -> None:
    remote, query = RemotePrefixes(2.0), PromptQuery(list(range(9)))
    remote.note_sent(query, BLOCK_SIZE, 10.0)
    longer = PromptQuery([*range(9), 9, 9])
    assert remote.num_cached_blocks(longer, BLOCK_SIZE) == 4
    remote.update(b"", 11.9)
    assert remote.num_cached_blocks(longer, BLOCK_SIZE) == 4
    remote.update(b"", 12.0)
    assert remote.num_cached_blocks(longer, BLOCK_SIZE) == 0


def test_a_digest_is_bounded_and_has_the_newest_blocks() -> None:
    known = CachedPrefixes()
    known.add([Stored(number, number, 0, []) for number in range(prefixes.MAX_DIGEST_BLOCKS + 10)])
    known.add([Removed(0, prefixes.MAX_DIGEST_BLOCKS + 9)])
    digest = memoryview(known.digest()).cast("I")
    assert list(digest)[:2] == [prefixes.MAX_DIGEST_BLOCKS + 8, prefixes.MAX_DIGEST_BLOCKS + 7]
    assert len(digest) == prefixes.MAX_DIGEST_BLOCKS


def test_the_output_so_far_is_looked_for_too() -> None:
    request = Request(0, [1, 2, 3], SamplingParams(), 9, output_tokens=[4, 5])
    assert list(PromptQuery.of(request).hashes(2)) == list(PromptQuery([1, 2, 3, 4, 5]).hashes(2))
    assert len(list(PromptQuery.of(request).hashes(2))) == 2
