"""Decode attention in Triton: against float64 over ragged contexts, blind to unused memory, writing one slot a row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows, SingleRows
from octavo_kernels.triton.attention.decode_attention import Prologue, attend_single_rows, run_decode_attention
from octavo_kernels.triton.configs.decode_attention import DecodeConfig, config_for
from tests.ops.triton.bounds import watch_bounds
from tests.ops.triton.paged_cases import with_bias
from tests.tiers import one_in
from tests.triton_interpreter import DEVICE, quick_first

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
SMALL = DecodeConfig(tile=16, warps=4, splits=3)
BY_WARP = DecodeConfig(tile=32, warps=2, splits=3, stages=3, by_warp=True)
EDGES = [1, 0, 2, 15, 16, 17, 33, 48, 100]
"""Lengths around the edges of blocks and tiles; 0 is a padded sequence."""


def layout(N: int = 4, K: int = 2, H: int = 16, norm: bool = False, **more: Any) -> HeadLayout:
    weights = [1 + torch.rand(H, generator=torch.Generator().manual_seed(i)) for i in range(2)] if norm else [None] * 2
    return HeadLayout(N, K, H, H**-0.5, *weights, norm_eps=1e-6, **more)


class Step:
    """Random inputs of a step whose sequences have one row each; what no row sees is NaN."""

    def __init__(
        self,
        lengths: list[int],
        heads: HeadLayout,
        device: str,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        rotated: int | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        S, N, K, H = len(lengths), heads.num_heads, heads.num_kv_heads, heads.head_dim
        R = H // 2 if rotated is None else rotated
        counts = [-(-length // block_size) for length in lengths]
        blocks = iter(torch.randperm(sum(counts) + 2, generator=generator).int().split(1))  # two are nobody's
        table_SB = torch.full((S, max(counts) + 1), 2**30, dtype=torch.int32)
        keys = torch.full((sum(counts) + 2, K, block_size, H), NAN)
        values = torch.full_like(keys, NAN)
        slots = torch.full((S,), -1)
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for b in range(count):
                block = table_SB[s, b] = next(blocks)
                stored = min(block_size, length - 1 - b * block_size)
                keys[block, :, :stored] = torch.randn(K, stored, H, generator=generator)
                values[block, :, :stored] = torch.randn(K, stored, H, generator=generator)
                slots[s] = block * block_size + stored
                hidden = max(0, length - heads.window - b * block_size) if heads.window else 0
                keys[block, :, :hidden] = values[block, :, :hidden] = NAN
        self.heads = HeadLayout(*(part.to(device) if isinstance(part, Tensor) else part for part in heads))
        self.qkv = torch.randn(S, (N + 2 * K) * H, generator=generator).to(device, dtype)
        angles = (torch.rand(S, R, generator=generator) * 6).to(device)
        self.cos, self.sin = (angles.cos(), angles.sin()) if R else (None, None)
        self.cache = LayerCache(keys.to(device, cache_dtype or dtype), values.to(device, cache_dtype or dtype))
        starts = torch.tensor([0, *(length > 0 for length in lengths)]).cumsum(0)
        lens = torch.tensor(lengths)
        slots, table_SB, starts, lens = (part.to(device) for part in (slots, table_SB, starts.int(), lens.int()))
        self.rows = PagedRows((GroupRows(slots, table_SB),), starts, lens, 1)
        self.lengths = lengths

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after norm and rotation, and values: float64, [S, heads, H]."""
        H, S = self.heads.head_dim, len(self.lengths)
        q, k, v = (part.reshape(S, -1, H) for part in self.qkv.double().split(self.heads.sizes, dim=-1))
        return self._turn(q, self.heads.q_norm_H), self._turn(k, self.heads.k_norm_H), v

    def _turn(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + self.heads.norm_eps).sqrt() * weight.double()
        if self.cos is None or self.sin is None:
            return x
        R = self.cos.shape[1]
        turn = torch.complex(self.cos.double(), self.sin.double())[:, None]
        turned = torch.complex(x[..., :R].contiguous(), x[..., R : 2 * R].contiguous()) * turn
        return torch.cat((turned.real, turned.imag, x[..., 2 * R :]), -1)

    def context(self, s: int) -> tuple[Tensor, Tensor]:
        """What the cache holds of sequence s: two of float64 [length, K, H]."""
        blocks = self.rows.groups[0].block_tables_SB[s][: -(-self.lengths[s] // self.cache.keys.shape[2])].long()
        keys, values = (part.float().double()[blocks].transpose(1, 2).flatten(0, 1) for part in self.cache[:2])
        return keys[: self.lengths[s]], values[: self.lengths[s]]

    def attended(self, q_SNH: Tensor) -> Tensor:
        """float64 [S, N, H]; NaN for padded sequences."""
        heads, out = self.heads, torch.full_like(q_SNH, NAN)
        for s, length in enumerate(self.lengths):
            if length:
                seen = slice(max(0, length - heads.window) if heads.window else 0, length)
                keys, values = (
                    part[seen].repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1)
                    for part in self.context(s)
                )
                scores = torch.einsum("nh,cnh->nc", q_SNH[s], keys) * heads.scale
                if heads.softcap:
                    scores = heads.softcap * (scores / heads.softcap).tanh()
                if heads.slopes_N is not None:
                    distance_C = length - 1 - torch.arange(length, device=q_SNH.device)[seen]
                    scores = scores - heads.slopes_N.double()[:, None] * distance_C
                if heads.bias_TNE is not None:
                    scores = with_bias(scores, heads.bias_TNE[s])
                if heads.sinks_N is not None:
                    sinks_N = heads.sinks_N.double().expand(q_SNH.shape[:2])[s]
                    scores = torch.cat((scores, sinks_N[:, None]), dim=1)
                out[s] = torch.einsum("nc,cnh->nh", scores.softmax(1)[:, : len(keys)], values)
        return out


def assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert not got.isnan().any()
    assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def assert_stored(step: Step, before: LayerCache) -> None:
    """Each row's key and value are in its slot, and nothing else has changed."""
    _, k_SKH, v_SKH = step.turned()
    block_size = step.cache.keys.shape[2]
    rounding = ROUNDING[step.cache.keys.dtype]
    is_written = torch.zeros(step.cache.keys.shape[0], block_size, dtype=torch.bool)
    for s, slot in enumerate(step.rows.groups[0].slot_mapping_T.tolist()):
        if slot >= 0:
            is_written[slot // block_size, slot % block_size] = True
            for x_KH, cache in ((k_SKH[s], step.cache.keys), (v_SKH[s], step.cache.values)):
                got = cache[slot // block_size, :, slot % block_size].float().double()
                assert ((got - x_KH).abs() <= x_KH.abs() * rounding + 2**-9).all()
    for now, then in zip(step.cache[:2], before[:2], strict=True):
        same = now.view(torch.uint8) == then.view(torch.uint8)
        assert same.flatten(3).all(-1).transpose(1, 2)[~is_written.to(now.device)].all()


def run(step: Step, config: DecodeConfig | None = SMALL) -> Tensor:
    """The fused step, checked for what it stores; [S, N, H]."""
    before = LayerCache(step.cache.keys.clone(), step.cache.values.clone())
    out = torch.full((len(step.lengths), step.heads.sizes[0]), NAN, dtype=step.qkv.dtype, device=step.qkv.device)
    prologue = Prologue(step.cos, step.sin, step.rows.groups[0].slot_mapping_T)
    run_decode_attention(step.qkv, step.heads, prologue, step.cache, step.rows, out, config)
    assert_stored(step, before)
    return out.view(len(step.lengths), step.heads.num_heads, -1)


def check(step: Step, config: DecodeConfig | None = SMALL, worse: float = 1) -> None:
    got = run(step, config)
    expected = step.attended(step.turned()[0])
    is_row = step.rows.seq_lens_S > 0
    assert_near(got[is_row], expected[is_row], worse * TOLERANCE[step.qkv.dtype])
    assert got[~is_row].isnan().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="for interpreted kernels")
@pytest.mark.parametrize("has_prologue", [True, False])
def test_a_sequence_without_a_row_reads_no_table(has_prologue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one: before its table may be memory that is not mapped."""
    step, config = Step([0, 40], layout(), "cpu"), SMALL._replace(tile=16)
    watch_bounds(monkeypatch)
    if has_prologue:
        check(step, config)
    else:
        out_SNH = torch.full((2, 4, 16), NAN)
        attend_single_rows(step.qkv[:, :64].contiguous().view(2, 4, 16), step.heads, step.cache, step.rows, out_SNH)
        assert out_SNH[0].isnan().all()


@one_in(3)
@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize("splits", quick_first(2, [3, 1, 8]))
def test_ragged_contexts(dot: bool, splits: int, device: str) -> None:
    check(Step(EDGES, layout(norm=True), device), SMALL._replace(splits=splits, dot=dot))


@one_in(2)
@pytest.mark.parametrize(("N", "K"), quick_first(3, [(10, 2), (3, 3), (20, 1), (8, 2), (8, 1)]))
def test_shared_heads(N: int, K: int, device: str) -> None:
    check(Step([1, 40, 100], layout(N, K), device))
    check(Step([1, 40, 100], layout(N, K), device), SMALL._replace(dot=False))


@one_in(3)
@pytest.mark.parametrize(
    ("H", "rotated"), [(8, 4), (64, 32), (80, 40), (96, 48), (96, 12), (128, 64), (256, 32), (512, 64), (64, 0)]
)
def test_head_dims(H: int, rotated: int, device: str) -> None:
    check(Step([1, 17, 70], layout(2, 1, H, norm=True), device, rotated=rotated))
    check(Step([1, 17, 70], layout(2, 1, H), device, rotated=rotated), SMALL._replace(dot=False))


@one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_float8", [False, True])
def test_dtypes(dtype: torch.dtype, is_float8: bool, device: str) -> None:
    cache_dtype = torch.float8_e4m3fn if is_float8 else dtype
    check(Step([1, 16, 33, 90], layout(4, 2, 32, norm=True), device, dtype, cache_dtype))


@one_in(2)
@pytest.mark.parametrize("splits", [1, 3])
def test_each_warp_has_a_share_of_a_tile(splits: int, device: str) -> None:
    """Shares may lie in several blocks, and behind a context's end."""
    config = BY_WARP._replace(splits=splits)
    check(Step(EDGES, layout(norm=True), device), config)
    check(Step(EDGES, layout(10, 2, window=20, softcap=2.0, sinks_N=torch.arange(-5.0, 5)), device), config)
    check(Step(EDGES, layout(slopes_N=2.0 ** -torch.arange(1.0, 5.0)), device, block_size=64), config)
    check(Step(EDGES, layout(4, 2, 32), device, torch.bfloat16, torch.float8_e4m3fn), config)


@one_in(2)
@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_float8_takes_queries_of_any_size_and_small_weights_of_many_keys(size: float, device: str) -> None:
    """Products of float16 would be infinite, or none, were queries not scaled; and 2^-19 is off by 1.5 %."""
    step = Step([2000], layout(1, 1, 32), device, torch.bfloat16, torch.float8_e4m3fn, rotated=0)
    keys, values, first = *step.cache[:2], step.rows.groups[0].block_tables_SB[0, 0]
    keys[:], values[:] = torch.zeros(keys.shape), torch.full(values.shape, 448.0)
    keys[first, :, 2], values[first, :, 2] = 1.0, 0.0
    step.qkv[:, :32], step.qkv[:, 32:64], step.qkv[:, 64:] = size, 0.0, 448.0
    step.heads = step.heads._replace(scale=(19 - 1 / 45) * math.log(2) / size / 32)
    check(step, SMALL._replace(splits=1))


@one_in(3)
@pytest.mark.parametrize(("block_size", "tile"), [(16, 16), (32, 16), (64, 32), (256, 64)])
def test_tiles_within_blocks(block_size: int, tile: int, device: str) -> None:
    step = Step([1, block_size, block_size + 1, 2 * block_size + 40], layout(), device, block_size=block_size)
    check(step, SMALL._replace(tile=tile))


@one_in(3)
@pytest.mark.parametrize("window", [1, 15, 16, 40])
def test_window(window: int, device: str) -> None:
    step = Step(EDGES, layout(window=window), device)
    for s, length in enumerate(step.lengths):  # blocks before the window may be anybody's
        outside = max(0, length - window) // 16
        step.cache.keys[step.rows.groups[0].block_tables_SB[s, :outside].long()] = NAN
        step.cache.values[step.rows.groups[0].block_tables_SB[s, :outside].long()] = NAN
        step.rows.groups[0].block_tables_SB[s, :outside] = 2**30
    got = run(step)
    step.rows.groups[0].block_tables_SB[step.rows.groups[0].block_tables_SB == 2**30] = 0
    is_row = step.rows.seq_lens_S > 0
    assert_near(got[is_row], step.attended(step.turned()[0])[is_row], TOLERANCE[torch.float32])


def test_softcap_and_sinks(device: str) -> None:
    sinks = torch.tensor([-3.0, 0.0, 2.0, 60.0])
    check(Step(EDGES, layout(softcap=2.0), device))
    check(Step(EDGES, layout(sinks_N=sinks), device))
    check(Step(EDGES, layout(softcap=2.0, sinks_N=sinks, window=20), device))
    check(Step(EDGES, layout(sinks_N=torch.randn(len(EDGES), 4) * 3), device))


@pytest.mark.parametrize("window", [0, 20])
def test_slopes(device: str, window: int) -> None:
    check(Step(EDGES, layout(slopes_N=2.0 ** -torch.arange(1.0, 5.0), window=window, softcap=window / 10), device))


@pytest.mark.parametrize("extent", [1, 30, 90])
@pytest.mark.parametrize("config", [None, BY_WARP])
def test_biases_of_distances(device: str, extent: int, config: DecodeConfig | None) -> None:
    bias = torch.randn(len(EDGES), 10, extent)
    check(Step(EDGES, layout(10, 2, window=20 * (extent == 30), bias_TNE=bias), device), config)


def test_scores_of_any_size(device: str) -> None:
    check(Step(EDGES, layout()._replace(scale=60.0), device), worse=100)  # errors grow with the scores


def test_many_steps_leave_the_counters_clean(device: str) -> None:
    for seed in range(4):
        lengths = torch.randint(0, 260, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
        check(Step([*lengths, 5], layout(), device, seed=seed), SMALL._replace(splits=5, min_tiles=2))


@pytest.mark.nightly
@pytest.mark.parametrize("lengths", quick_first(1, [[4096, 1, 6000], [9000]]))
def test_many_programs_share_a_long_context(lengths: list[int], device: str) -> None:
    """By the choice for these sizes; the step may also have short ones."""
    step = Step(lengths, layout(8, 4), device, block_size=64)
    step.rows = replace(step.rows, has_long_context=True)
    assert config_for(4 * len(lengths), 2, 16, 4, 64, has_long_context=True).splits >= 44
    check(step, config=None)


def test_negative_slot_stores_nothing(device: str) -> None:
    step = Step([20, 33], layout(), device)
    step.rows.groups[0].slot_mapping_T[0] = -1
    with pytest.raises(AssertionError):  # nan: the key that the check would read was not stored
        check(step)
    assert step.context(0)[0][-1].isnan().all()


def test_single_rows_of_a_mixed_step(device: str) -> None:
    lengths = [40, 7, 33, 60, 1]
    counts = [1, 3, 1, 0, 1]
    step = Step(lengths, layout(norm=True), device)
    run(step)  # stores the rows' keys and values
    q_SNH = step.turned()[0]
    starts = torch.tensor([0, *counts]).cumsum(0)
    q_TNH = torch.full((int(starts[-1]) + 2, *q_SNH.shape[1:]), NAN, device=device)
    single = [s for s, count in enumerate(counts) if count == 1]
    q_TNH[starts[single]] = q_SNH[single].float()
    rows = PagedRows(step.rows.groups, starts.int().to(device), step.rows.seq_lens_S, 3)
    out = torch.full_like(q_TNH, NAN)
    before = [part.clone() for part in step.cache[:2]]
    run_decode_attention(q_TNH.flatten(1), step.heads, None, step.cache, rows, out.flatten(1), SMALL)
    assert_near(out[starts[single]], step.attended(q_SNH)[single], TOLERANCE[torch.float32])
    assert out.isnan().flatten(1).all(1).sum() == len(out) - len(single)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(step.cache[:2], before[:2], strict=True))


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_batch(dtype: torch.dtype, device: str) -> None:
    step = Step([300, 1, 700, 64], layout(), device, dtype)
    together = run(step, SMALL)
    rows, row = step.rows, slice(2, 3)
    slots, tables = rows.groups[0]
    alone = PagedRows((GroupRows(slots[row], tables[row]),), rows.cu_seqlens_q[:2], rows.seq_lens_S[row], 1)
    assert step.cos is not None
    assert step.sin is not None
    prologue = Prologue(step.cos[row], step.sin[row], alone.groups[0].slot_mapping_T)
    out = torch.full_like(together[row].flatten(1), NAN)
    run_decode_attention(step.qkv[row], step.heads, prologue, step.cache, alone, out, SMALL)
    assert torch.equal(out, together[row].flatten(1))


@one_in(7)
@pytest.mark.parametrize("pairs", [1, 8, 100, 4096])
@pytest.mark.parametrize("H", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_every_shape_has_a_cut(pairs: int, H: int, block_size: int) -> None:
    for element in (2, 4):
        config = config_for(pairs, 4, H, element, block_size)
        assert 16 <= config.tile <= block_size
        assert element == 4 or (config.warps <= 4 and config.tile * H * element <= 4096 * config.warps)
        assert config.splits >= 1
        assert config.min_tiles >= 1
        long = config_for(pairs, 4, H, element, block_size, has_long_context=True)
        most = 3 * 132 if long.by_warp else 4 * 132
        assert long.splits == 64 or most - pairs < long.splits * pairs or long.splits == 1
        assert long.by_warp == (element == 2 and H <= 128)
        assert not long.by_warp or 16 <= long.tile // long.warps <= block_size


def test_lone_queries_in_float32_are_multiplied_without_dots() -> None:
    fewest = config_for(pairs=12, group=1, head_dim=64, element=4, block_size=64)
    many = config_for(pairs=512 * 12, group=1, head_dim=64, element=4, block_size=64)
    assert not fewest.dot
    assert not many.dot
    assert (many.tile, many.warps, many.splits) == (16, 1, 1)
    assert config_for(pairs=512 * 12, group=1, head_dim=64, element=2, block_size=64).dot


@one_in(2)
@pytest.mark.parametrize("window", [0, 9])
def test_rows_of_drafts_are_computed_one_by_one(device: str, window: int) -> None:
    """Every row of a sequence attends up to its own position; padding rows are left as they are."""
    heads = layout(window=window)
    generator = torch.Generator().manual_seed(1)
    starts, counts, T = [0, 20, 33], [1, 4, 2], 9
    keys, values = torch.randn(2, 9, heads.num_kv_heads, 16, 16, generator=generator)
    tables = torch.tensor([[3, 0, 0], [5, 1, 0], [0, 8, 2]], dtype=torch.int32)
    positions = torch.tensor([start + i for start, count in zip(starts, counts, strict=True) for i in range(count)])
    seqs = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    queries = torch.randn(T, heads.num_heads * 16, generator=generator)
    padded = torch.cat((seqs, torch.tensor([-1, -1]))).int()
    single = SingleRows(padded.to(device), torch.cat((positions, torch.zeros(2).long())).to(device))
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)]).int()
    groups = (GroupRows(torch.zeros(T).long().to(device), tables.to(device)),)
    rows = PagedRows(groups, cu_seqlens.to(device), lens.to(device), 33, single=single)
    cache = LayerCache(keys.to(device), values.to(device))
    out = torch.full((T, heads.num_heads, 16), NAN, device=device)
    attend_single_rows(queries.view(T, -1, 16).to(device), heads, cache, rows, out)
    given = queries.view(T, -1, 16)[:7], keys, values, tables, cu_seqlens, lens, heads.scale, window
    torch.testing.assert_close(out[:7].cpu(), ops.paged_attention.reference(*given), rtol=1e-5, atol=1e-5)
    assert out[7:].isnan().all()
