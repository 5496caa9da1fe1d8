"""Copies of blocks beside the steps of a CUDA device: in order with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models.layer_cache import kv_groups
from octavo.models.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.runtime.executors import block_copies
from octavo.runtime.executors.block_copies import DeviceBlockCopies
from octavo.runtime.kv_storage import KVStorage
from octavo_fleet.sim.shapes import SHAPES
from tests.models.families import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS, LONG = 6, 20_000_000
"""LONG: cycles of a step, some ten milliseconds."""


class Copies:
    """A storage of known bytes, its copies, and the steps' stream."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        config = read_config(SHAPES["tiny"])
        assert isinstance(config, ModelConfig)
        self.storage = KVStorage(config.cache, kv_groups(config.cache), [BLOCKS], 16, dtype, torch.device("cuda"))
        self.bits = self.storage.pools[0][0].view(torch.uint8)
        self.bits.copy_(torch.randint(0, 256, self.bits.shape, dtype=torch.uint8))
        self.steps = torch.cuda.Stream()
        self.copies = DeviceBlockCopies(self.storage, self.steps)
        self.num_bytes = self.storage.bytes_per_block
        torch.cuda.synchronize()

    def step(self, block: int, value: int) -> None:
        """A slow step that then fills a block; the host does not wait."""
        with torch.cuda.stream(self.steps):
            torch.cuda._sleep(LONG)
            self.bits[:, :, block] = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    made = Copies(dtype)
    before = made.bits.clone()
    contents = [made.copies.read(made.storage.block(block)).wait() for block in range(BLOCKS)]
    assert {len(content) for content in contents} == {made.num_bytes}
    for block, content in enumerate(contents):
        made.copies.write(made.storage.block((block + 2) % BLOCKS), content)
    torch.cuda.synchronize()
    assert torch.equal(made.bits, before.roll(2, dims=2))


def test_a_copy_out_is_of_the_steps_before_it_and_of_none_behind() -> None:
    made = Copies()
    pending = []
    for value in range(5):
        made.step(1, value)
        pending.append(made.copies.read(made.storage.block(1)))
    made.step(1, 99)
    for value, content in reversed(list(enumerate(pending))):
        assert set(content.wait()) == {value}


def test_a_copy_in_is_behind_the_steps_before_it_and_in_front_of_those_behind() -> None:
    made, seen = Copies(), []
    for value in range(5):
        made.step(2, 200)
        made.copies.write(made.storage.block(2), bytes([value]) * made.num_bytes)
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
        made.copies.read(made.storage.block(i % BLOCKS))
        made.copies.write(made.storage.block(3), bytes([i]) * made.num_bytes)
    content = made.copies.read(made.storage.block(3))
    noise = [torch.full((made.num_bytes,), 255, dtype=torch.uint8, pin_memory=True) for _ in range(50)]
    assert set(content.wait()) == {199}
    assert len(noise) == 50


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
