"""Prefill attention over pages against float64, and its independence of how rows are cut into chunks and batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo_kernels.triton.attention import prefill_attention as module
from octavo_kernels.triton.attention.prefill_attention import CONFIGS, WIDE_HEADS, PrefillTile, prefill_attention
from octavo_kernels.triton.launch import invariant
from tests.ops.triton.paged_cases import Batch, Heads, make_batch
from tests.tiers import one_in

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
RAGGED = ([5, 1, 0, 40, 1, 3], [5, 1, 0, 40, 33, 70])
"""Rows and contexts: a prompt, single rows first and last, a padded sequence, a longer prompt, the end of a chunk."""


def run(batch: Batch, device: str, **kwargs: Any) -> Tensor:
    """Its result, in an output full of NaN."""
    heads = batch.heads
    tensors = (batch.q_TNH, batch.k_cache, batch.v_cache, batch.block_tables_SB, batch.cu_seqlens_q, batch.seq_lens_S)
    out = torch.full_like(batch.q_TNH, float("nan"), device=device)
    returned = prefill_attention(
        *(_moved(tensor, device) for tensor in tensors),
        heads.scale,
        heads.window,
        heads.softcap,
        None if batch.sinks_N is None else batch.sinks_N.to(device),
        slopes_N=None if batch.slopes_N is None else batch.slopes_N.to(device),
        bias_TNE=None if batch.bias_TNE is None else batch.bias_TNE.to(device),
        out=out,
        **kwargs,
    )
    assert returned is out
    return out.cpu()


def _moved(tensor: Tensor, device: str) -> Tensor:
    """On the device, strides kept."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def check(batch: Batch, device: str, times: float = 1.0, **kwargs: Any) -> None:
    """Its error is below the tolerance of the dtype, or so many times that."""
    rows = sum(batch.query_lens)
    out, reference = run(batch, device, **kwargs), batch.reference()
    error = ((out[:rows].double() - reference).abs() / reference.abs().clamp(min=1)).max()
    assert error < times * TOLERANCE[out.dtype], f"largest error {error}"
    assert out[rows:].isnan().all(), "a padded row was written"


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_ragged_batches_with_padding(dtype: torch.dtype, block_size: int, device: str) -> None:
    check(make_batch(Heads(), *RAGGED, seed=1, dtype=dtype, block_size=block_size, padded_rows=7), device)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_head_dims(head_dim: int, device: str) -> None:
    check(make_batch(Heads(head_dim=head_dim), [3, 9], [30, 9], seed=2, dtype=torch.bfloat16), device)


@one_in(3)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (14, 2), (40, 1)])
def test_groups_of_heads(num_heads: int, num_kv_heads: int, device: str) -> None:
    """Three, seven and forty heads leave rows of a tile unused; in float32 the tiles are small and many."""
    check(make_batch(Heads(num_heads, num_kv_heads), [17, 1, 30], [40, 9, 30], seed=3), device)


@pytest.mark.parametrize("window", [1, 5, 16, 33, 100])
def test_windows(window: int, device: str) -> None:
    check(make_batch(Heads(2, 1, window=window), [100, 1, 20], [100, 90, 75], seed=4), device)


def test_window_in_large_tiles(device: str) -> None:
    """Keys before the window, keys that all rows see, and keys behind the rows, each in tiles of their own."""
    batch = make_batch(Heads(window=190), [100, 2], [420, 210], seed=5, dtype=torch.float16, block_size=64)
    check(batch, device)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(softcap: float, device: str) -> None:
    check(make_batch(Heads(softcap=softcap), *RAGGED, seed=6), device, times=8)  # tanh is exact to an ulp of 1


def test_soft_cap_of_scores_far_beyond_it(device: str) -> None:
    batch = make_batch(Heads(softcap=2.0), [20], [20], seed=7)
    batch.q_TNH *= 100
    check(batch, device, times=8)


@pytest.mark.parametrize("heads", [Heads(extent=30), Heads(extent=9, window=9, softcap=3.0, has_sinks=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_distances(heads: Heads, dtype: torch.dtype, device: str) -> None:
    check(make_batch(heads, *RAGGED, dtype=dtype, padded_rows=3), device)


@pytest.mark.parametrize("heads", [Heads(has_slopes=True), Heads(has_slopes=True, window=9, softcap=3.0)])
def test_slopes(heads: Heads, device: str) -> None:
    check(make_batch(heads, *RAGGED, seed=8), device, times=2)


def test_sinks(device: str) -> None:
    batch = make_batch(Heads(has_sinks=True, window=9), *RAGGED, seed=8, padded_rows=2)
    check(batch, device)
    batch.sinks_N = torch.randn(batch.q_TNH.shape[:2]) * 3
    check(batch, device)


@pytest.mark.parametrize("sink", [-float("inf"), -500.0, 500.0])
def test_extreme_sinks(sink: float, device: str) -> None:
    batch = make_batch(Heads(has_sinks=True), [3], [30], seed=9)
    assert batch.sinks_N is not None
    batch.sinks_N[::2] = sink
    check(batch, device)


def test_scores_too_large_for_exp(device: str) -> None:
    batch = make_batch(Heads(), [30], [30], seed=10)
    batch.q_TNH *= 300
    check(batch, device, times=50)  # as rounding a score of 1000 to float32 does


def test_float8_cache(device: str) -> None:
    batch = make_batch(Heads(), *RAGGED, seed=11, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    check(batch, device)


def test_keys_and_values_of_a_block_side_by_side(device: str) -> None:
    check(make_batch(Heads(), *RAGGED, seed=12, interleaved=True), device)


def test_queries_that_are_columns_of_wider_rows(device: str) -> None:
    batch = make_batch(Heads(), *RAGGED, seed=13)
    rows, N, H = batch.q_TNH.shape
    wide = torch.full((rows, N + 3, H), float("nan"))
    wide[:, :N] = batch.q_TNH
    batch.q_TNH = wide[:, :N]
    check(batch, device)


def test_single_rows_are_left_alone(device: str) -> None:
    batch = make_batch(Heads(), *RAGGED, seed=14)
    out, reference = run(batch, device, skip_single=True), batch.reference()
    starts = batch.cu_seqlens_q.tolist()
    for s, q_len in enumerate(batch.query_lens):
        rows = slice(starts[s], starts[s + 1])
        if q_len == 1:
            assert out[rows].isnan().all()
        else:
            torch.testing.assert_close(out[rows].double(), reference[rows], atol=2e-6, rtol=0)


def test_more_sequences_than_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program then computes several tiles."""
    monkeypatch.setattr(module, "MOST_BESIDE", 2)  # on a large device there would be a program for each
    query_lens = [1 + s % 3 for s in range(130)]
    check(
        make_batch(Heads(2, 1, 16), query_lens, [q_len + s % 20 for s, q_len in enumerate(query_lens)], seed=15), device
    )


def test_a_batch_of_padding_alone_writes_nothing(device: str) -> None:
    batch = make_batch(Heads(), [0, 0], [0, 0], padded_rows=5)
    assert run(batch, device).isnan().all()


@one_in(3)
@pytest.mark.parametrize("config", sorted({*CONFIGS.values(), *WIDE_HEADS.values()}))
def test_every_configuration(config: PrefillTile, device: str) -> None:
    batch = make_batch(Heads(window=70), [50, 1, 90], [50, 64, 300], seed=16, dtype=torch.float16, block_size=64)
    check(batch, device, config=config)


@pytest.mark.parametrize("heads", [Heads(3, 1), Heads(4, 1, window=37, has_sinks=True), Heads(1, 1, softcap=3.0)])
def test_rows_do_not_depend_on_their_chunk_or_batch(heads: Heads, device: str) -> None:
    """The rows of one prompt, computed in chunks of random sizes beside random other sequences: the same bits."""
    rng, length, config = random.Random(0), 110, PrefillTile(32, 32, 4, 2)
    whole = make_batch(heads, [length], [length], seed=17)
    expected = run(whole, device, config=config)
    done = 0
    while done < length:
        q_len = min(rng.choice([1, 9, 40]), length - done)
        before, after = rng.choice([1, 5, 33]), rng.choice([1, 20])
        chunk = make_batch(heads, [before, q_len, after], [50, done + q_len, after], seed=done)
        _give_prefix(chunk, whole, done, q_len, before)
        chunk.sinks_N = whole.sinks_N
        with invariant():
            out = run(chunk, device, config=config)[before : before + q_len]
        assert torch.equal(out, expected[done : done + q_len]), f"rows {done} to {done + q_len}"
        done += q_len


def _give_prefix(chunk: Batch, whole: Batch, done: int, q_len: int, before: int) -> None:
    """Put the queries, keys and values of a prompt's rows into the second sequence of a batch."""
    chunk.q_TNH[before : before + q_len] = whole.q_TNH[done : done + q_len]
    block_size = chunk.k_cache.shape[2]
    for position in range(done + q_len):
        block, offset = position // block_size, position % block_size
        to, source = chunk.block_tables_SB[1, block], whole.block_tables_SB[0, block]
        chunk.k_cache[to, :, offset] = whole.k_cache[source, :, offset]
        chunk.v_cache[to, :, offset] = whole.v_cache[source, :, offset]


LONG = ([3, 1, 0, 20], [1900, 1, 0, 700])
"""Rows and contexts of which some are long: their keys are shared by programs."""
SHARED_HEADS = [
    Heads(),
    Heads(6, 2, head_dim=80),
    Heads(has_sinks=True, softcap=20.0),
    Heads(has_slopes=True, head_dim=128),
    Heads(extent=900, head_dim=32),
]


@one_in(2)
@pytest.mark.parametrize("heads", SHARED_HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_behind_long_contexts(
    heads: Heads, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 16)
    combined: list[int] = []
    if device == "cpu":  # the interpreter looks functions up as Python does
        leave = vars(module)["leave_part"]

        def noting(*args: Any) -> Any:
            combined.append(int(args[5]))
            return leave(*args)

        monkeypatch.setattr(module, "leave_part", noting)
    batch = make_batch(heads, *LONG, dtype=dtype, block_size=64, padded_rows=4)
    check(batch, device, times=8)
    assert device != "cpu" or {2, 4} <= set(combined)
    assert torch.equal(run(batch, device).nan_to_num(), run(batch, device).nan_to_num()), "parts are added in one order"
    combined.clear()
    with invariant():
        check(batch, device, times=8)
    assert not combined, "other rows would decide how many parts there are"


def test_rows_that_see_no_key_of_the_last_share(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's rows end at several positions: the last share begins behind that of the first."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 64)
    batch = make_batch(Heads(4, 4, head_dim=32), [32], [544], block_size=32)
    check(batch, device, config=PrefillTile(32, 16, 4, 2))
    for rows in range(1, 36, 7):
        check(make_batch(Heads(1, 1, head_dim=32), [rows], [1024 + rows - 1], block_size=16), device)


def test_shared_keys_of_8_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 16)
    batch = make_batch(Heads(), *LONG, seed=11, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    check(batch, device)
