"""Attention over parts of contexts in Triton: merged, that over the whole of them; and blind to unused memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows, SingleRows
from octavo.ops.attention.partial_attention import merge_parts, partial_attention, partial_latent_attention
from octavo.ops.collective import ContextPart
from octavo_kernels.triton.attention import latent_attention
from octavo_kernels.triton.attention.attention import merge_parts_triton, partial_attention_triton
from octavo_kernels.triton.attention.latent_attention import partial_latent_attention_triton
from octavo_kernels.triton.launch import invariant
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}
DECODES = [1, 3, 64, 130, 0], [1, 1, 1, 1, 0]
RAGGED = [70, 2, 0, 40, 33, 3], [1, 2, 0, 20, 5, 1]
"""Contexts and rows: fewer positions than parts, single rows, prompts, the end of a chunk, a padded sequence."""
STEPS: list[tuple[list[int], list[int]]] = [DECODES, RAGGED]


class Step:
    """Random inputs of a step over contexts that ``size`` ranks divide; what no row sees is NaN."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        size: int,
        device: str,
        N: int = 6,
        H: int = 32,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        **more: Any,
    ) -> None:
        torch.manual_seed(len(seq_lens))
        is_decode = max(query_lens) == 1
        self.size, self.seq_lens, self.query_lens, self.device = size, seq_lens, query_lens, device
        self.heads = HeadLayout(N, 1, H, H**-0.5, **more)
        counts = [-(-length // (size * block_size)) for length in seq_lens]
        blocks = iter(torch.randperm(sum(counts) + 2).tolist())
        tables = torch.full((len(seq_lens), max(counts) + 1), 2**30, dtype=torch.int32)
        caches = [torch.full((sum(counts) + 2, 1, size * block_size, H), NAN) for _ in range(2)]
        slots: list[int] = []
        for s, (length, rows, count) in enumerate(zip(seq_lens, query_lens, counts, strict=True)):
            for b in range(count):
                tables[s, b] = next(blocks)
            for position in range(length):
                block, offset = int(tables[s, position // (size * block_size)]), position % (size * block_size)
                if position < length - rows:
                    for cache in caches:
                        cache[block, 0, offset] = torch.randn(H)
                else:
                    slots.append(block * size * block_size + offset)
            slots += [-1] if is_decode and not rows else []
        slots += [] if is_decode else [-1]
        self.is_row = torch.tensor(slots) >= 0
        self.qkv = torch.randn(len(slots), (N + 2) * H).to(device, dtype)
        angles = (torch.rand(len(slots), H // 2) * 6).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        keys, values = (cache.to(device, cache_dtype or dtype) for cache in caches)
        self.cache = LayerCache(keys, values)
        starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(seq_lens).int()
        group = GroupRows(torch.tensor(slots).to(device), tables.to(device))
        self.rows = PagedRows((group,), starts.to(device), lens.to(device), max(query_lens))

    def part(self, rank: int) -> tuple[ContextPart, LayerCache, PagedRows]:
        """What a rank has of it."""
        part = ContextPart(rank, self.size)
        keys, values = (cache[:, :, rank :: self.size].contiguous() for cache in self.cache[:2])
        return part, LayerCache(keys, values), self.rows.owned(part)

    def runs(self, run: Any) -> Tensor:
        """What the ranks find, [P, T, N, X], of rows that are not padding."""
        results = []
        for rank in range(self.size):
            part, cache, rows = self.part(rank)
            heads = self.heads._replace(sinks_N=None)
            results.append(run(self.qkv, heads, self.cos, self.sin, cache, rows, part)[self.is_row])
            for stored, whole in zip(cache[:2], self.cache[:2], strict=True):
                whole[:, :, rank :: self.size] = stored
        return torch.stack(results)

    def reference(self) -> Step:
        """In float64, on the host."""
        other = Step(self.seq_lens, self.query_lens, self.size, "cpu", *self.heads[:1], self.heads.head_dim)
        given: list[Any] = [x.double().cpu() if isinstance(x, Tensor) else x for x in self.heads]
        other.heads = HeadLayout(*given)
        other.qkv, other.cos, other.sin = (x.double().cpu() for x in (self.qkv, self.cos, self.sin))
        keys, values = (x.float().cpu().double() for x in self.cache[:2])
        other.cache = LayerCache(keys, values)
        groups = [GroupRows(*(x.cpu() for x in group)) for group in self.rows.groups]
        tables = groups[0].block_tables_SB
        tables[tables == 2**30] = 0
        starts, lens = self.rows.cu_seqlens_q.cpu(), self.rows.seq_lens_S.cpu()
        other.rows = PagedRows(tuple(groups), starts, lens, self.rows.max_query_len)
        return other


def check(step: Step, run: Any = partial_attention_triton) -> None:
    """Each part, and all of them merged."""
    other = step.reference()
    expected = other.runs(partial_attention.reference)
    found = step.runs(run)
    assert found.dtype == torch.float32
    tolerance = TOLERANCE[step.qkv.dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    merged = merge_parts_triton(found, step.heads.sinks_N, step.qkv.dtype)
    assert merged.dtype == step.qkv.dtype
    whole = merge_parts.reference(expected, other.heads.sinks_N, torch.float64)
    torch.testing.assert_close(merged.double().cpu(), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", quick_first(1, [3, 2, 4]))
@pytest.mark.parametrize("lens", STEPS)
def test_parts_are_those_of_the_reference(
    lens: tuple[list[int], list[int]], size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_tensors(monkeypatch)
    norms = [(1 + torch.rand(32)).to(device) for _ in range(2)]
    step = Step(*lens, size, device, q_norm_H=norms[0], k_norm_H=norms[1], norm_eps=1e-5)
    check(step)


@one_in(2)
@pytest.mark.parametrize("lens", STEPS)
def test_softcap_and_sinks(lens: tuple[list[int], list[int]], device: str) -> None:
    sinks_N = torch.linspace(-2, 4, 6, device=device)
    check(Step(*lens, 2, device, softcap=1.5, sinks_N=sinks_N))


@one_in(2)
@pytest.mark.parametrize("lens", STEPS)
@pytest.mark.parametrize(("N", "H"), quick_first(1, [(14, 80), (40, 64), (2, 256)]))
def test_numbers_and_sizes_of_heads(N: int, H: int, lens: tuple[list[int], list[int]], device: str) -> None:
    check(Step(*lens, 2, device, N=N, H=H, dtype=torch.bfloat16))


@one_in(2)
@pytest.mark.parametrize("lens", STEPS)
def test_an_8_bit_cache(lens: tuple[list[int], list[int]], device: str) -> None:
    step = Step(*lens, 2, device, cache_dtype=torch.float8_e4m3fn)
    run = step.runs(partial_attention_triton)
    own = step.reference()
    own.heads = own.heads._replace(shares_cache=True)  # keys and values as they were stored
    own.qkv = own.qkv[:, : own.heads.num_heads * own.heads.head_dim]
    expected = own.runs(partial_attention.reference)
    torch.testing.assert_close(run.double().cpu(), expected, rtol=3e-6, atol=3e-6)


def test_drafts_are_computed_row_by_row(device: str) -> None:
    step = Step([3, 70, 2, 40], [3, 1, 2, 3], 3, device)
    seqs, positions = [0, 0, 0, 1, 2, 2, 3, 3, 3, -1], [0, 1, 2, 69, 0, 1, 37, 38, 39, 0]
    single = SingleRows(torch.tensor(seqs).int().to(device), torch.tensor(positions).to(device))
    step.rows = replace(step.rows, single=single)
    check(step)


def test_rows_are_the_same_in_any_step_where_asked_for(device: str) -> None:
    step = Step([40, 1, 33], [40, 1, 5], 2, device)
    last = Step([40, 1, 33], [1, 1, 1], 2, device)
    with invariant():
        whole = step.runs(partial_attention_triton)
        ends = [39, 40, 45]
        last.qkv, last.cos, last.sin = (x[ends] for x in (step.qkv, step.cos, step.sin))
        last.cache = step.cache
        slots, tables = step.rows.groups[0]
        last.rows = replace(last.rows, groups=(GroupRows(slots[ends], tables),))
        assert torch.equal(last.runs(partial_attention_triton), whole[:, ends])


# ---- latent attention


def latent_runs(step: Step, latent_size: int, run: Any) -> Tensor:
    """What the ranks find for queries that are mapped already, over what the cache holds."""
    q_TNH = step.qkv[:, : step.heads.sizes[0]].view(len(step.qkv), step.heads.num_heads, -1)
    results = []
    for rank in range(step.size):
        part, cache, rows = step.part(rank)
        latents = LayerCache(cache.keys, cache.keys)
        results.append(run(q_TNH, latent_size, step.heads.scale, latents, rows, part)[step.is_row])
    return torch.stack(results)


@one_in(2)
@pytest.mark.parametrize("lens", STEPS)
@pytest.mark.parametrize(
    ("N", "dtype", "size"),
    quick_first(1, [(6, torch.float32, 3), (40, torch.bfloat16, 2), (16, torch.float32, 4), (5, torch.bfloat16, 3)]),
)
def test_parts_of_latents_are_those_of_the_reference(
    lens: tuple[list[int], list[int]],
    N: int,
    dtype: torch.dtype,
    size: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(*lens, size, device, N=N, H=48, dtype=dtype)
    step.runs(partial_attention_triton)  # stores the step's keys
    other = step.reference()
    poison_new_tensors(monkeypatch)
    found = latent_runs(step, 32, partial_latent_attention_triton)
    monkeypatch.undo()
    expected = latent_runs(other, 32, partial_latent_attention.reference)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    merged = merge_parts_triton(found, None, dtype)
    whole = merge_parts.reference(expected, None, torch.float64)
    torch.testing.assert_close(merged.double().cpu(), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", quick_first(1, [3, 1, 16]))
def test_any_number_of_programs_gives_the_same_latents(
    splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step([1, 70, 300, 0], [1, 1, 1, 0], 2, device, N=6, H=48)
    step.runs(partial_attention_triton)
    expected = latent_runs(step.reference(), 32, partial_latent_attention.reference)
    monkeypatch.setattr(latent_attention, "PROGRAMS", 4 * splits)
    found = latent_runs(step, 32, partial_latent_attention_triton)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=3e-6, atol=3e-6)
