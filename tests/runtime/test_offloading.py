"""Blocks of real tensors out to bytes and back, and a model whose cached prefixes come back from a disk."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cache import offload_tiers
from octavo.cache.build_offload import GIB, default_room, fingerprint
from octavo.config import EngineConfig
from octavo.engine.runner.step_runner import BlockMessages, StepRunner
from octavo.errors import ConfigError
from octavo.models.layer_cache import LayerCacheSpec, conv_state, kv_groups, recurrent_state, state_layer
from octavo.models.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.ops.attention.cached_rows import INT4
from octavo.runtime.executors.block_copies import HostBlockCopies, _gathered, _scatter, joined, pinned_place
from octavo.runtime.kv_storage import KVStorage, StatePool
from octavo.steps.messages import ReadPlaces, WritePlaces
from octavo_fleet.sim.shapes import SHAPES
from tests.llm.tiny import write_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.weights.gguf_bytes import llama_file


def shape_config() -> ModelConfig:
    config = read_config(SHAPES["tiny"])
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, INT4])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    storage = KVStorage(shape_config().cache, kv_groups(shape_config().cache), [5], 4, dtype, torch.device("cpu"))
    bits = storage.pools[0][0].view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
    before = bits.clone()
    copies = HostBlockCopies(storage)
    contents = [copies.read(storage.contents("blocks"), [block]).wait() for block in range(5)]
    assert {len(content) for content in contents} == {storage.bytes_per_block}
    bits.fill_(255)
    for block, content in enumerate(contents):
        copies.write(storage.contents("blocks"), [(block + 2) % 5], [content])
    assert torch.equal(bits, before.roll(2, dims=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [16, 5])
def test_blocks_that_are_copied_together_are_those_one_by_one(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, of layers that cache other sizes; with a width of 5 what they cache begins at odd bytes. The same
    is what a device computes."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    specs = [LayerCacheSpec(3, 5), LayerCacheSpec(1, width, kind="latent"), LayerCacheSpec(3, 5)]
    storage = KVStorage(specs, kv_groups(specs), [9], 1, dtype, torch.device("cpu"))
    pools = [pool.view(torch.uint8) for pool in storage.pools[0]]
    for pool in pools:
        pool.random_()
    before, copies, rng = [pool.clone() for pool in pools], HostBlockCopies(storage), random.Random(0)
    for _ in range(20):
        sources = rng.choices(range(9), k=rng.randrange(1, 9))
        targets, size = rng.sample(range(9), len(sources)), storage.bytes_per_block
        content = copies.execute(ReadPlaces("blocks", sources)).wait()
        assert content == b"".join(copies.execute(ReadPlaces("blocks", [block])).wait() for block in sources)
        gathered = _gathered(storage.contents("blocks"), sources)
        assert gathered.numpy().tobytes() == content
        if rng.random() < 0.5:
            copies.execute(WritePlaces("blocks", targets, [content[i * size :][:size] for i in range(len(sources))]))
        else:
            _scatter(storage.contents("blocks"), targets, gathered)
        for pool, old in zip(pools, before, strict=True):
            old[:, :, targets] = old[:, :, sources]
            assert torch.equal(pool, old)


def test_contents_that_follow_each_other_in_pinned_memory_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    slab, other = (torch.arange(60, dtype=torch.uint8).numpy().data for _ in range(2))
    plain: list[Any] = [b"abc", np.zeros(4, np.uint8).data, bytearray(5)]
    some: list[Any] = [slab[10:20], slab[20:50].toreadonly(), slab[:5], other[5:10], *plain, slab[5:6]]
    runs = joined(place for place in map(pinned_place, some) if place is not None)
    assert [list(run) for run in runs] == [[*range(10, 50)], [*range(5)], [*range(5, 10)], [5]]
    assert [pinned_place(content) for content in plain] == [None] * 3
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    assert pinned_place(slab) is None


@pytest.mark.parametrize("channels", [6, 5])
def test_states_come_back_bit_for_bit(channels: int) -> None:
    """Of all layers, inputs of convolutions and sums alike, and beside the states of others; with 5 channels the sums
    begin at no multiple of four bytes."""
    layer = state_layer(conv_state(4, channels, 2), recurrent_state(2, 3, 5, 2))
    specs = [layer, LayerCacheSpec(2, 8), layer, layer]
    states = StatePool(5, torch.bfloat16)
    storage = KVStorage(specs, kv_groups(specs), [3], 4, torch.bfloat16, torch.device("cpu"), states=states)
    for pool in storage.state_pools:
        pool.view(torch.uint8).random_()
    before, copies = [pool.clone().view(torch.uint8) for pool in storage.state_pools], HostBlockCopies(storage)
    contents = [copies.read(storage.contents("states"), [slot]).wait() for slot in range(5)]
    assert {len(content) for content in contents} == {storage.bytes_per_state} == {3 * (3 * channels * 2 + 30 * 4)}
    for slot, content in enumerate(contents):
        copies.write(storage.contents("states"), [(slot + 2) % 5], [content])
    for pool, old in zip(storage.state_pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8), old.roll(2, dims=1))


def test_a_changed_checkpoint_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"123456789")
    assert fingerprint(tmp_path) != before


def test_memory_has_room_for_the_longest_prompt_if_there_is_as_much() -> None:
    storage = KVStorage(
        shape_config().cache, kv_groups(shape_config().cache), [5], 4, torch.float32, torch.device("cpu")
    )
    store, size = BlockMessages(cast(StepRunner, None), storage.bytes_per_block, 100), storage.bytes_per_block
    many = 4 * GIB // size
    assert default_room(store, many, 64 * GIB) == many * size + 100
    assert default_room(store, 5, 64 * GIB) == GIB
    assert default_room(store, many, 16 * GIB) == 2 * GIB


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kv_offload_dir": "x", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_offload_memory": 1, "kv_offload_disk": 1}, "kv_offload_dir"),
        ({"kv_offload_memory": 1, "enable_prefix_caching": False}, "enable_prefix_caching"),
        (
            {"kv_offload_memory": 1, "kv_offload_dir": "x", "lora_modules": "a=b", "merge_lora": True},
            "merge_lora",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_flat(values)


def test_a_model_says_the_same_from_restored_blocks(tmp_path: Path) -> None:
    """The pool holds two of eight prompts and memory one, so nearly every block comes back from the disk."""
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint(tmp_path / "model")
    settings: dict[str, Any] = {"load_format": "dummy", "block_size": 4, "num_kv_blocks": 16, "max_model_len": 32}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[(seed * 31 + i * 7) % 90 + 1 for i in range(24)] for seed in range(8)]

    def said(llm: LLM) -> list[list[int]]:
        return [list(llm.generate([prompt], params)[0].outputs[0].token_ids) for prompt in prompts]

    with LLM(checkpoint, **settings) as llm:
        want = said(llm)
    with LLM(checkpoint, **settings, kv_offload_memory=0.001, kv_offload_dir=str(tmp_path / "kv")) as llm:
        engine = llm.engine
        assert engine is not None
        offload = engine.scheduler.cache.offload
        assert offload is not None
        offload.host.capacity = 6 * offload.store.num_bytes
        for _ in range(3):
            assert said(llm) == want
        assert offload.stats.num_prefetched > 20
        assert offload.stats.num_restored > 20


@pytest.mark.parametrize("ends", ["closed", "killed after a pause", "killed at once"])
def test_the_prefix_cache_outlives_its_engine(tmp_path: Path, ends: str) -> None:
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint(tmp_path / "model")
    settings: dict[str, Any] = {"load_format": "dummy", "block_size": 4, "num_kv_blocks": 64, "max_model_len": 128}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = [(i * 7) % 90 + 1 for i in range(101)]

    def make() -> LLM:
        return LLM(checkpoint, **settings, kv_offload_dir=str(tmp_path / "kv"))

    first = make()
    want = first.generate([prompt], params)[0]
    assert want.num_cached_tokens == 0
    if ends == "closed":
        first.close()
    elif ends == "killed after a pause":
        assert first.engine is not None
        while first.engine.save_idle():
            time.sleep(0.001)
        offload = first.engine.scheduler.cache.offload
        assert offload is not None
        while offload._pending:
            time.sleep(0.001)
    with make() as second:
        found = second.generate([prompt], params)[0]
        assert found.outputs[0].token_ids == want.outputs[0].token_ids
        assert found.num_cached_tokens == (0 if ends == "killed at once" else 100)
    first.close()


def test_engines_with_one_folder_share_what_they_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_tiers, "REFRESH_SECONDS", 0.0)
    (tmp_path / "model").mkdir()
    checkpoint = write_checkpoint(tmp_path / "model")
    settings: dict[str, Any] = {"load_format": "dummy", "block_size": 4, "num_kv_blocks": 64, "max_model_len": 128}
    settings["kv_offload_dir"] = str(tmp_path / "kv")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = [(i * 7) % 90 + 1 for i in range(101)]
    with LLM(checkpoint, **settings) as second:
        with LLM(checkpoint, **settings) as first:
            want = first.generate([prompt], params)[0]
        found = second.generate([prompt], params)[0]
        assert found.outputs[0].token_ids == want.outputs[0].token_ids
        assert found.num_cached_tokens == 100


IN_A_PROCESS = """
import json, sys
from octavo import LLM, SamplingParams
path, folder = sys.argv[1:]
settings = {"tokenizer": None, "block_size": 4, "num_kv_blocks": 16, "max_model_len": 32}
with LLM(path, **settings, kv_offload_memory=0.001, kv_offload_dir=folder) as llm:
    offload = llm.engine.scheduler.cache.offload
    offload.host.capacity = 6 * offload.store.num_bytes
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    said = []
    for seed in range(8):
        prompt = [(seed * 31 + i * 7) % 38 + 1 for i in range(24)]
        output = llm.generate([prompt], params)[0].outputs[0]
        said.append([output.token_ids, repr(output.logprobs)])
    stats = llm.engine.stats()
print(json.dumps([said, stats.num_offload_restored, stats.num_offload_bad_files, stats.num_offload_saved]))
"""


@needs_float_kernels
@pytest.mark.nightly
def test_another_process_finds_what_one_with_block_weights_left(tmp_path: Path) -> None:
    """And of damaged files, nothing but the time is lost."""
    path, folder = tmp_path / "tiny.gguf", tmp_path / "kv"
    path.write_bytes(llama_file())

    def run() -> list[Any]:
        command = [sys.executable, "-c", IN_A_PROCESS, str(path), str(folder)]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        result: list[Any] = json.loads(found.stdout.splitlines()[-1])
        return result

    said, num_restored, num_bad, num_saved = run()
    assert num_bad == 0 < num_saved
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("index"))
    assert files
    said_again, num_restored_again, num_bad, _ = run()
    assert said_again == said
    assert num_restored_again > num_restored + 10
    assert num_bad == 0
    assert sorted(file for file in folder.rglob("*") if file in files) == files
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if number % 3 == 0:
            file.write_bytes(content[: len(content) // 2])
        elif number % 3 == 1:
            content[len(content) - 1 - number % 100] ^= 4
            file.write_bytes(content)
    said_at_last, _, num_bad, _ = run()
    assert said_at_last == said
    assert num_bad > 1
