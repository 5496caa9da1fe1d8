"""Models whose layers are several KV groups: by the plain runner and by that of GPUs.

Blocks hold no numbers before they are written, and there are few: reading behind what was given back, or through
another group's table, gives other tokens than one group of all layers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.runner.step_runner import compute_padding
from octavo.engine.scheduler import Scheduler
from octavo.models.layer_cache import KVGroup, LayerCacheSpec, kv_groups
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.runtime.executors.block_copies import HostBlockCopies
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.executors.step_views import StepBuffers, view_host_step, view_step
from octavo.runtime.group_memory import EVEN_SHARES, GroupMemory
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import StepShape
from octavo.steps.layout import StepArrays, num_bytes
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Step
from octavo.types import Request
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.making import CPU, host_runner, stream_runner
from tests.runtime.test_model_runner import MIXED, VOCAB, Loaded, run, tokens_of
from tests.tiers import nightly_after, one_in

FAMILIES = ["gemma3/other_pattern", "gpt_oss/sinks"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are too small to be worth a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> dict[int, list[int]]:
    """Tokens of ``some_requests`` over one KV group."""
    with dispatch.only(REFERENCE):
        return tokens_of(run(loaded.engine(), some_requests()))


def groups_of(loaded: Loaded) -> list[KVGroup]:
    groups = kv_groups(loaded.config.cache, max_window=10_000)
    assert len(groups) == 2
    return groups


def storage_of(loaded: Loaded, sizes: tuple[int, int], block_size: int) -> KVStorage:
    storage = KVStorage(loaded.config.cache, groups_of(loaded), sizes, block_size, torch.float32, CPU)
    for pool in storage.pools:
        for part in pool:
            part.fill_(torch.nan)
    return storage


def engine_of(
    loaded: Loaded, sizes: tuple[int, int], block_size: int = 4, streams: bool = False, depth: int = 1, steps: int = 16
) -> Engine:
    """``sizes`` are the blocks of the layers of full attention, and of those with windows."""
    storage = storage_of(loaded, sizes, block_size)
    limits = StepLimits(8, steps, max_blocks=120 // block_size)
    if streams:
        runner = stream_runner(loaded.model, storage, VOCAB, limits)
    else:
        runner = host_runner(loaded.model, storage, VOCAB, limits, make_forward(loaded.model, storage.layers, CPU))
    compute_padding(runner)
    groups = zip(sizes, groups_of(loaded), strict=True)
    cache = KVCache([GroupSize(size, group.window) for size, group in groups], block_size)
    cache.copy_slots = storage.copy_slots
    return Engine(Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=steps), runner, depth=depth)


def some_requests() -> list[Request]:
    """Longer than windows and steps, and some begin alike."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(VOCAB), k=count)

    shared = tokens(50)
    made = [([*shared[: rng.choice([0, 0, 13, 32, 50])], *tokens(rng.choice([1, 5, 30]))], 8) for _ in range(9)]
    made += [(tokens(3), 40) for _ in range(4)]  # they grow together, and some have to make place
    return [
        Request(i, prompt, SamplingParams(**rng.choice(MIXED)), count, seed=i) for i, (prompt, count) in enumerate(made)
    ]


SIZES: list[dict[str, Any]] = [
    {"sizes": (200, 100), "depth": 2},
    {"sizes": (26, 60), "depth": 2},
    {"sizes": (40, 9)},
    {"sizes": (120, 40), "block_size": 1, "depth": 2},
]


@one_in(5)
@pytest.mark.parametrize("settings", nightly_after(4, SIZES), ids=str)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_tokens_are_those_of_one_group(
    loaded: Loaded, expected: dict[int, list[int]], streams: bool, settings: dict[str, Any]
) -> None:
    some = some_requests()
    with dispatch.only(REFERENCE):
        engine = engine_of(loaded, streams=streams, **settings)
        for _ in range(2):  # the second time most is cached
            assert tokens_of(run(engine, some)) == expected
    stats = engine.stats()
    assert stats.prefix_hits > 0
    if settings["sizes"] == (26, 60):
        assert stats.num_preemptions > 0
    if settings["sizes"][0] == 200:
        assert stats.num_copied_tokens > 0


@needs_float_kernels
def test_recorded_steps_of_kernels_read_both_tables(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, "qwen2/windows")
    some = [Request(i, r.prompt_tokens, SamplingParams(temperature=0), 20) for i, r in enumerate(some_requests())]
    engine = engine_of(loaded, (60, 24))
    found = tokens_of(run(engine, some))
    assert found == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}
    forward: Any = engine.runner.executor._forward  # type: ignore[attr-defined]
    assert forward._steps, "no step was recorded"


def test_a_step_is_packed_and_read_group_by_group() -> None:
    shape, width = StepShape(6, 3, 4), 5
    buffer = bytearray(num_bytes(shape, width, 2))
    arrays = StepArrays(buffer, shape, width, 2)
    tables = [torch.randint(99, (2, width), dtype=torch.int32) for _ in range(2)]
    for group, slots in enumerate(([1, 2, 3], [7, 8, 9])):
        arrays.fill_group(group, np.array(slots), tables[group].numpy())
    arrays.finish()
    tables_GSB = torch.zeros(2, 4, 8, dtype=torch.int32)
    on_host = view_host_step(buffer, shape, 2)
    on_device = view_step(torch.frombuffer(buffer, dtype=torch.uint8), shape, tables_GSB)
    for step in (on_host, on_device):
        slots = [group.slot_mapping_T.tolist() for group in step.rows.groups]
        assert slots == [[1, 2, 3, -1, -1, -1], [7, 8, 9, -1, -1, -1]]
        assert step.packed_tables[: 3 * width].view(3, width)[:2].equal(tables[0])
        assert step.packed_tables[3 * width : 6 * width].view(3, width)[:2].equal(tables[1])
    for group, table in zip(on_host.rows.groups, tables, strict=True):
        assert group.block_tables_SB[:2].equal(table)
    assert on_device.rows.groups[1].block_tables_SB.data_ptr() == tables_GSB[1].data_ptr()


def test_steps_of_one_form_share_a_buffer() -> None:
    shape, buffers = StepShape(1, 1, 1), StepBuffers(1)

    def filled(token: int, table: list[int]) -> tuple[int, list[int], int]:
        message = bytearray(num_bytes(shape, len(table), 1))
        arrays = StepArrays(message, shape, len(table), 1)
        arrays.fill("token_ids", [token], 0)
        arrays.fill_group(0, np.array([7]), np.array([table], np.int32))
        arrays.finish()
        step, token_ids_T = buffers.filled(Step(shape, False, 1, 1, message))
        assert step.token_ids_T.tolist() == token_ids_T.tolist()
        group = step.rows.groups[0]
        return int(step.token_ids_T), group.block_tables_SB.tolist()[0], group.slot_mapping_T.data_ptr()

    found = [filled(5, [1, 2]), filled(6, [3, 4]), filled(7, [5, 6, 7]), filled(8, [8, 9])]  # of as many bytes all
    assert [entry[:2] for entry in found] == [(5, [1, 2]), (6, [3, 4]), (7, [5, 6, 7]), (8, [8, 9])]
    assert found[0][2] == found[1][2] == found[3][2] != found[2][2]
    for width in range(3, 40):
        filled(1, [0] * width)
    assert filled(9, [1, 2])[:2] == (9, [1, 2])


def test_each_layer_has_its_place_in_the_pool_of_its_group(loaded: Loaded) -> None:
    config, storage = loaded.config, storage_of(loaded, (9, 5), 4)
    groups = groups_of(loaded)
    assert [group.window for group in groups] == [0, max(config.windows)]
    assert [storage.layers[i].group for i in groups[1].layers] == [1] * len(groups[1].layers)
    assert [layer.keys.shape[0] for layer in storage.layers] == [5 if window else 9 for window in config.windows]
    places = {part.data_ptr() for layer in storage.layers for part in (layer.keys, layer.values)}
    assert len(places) == 2 * config.num_layers
    for part in (*storage.pools[0], *storage.pools[1]):
        part.copy_(torch.randn_like(part))
    before, others = storage.pools[0][0].clone(), storage.pools[1][0].clone()
    storage.copy_slots(0, 2, 7, 3)
    before[:, :, 7, :, :3] = before[:, :, 2, :, :3]
    assert torch.equal(storage.pools[0][0], before)
    assert torch.equal(storage.pools[1][0], others)


def test_layers_of_a_group_may_differ_in_width_and_share_a_cache() -> None:
    specs = [LayerCacheSpec(2, 8), LayerCacheSpec(1, 16, kind="latent"), LayerCacheSpec(2, 8, shared_with=0)]
    storage = KVStorage(specs, kv_groups(specs), [6], 4, torch.float32, CPU)
    assert [part.shape for part in storage.pools[0]] == [(1, 2, 6, 2, 4, 8), (1, 1, 6, 1, 4, 16)]
    assert storage.layers[1].keys.data_ptr() == storage.layers[1].values.data_ptr()
    assert storage.layers[2] is storage.layers[0]
    assert sum(part.nbytes for part in storage.pools[0]) == 6 * 4 * sum(
        spec.bytes_per_block(torch.float32, 1) for spec in specs
    )
    copies = HostBlockCopies(storage)
    for part in storage.pools[0]:
        part.copy_(torch.randn_like(part))
    before = [part.clone() for part in storage.pools[0]]
    copies.write(storage.contents("blocks"), [1], [copies.read(storage.contents("blocks"), [4]).wait()])
    assert all(torch.equal(part[:, :, 1], old[:, :, 4]) for part, old in zip(storage.pools[0], before, strict=True))


def test_windows_that_save_no_memory_join_the_group_that_reaches_furthest() -> None:
    def groups(windows: tuple[int, ...], max_window: int) -> list[tuple[tuple[int, ...], int]]:
        found = kv_groups([LayerCacheSpec(1, 8, window) for window in windows], max_window)
        return [(group.layers, group.window) for group in found]

    assert groups((0, 0, 0), 99) == [((0, 1, 2), 0)]
    assert groups((5, 5, 5), 99) == [((0, 1, 2), 5)]
    assert groups((5, 0, 5), 99) == [((1,), 0), ((0, 2), 5)]
    assert groups((5, 9, 0, 5), 99) == [((2,), 0), ((1,), 9), ((0, 3), 5)]
    assert groups((5, 9, 0, 5), 9) == [((1, 2), 0), ((0, 3), 5)]
    assert groups((5, 9, 0, 5), 0) == [((0, 1, 2, 3), 0)]
    assert groups((5, 9, 5), 99) == [((1,), 9), ((0, 2), 5)]
    assert groups((5, 9, 5), 4) == [((0, 1, 2), 9)]


def test_memory_is_divided_so_that_no_text_fits_worse(loaded: Loaded) -> None:
    config, block_size = loaded.config, 4
    pools = GroupMemory.of([config.cache], groups_of(loaded), torch.float32, block_size, 8, 16)
    first_bytes, window_bytes = pools.bytes_per_block
    both, plenty = first_bytes + window_bytes, pools.plenty[1]
    assert both == sum(spec.bytes_per_block(torch.float32, 1) for spec in config.cache) * block_size
    assert pools.divide(10 * both, 40) == [10, 10], "little memory is divided evenly"
    num_full, num_windows = pools.divide(1000 * both, 400)
    assert num_windows == 1000 // EVEN_SHARES > plenty
    assert num_full > 1000
    assert pools.divide(200 * both, 400)[1] == plenty > 200 // EVEN_SHARES
    assert 0 <= 1000 * both - pools.num_bytes([num_full, num_windows]) < first_bytes
    least = pools.least_bytes(400)
    kept = -(-pools.kept(400)[1] // block_size)
    assert pools.divide(least, 400) == [100, kept], "the longest text fits, which it would not in blocks of all layers"
    assert least < 100 * both
    for size in range(both, 120 * both, both // 3):
        num_full, num_windows = pools.divide(size, 40)
        assert num_full >= size // both
        assert num_windows >= min(size // both, pools.kept(40)[1] // block_size)


def test_memory_of_three_groups_is_divided_likewise() -> None:
    specs = [LayerCacheSpec(2, 8), LayerCacheSpec(1, 8, 7), LayerCacheSpec(4, 16, 20)]
    groups = kv_groups(specs, 1000)
    pools = GroupMemory.of([specs], groups, torch.float32, 4, 2, 8)
    assert pools.kept(500) == [500, 32, 19]
    assert pools.kept(25) == [25, 25, 19]
    every = sum(pools.bytes_per_block)
    assert pools.divide(10 * every, 40) == [10, 10, 10]
    for size in range(every, 300 * every, every // 2):
        counts = pools.divide(size, 200)
        assert counts[0] >= size // every
        assert all(1 <= count <= max(size // every, 8) for count in counts[1:])
        if size >= pools.least_bytes(200):
            assert counts[0] >= 50
            assert pools.num_bytes(counts) <= size
    assert pools.divide(pools.least_bytes(200), 200) == [50, 8, 5]
