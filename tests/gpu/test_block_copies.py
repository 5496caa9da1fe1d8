"""Copies of blocks beside the steps of a CUDA device: in order with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models.layer_cache import LayerCacheSpec, kv_groups
from octavo.models.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.runtime.executors import block_copies
from octavo.runtime.executors.block_copies import (
    BlockContent,
    DeviceBlockCopies,
    _gathered,
    _scatter,
    joined,
    pinned_memory,
    pinned_place,
)
from octavo.runtime.kv_storage import KVStorage
from octavo_fleet.sim.shapes import SHAPES
from tests.models.families import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS, LONG = 6, 20_000_000
"""LONG: cycles of a step, some ten milliseconds."""


class Copies:
    """A storage of known bytes, its copies, and the steps' stream."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, specs: list[LayerCacheSpec] | None = None) -> None:
        if specs is None:
            config = read_config(SHAPES["tiny"])
            assert isinstance(config, ModelConfig)
            specs = list(config.cache)
        self.storage = KVStorage(specs, kv_groups(specs), [BLOCKS], 16, dtype, torch.device("cuda"))
        for pool in self.storage.pools[0]:
            pool.view(torch.uint8).random_()
        self.bits = self.storage.pools[0][0].view(torch.uint8)
        self.steps = torch.cuda.Stream()
        self.copies = DeviceBlockCopies(self.storage, self.steps)
        self.num_bytes = self.storage.bytes_per_block
        torch.cuda.synchronize()

    def read(self, *blocks: int) -> BlockContent:
        return self.copies.read(self.storage.contents("blocks"), list(blocks))

    def write(self, blocks: list[int], contents: list[Any]) -> None:
        self.copies.write(self.storage.contents("blocks"), blocks, contents)

    def step(self, block: int, value: int) -> None:
        """A slow step that then fills a block; the host does not wait."""
        with torch.cuda.stream(self.steps):
            torch.cuda._sleep(LONG)
            self.bits[:, :, block] = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    made = Copies(dtype)
    before = made.bits.clone()
    contents = [made.read(block).wait() for block in range(BLOCKS)]
    assert {len(content) for content in contents} == {made.num_bytes}
    for block, content in enumerate(contents):
        made.write([(block + 2) % BLOCKS], [content])
    torch.cuda.synchronize()
    assert torch.equal(made.bits, before.roll(2, dims=2))


def test_a_copy_out_is_of_the_steps_before_it_and_of_none_behind() -> None:
    made = Copies()
    pending = []
    for value in range(5):
        made.step(1, value)
        pending.append(made.read(1))
    made.step(1, 99)
    for value, content in reversed(list(enumerate(pending))):
        assert set(content.wait()) == {value}


def test_a_copy_in_is_behind_the_steps_before_it_and_in_front_of_those_behind() -> None:
    made, seen = Copies(), []
    for value in range(5):
        made.step(2, 200)
        made.write([2], [bytes([value]) * made.num_bytes])
        with torch.cuda.stream(made.steps):
            seen.append(made.bits[:, :, 2].clone())
    torch.cuda.synchronize()
    for value, content in enumerate(seen):
        assert (content == value).all()


@pytest.mark.parametrize("num_staged", [0, 3, 1000])
def test_memory_of_copies_without_a_reader_may_be_allocated_again(
    num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Copies()
    monkeypatch.setattr(block_copies, "STAGED_BYTES", num_staged * made.num_bytes)
    for i in range(200):
        made.read(i % BLOCKS)
        made.write([3], [bytes([i]) * made.num_bytes])
    content = made.read(3)
    noise = [torch.full((made.num_bytes,), 255, dtype=torch.uint8, pin_memory=True) for _ in range(50)]
    assert set(content.wait()) == {199}
    assert len(noise) == 50


@pytest.mark.parametrize("width", [None, 16, 5])
def test_blocks_that_are_copied_together_are_those_one_by_one(width: int | None) -> None:
    """In any order, also of layers that cache other sizes, and from pinned memory and other."""
    others = [LayerCacheSpec(3, 5), LayerCacheSpec(1, width or 0, kind="latent")]
    made = Copies(torch.float8_e4m3fn, None if width is None else others)
    rng, pools = random.Random(0), [pool.view(torch.uint8) for pool in made.storage.pools[0]]
    ways: list[Callable[[Any], Any]] = [bytes, bytearray, lambda part: copied(part)]
    for _ in range(40):
        sources = rng.choices(range(BLOCKS), k=rng.randrange(1, BLOCKS))
        before, content = [pool.clone() for pool in pools], made.read(*sources).wait()
        assert content == b"".join(made.read(block).wait() for block in sources)
        parts = [content[i * made.num_bytes :][: made.num_bytes] for i in range(len(sources))]
        for i in rng.sample(range(len(parts)), rng.randrange(len(parts) + 1)):
            parts[i] = rng.choice(ways)(parts[i])
        targets = rng.sample(range(BLOCKS), len(sources))
        made.write(targets, parts)
        del content, parts
        for i in range(5):  # which may not be memory that is still read
            torch.full((made.num_bytes << i,), 255, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        for pool, old in zip(pools, before, strict=True):
            old[:, :, targets] = old[:, :, sources]
            assert torch.equal(pool, old)


def copied(content: Any) -> memoryview:
    memory = pinned_memory(len(content))
    memory[:] = content
    return memory


def test_contents_in_pinned_memory_are_not_staged() -> None:
    made = Copies()
    memory = pinned_memory(3 * made.num_bytes)
    memory[:] = bytes([1, 2, 3] * made.num_bytes)
    contents: list[Any] = [memory[i * made.num_bytes :][: made.num_bytes] for i in range(3)]
    places = [place for place in map(pinned_place, contents) if place is not None]
    assert len(places) == 3
    assert [len(run) for run in joined(places)] == [3 * made.num_bytes]
    made.write([4, 0, 2], contents)
    again: Any = made.read(4, 0, 2).wait()
    assert again == memory
    assert pinned_place(again) is not None
    made.write([1, 3], [bytes(made.num_bytes), again[: made.num_bytes]])
    assert [len(staged) for staged, _ in made.copies._staged] == [made.num_bytes]


def test_places_beyond_two_gigabytes_are_found() -> None:
    pool = torch.empty(2, 40_000, 32_768, dtype=torch.bfloat16, device="cuda")
    places, size = [39_999, 0, 35_000], 32_768 * 2
    contents = torch.randint(0, 256, (3 * 2 * size,), dtype=torch.uint8, device="cuda")
    _scatter([pool], places, contents)
    assert torch.equal(_gathered([pool], places), contents)
    assert torch.equal(pool[1, 39_999].view(torch.uint8), contents[size : 2 * size])


def test_pinned_memory_is_given_back_when_no_content_is_left_in_it() -> None:
    memory = pinned_memory(5 << 20)
    part, place = memory[1000:2000], pinned_place(memory)  # type: ignore[arg-type]
    assert place is not None
    address = place[0].data_ptr()
    del memory, place
    other = pinned_memory(6 << 20)
    assert pinned_place(other)[0].data_ptr() != address  # type: ignore[arg-type, index]
    del part
    again = pinned_memory(7 << 20)
    assert pinned_place(again)[0].data_ptr() == address  # type: ignore[arg-type, index]


@pytest.mark.parametrize("row", ["llama/gqa", "qwen3_5/dense"])
def test_prefixes_that_were_given_up_come_back(tmp_path: Path, row: str) -> None:
    """A pool for two prompts, eight of them in turn, three times: the tokens are those of a large pool."""
    make_checkpoint(tmp_path, row, hidden_size=256)
    rng = random.Random(0)
    some = [rng.choices(range(VOCAB_SIZE), k=100) for _ in range(8)] * 3
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "block_size": 16, "max_num_seqs": 2}
    settings["batch_invariant"] = row != "llama/gqa"
    with LLM(str(tmp_path), num_kv_blocks=200, enable_prefix_caching=False, **settings) as llm:
        expected = [list(result.outputs[0].token_ids) for result in llm.generate(some, params)]
    with LLM(str(tmp_path), num_kv_blocks=16, kv_offload_memory=0.1, **settings) as llm:
        results = llm.generate(some, params)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
    assert sum((result.num_cached_tokens or 0) >= 64 for result in results) >= 12
