"""Models of which only some layers have windows, over two pools of blocks: by the plain runner and by that of GPUs.

Blocks hold no numbers before they are written, and there are few: whoever reads behind what was given back, or through
the other pool's table, gets other tokens than one pool of all layers gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.cache.hybrid_cache import HybridCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.step_runner import compute_padding
from octavo.ops import dispatch
from octavo.ops.attention import WholeLayerCache
from octavo.ops.dispatch import REFERENCE
from octavo.runtime.kv_storage import KVStorage, kv_bytes_per_token
from octavo.runtime.recorded_forward import RecordedForward
from octavo.runtime.step_views import view_step
from octavo.runtime.two_pools import EVEN_SHARES, TwoPools
from octavo.sampling_params import SamplingParams
from octavo.steps.layout import StepArrays, num_bytes
from octavo.steps.limits import StepLimits
from octavo.steps.shapes import StepShape
from octavo.types import Request
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.making import CPU, host_runner, stream_runner
from tests.runtime.test_model_runner import MIXED, VOCAB, Loaded, run, tokens_of

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
    """Tokens of ``some_requests`` over one pool."""
    with dispatch.only(REFERENCE):
        return tokens_of(run(loaded.engine(), some_requests()))


def storage_of(loaded: Loaded, sizes: tuple[int, int], block_size: int) -> KVStorage:
    storage = KVStorage(loaded.config, sizes[1], block_size, torch.float32, CPU, sizes[0])
    storage.pool.fill_(torch.nan)
    assert storage.whole_pool is not None
    storage.whole_pool.fill_(torch.nan)
    return storage


def engine_of(
    loaded: Loaded, sizes: tuple[int, int], block_size: int = 4, streams: bool = False, depth: int = 1, steps: int = 16
) -> Engine:
    """``sizes`` are the blocks of the layers with windows, and those of the others."""
    storage = storage_of(loaded, sizes, block_size)
    limits = StepLimits(8, steps, max_blocks=120 // block_size)
    if streams:
        runner = stream_runner(loaded.model, storage, VOCAB, limits)
    else:
        runner = host_runner(loaded.model, storage, VOCAB, limits, RecordedForward(loaded.model, storage.layers))
    compute_padding(runner)
    cache = HybridCache(*sizes, block_size, window=loaded.config.window)
    cache.copy_slots, cache.whole.copy_slots = (partial(storage.copy_slots, group) for group in (0, 1))
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
    {"sizes": (100, 200), "depth": 2},
    {"sizes": (60, 26), "depth": 2},
    {"sizes": (9, 40)},
    {"sizes": (40, 120), "block_size": 1, "depth": 2},
]


@pytest.mark.parametrize("settings", SIZES, ids=str)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_tokens_are_those_of_one_pool(
    loaded: Loaded, expected: dict[int, list[int]], streams: bool, settings: dict[str, Any]
) -> None:
    some = some_requests()
    with dispatch.only(REFERENCE):
        engine = engine_of(loaded, streams=streams, **settings)
        for _ in range(2):  # the second time most is cached
            assert tokens_of(run(engine, some)) == expected
    stats = engine.stats()
    assert stats.prefix_hits > 0
    if settings["sizes"] == (60, 26):
        assert stats.num_preemptions > 0
    if settings["sizes"][0] == 100:
        assert stats.num_copied_tokens > 0


@needs_float_kernels
def test_recorded_steps_of_kernels_read_both_tables(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, "qwen2/windows")
    some = [Request(i, r.prompt_tokens, SamplingParams(temperature=0), 20) for i, r in enumerate(some_requests())]
    engine = engine_of(loaded, (24, 60))
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
    on_host = view_step(torch.frombuffer(buffer, dtype=torch.uint8), shape, 2)
    on_device = view_step(torch.frombuffer(buffer, dtype=torch.uint8), shape, 2, tables_GSB)
    for step in (on_host, on_device):
        assert step.rows.whole is not None
        assert step.rows.slot_mapping_T.tolist() == [1, 2, 3, -1, -1, -1]
        assert step.rows.whole.slot_mapping_T.tolist() == [7, 8, 9, -1, -1, -1]
        assert step.packed_tables[: 3 * width].view(3, width)[:2].equal(tables[0])
        assert step.packed_tables[3 * width : 6 * width].view(3, width)[:2].equal(tables[1])
    assert on_host.rows.block_tables_SB[:2].equal(tables[0])
    assert on_host.rows.whole is not None
    assert on_host.rows.whole.block_tables_SB[:2].equal(tables[1])
    assert on_device.rows.whole is not None
    assert on_device.rows.whole.block_tables_SB.data_ptr() == tables_GSB[1].data_ptr()


def test_each_layer_has_its_place_in_one_pool(loaded: Loaded) -> None:
    config, storage = loaded.config, storage_of(loaded, (5, 9), 4)
    assert storage.num_pools == 2
    whole = [i for i, window in enumerate(config.windows) if not window]
    assert 0 < len(whole) < config.num_layers
    assert [layer.keys.shape[0] for layer in storage.layers] == [
        9 if i in whole else 5 for i in range(config.num_layers)
    ]
    assert [isinstance(layer, WholeLayerCache) for layer in storage.layers] == [
        i in whole for i in range(config.num_layers)
    ]
    places = {part.data_ptr() for layer in storage.layers for part in (layer.keys, layer.values)}
    assert len(places) == 2 * config.num_layers
    assert storage.whole_pool is not None
    before = torch.randn_like(storage.whole_pool)
    storage.whole_pool.copy_(before)
    storage.copy_slots(1, 2, 7, 3)
    before[:, :, 7, :, :3] = before[:, :, 2, :, :3]
    assert torch.equal(storage.whole_pool, before)


def test_memory_is_divided_so_that_no_text_fits_worse(loaded: Loaded) -> None:
    config, block_size, kept = loaded.config, 4, 7 + 16 + 4
    pools = TwoPools.of(config, torch.float32, block_size, kept, 8, 16)
    both = kv_bytes_per_token(config, torch.float32) * block_size
    assert pools.bytes_per_whole_block + pools.bytes_per_window_block == both
    assert pools.divide(10 * both, 40) == (10, 10), "little memory is divided evenly"
    num_whole, num_windows = pools.divide(1000 * both, 400)
    assert num_windows == 1000 // EVEN_SHARES > pools.plenty
    assert num_whole > 1000
    assert pools.divide(200 * both, 400)[1] == pools.plenty > 200 // EVEN_SHARES
    taken = num_whole * pools.bytes_per_whole_block + num_windows * pools.bytes_per_window_block
    assert 0 <= 1000 * both - taken < pools.bytes_per_whole_block
    least = pools.least_bytes(400)
    assert pools.divide(least, 400) == (100, 7), (
        "the longest text fits, where it would not if blocks were of all layers"
    )
    assert least < 100 * both
    for size in range(both, 120 * both, both // 3):
        num_whole, num_windows = pools.divide(size, 40)
        assert num_whole >= size // both
        assert num_windows >= min(size // both, pools.least)
