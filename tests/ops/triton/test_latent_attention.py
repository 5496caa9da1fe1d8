"""Latent attention: against float64 over ragged contexts, blind to unused memory, storing one key a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import latent_attention as dispatched
from octavo.ops.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.latent_attention import join_heads
from octavo.ops.triton import latent_attention as module
from octavo.ops.triton.latent_attention import attend_single_rows, latent_attention_triton
from octavo.ops.triton.launch import invariant

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ROUNDING = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
EDGES = [1, 0, 16, 17, 64, 130]
KINDS = [(torch.float32, 64), (torch.float16, 16), (torch.bfloat16, 64), (torch.bfloat16, 16)]
RAGGED = ([5, 1, 0, 40, 1, 3], [5, 1, 0, 40, 33, 70])
"""Rows and contexts: a prompt, single rows, a padded sequence, a longer prompt, the end of a chunk."""


class Step:
    """Random inputs of a step; free slots and blocks hold NaN, and there are two padded rows."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        device: str,
        N: int = 4,
        R: int = 8,
        L: int = 32,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
    ) -> None:
        self.N, self.R, self.L, H = N, R, L, 2 * R + L
        self.query_lens, self.seq_lens = query_lens, seq_lens
        T, S = sum(query_lens), len(seq_lens)
        counts = [-(-length // block_size) for length in seq_lens]
        blocks = iter(torch.randperm(sum(counts) + 2).int().split(1))
        tables = torch.full((S, max(counts) + 2), 2**30, dtype=torch.int32)
        cache = torch.full((sum(counts) + 2, 1, block_size, H), NAN)
        slots = []
        for s, (q_len, seq_len, count) in enumerate(zip(query_lens, seq_lens, counts, strict=True)):
            tables[s, :count] = torch.cat([next(blocks) for _ in range(count)]) if count else 0
            for position in range(seq_len):
                block, offset = int(tables[s, position // block_size]), position % block_size
                if position < seq_len - q_len:
                    cache[block, 0, offset] = torch.randn(H)
                else:
                    slots.append(block * block_size + offset)
        pads = 0 if max(query_lens) == 1 else 2  # where every sequence has one row, empty ones are padding
        self.slots = slots
        if not pads:
            slots = [slots.pop(0) if q_len else -1 for q_len in query_lens]
            self.slots = [slot for slot in slots if slot >= 0]
            T = S
        self.qk = torch.randn(T + pads, (N + 1) * H).to(device, dtype)
        self.angles = (torch.rand(T + pads, R) * 6).to(device)
        self.cache = cache.to(device, cache_dtype or dtype)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        where = torch.tensor([*slots, *[-1] * pads])
        where, tables, starts, lens = (x.to(device) for x in (where, tables, starts, torch.tensor(seq_lens).int()))
        self.rows = PagedRows((GroupRows(where, tables),), starts, lens, max(query_lens))

    @property
    def scale(self) -> float:
        return float((2 * self.R + self.L) ** -0.5)

    def run(self, run: Any = latent_attention_triton) -> Tensor:
        """The result [rows, N, L] of the rows that are not padding, checked for what was stored."""
        before = self.cache.clone()
        cache = LayerCache(self.cache, self.cache)
        out = run(self.qk, self.N, self.angles.cos(), self.angles.sin(), cache, self.rows, self.scale)
        is_row = self.rows.groups[0].slot_mapping_T >= 0
        by_slot, old = (part.float().transpose(1, 2).flatten(0, 1) for part in (self.cache, before))
        turned = self.turned()[is_row, self.N]
        stored = by_slot[self.slots][:, 0].double()
        assert ((stored - turned).abs() <= turned.abs() * ROUNDING[self.cache.dtype] + 2**-9).all()
        others = torch.ones(len(by_slot), dtype=torch.bool).index_fill_(0, torch.tensor(self.slots), False)
        assert torch.equal(by_slot[others].view(torch.int32), old[others].view(torch.int32))
        found: Tensor = out[is_row]
        return found

    def turned(self) -> Tensor:
        """Queries and the key after the rotation, float64 [T, N + 1, H]."""
        qk = self.qk.double().view(len(self.qk), self.N + 1, -1)
        R, turn = self.R, torch.complex(self.angles.double().cos(), self.angles.double().sin())[:, None]
        turned = torch.complex(qk[..., :R].contiguous(), qk[..., R : 2 * R].contiguous()) * turn
        return torch.cat((turned.real, turned.imag, qk[..., 2 * R :]), -1)

    def expected(self) -> Tensor:
        """float64 [rows, N, L], with keys as the cache holds them; after ``run``."""
        q_TNH, rows = self.turned()[self.rows.groups[0].slot_mapping_T >= 0, : self.N].to(self.qk.dtype).double(), []
        at = 0
        for s, (q_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            blocks = self.rows.groups[0].block_tables_SB[s][: -(-seq_len // self.cache.shape[2])].long()
            keys = self.cache.float().double()[blocks, 0].flatten(0, 1)
            for i in range(q_len):
                seen = keys[: seq_len - q_len + i + 1]
                rows.append((q_TNH[at + i] @ seen.T * self.scale).softmax(1) @ seen[:, 2 * self.R :])
            at += q_len
        return torch.stack(rows)


def check(step: Step) -> None:
    found, wanted = step.run().double(), step.expected()
    error = ((found - wanted).abs() / wanted.abs().clamp(min=1)).max()
    assert error < TOLERANCE[step.qk.dtype], f"largest error {error}"


@pytest.mark.parametrize(("dtype", "block_size"), KINDS)
def test_single_rows(dtype: torch.dtype, block_size: int, device: str) -> None:
    lens = [min(length, 1) for length in EDGES]
    check(Step(lens, EDGES, device, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize(("dtype", "block_size"), KINDS)
def test_prompts_and_chunks(dtype: torch.dtype, block_size: int, device: str) -> None:
    check(Step(*RAGGED, device, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("N", [1, 5, 40])
@pytest.mark.parametrize("is_single", [True, False])
def test_numbers_of_heads(N: int, is_single: bool, device: str) -> None:
    """Fewer than a tile's rows, as many, and more."""
    lens = ([1, 1], [70, 9]) if is_single else ([7, 1], [70, 9])
    check(Step(*lens, device, N=N, dtype=torch.bfloat16))


@pytest.mark.parametrize(("R", "L"), [(4, 24), (32, 512)])
@pytest.mark.parametrize("is_single", [True, False])
def test_sizes_of_heads(R: int, L: int, is_single: bool, device: str) -> None:
    lens = ([1, 1], [40, 3]) if is_single else ([3, 1], [40, 3])
    check(Step(*lens, device, R=R, L=L, dtype=torch.bfloat16))


@pytest.mark.parametrize("is_single", [True, False])
def test_float8_cache(is_single: bool, device: str) -> None:
    lens = ([1, 1, 0], [70, 17, 0]) if is_single else RAGGED
    check(Step(*lens, device, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("splits", [1, 3])
def test_any_number_of_splits_gives_the_same(splits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are left at zero: the second step is as right as the first."""
    monkeypatch.setattr(module, "MIN_KEYS", 16)
    step = Step([1] * 3, [100, 16, 1], device)
    step.run()
    q = step.turned()[:, : step.N].float().contiguous()
    for _ in range(2):
        out = torch.full((3, step.N, step.L), NAN, device=device)
        attend_single_rows(q, 2 * step.R, LayerCache(step.cache, step.cache), step.rows, step.scale, out, splits)
        torch.testing.assert_close(out.double(), step.expected(), rtol=3e-6, atol=3e-6)


def test_rows_are_the_same_in_any_step_where_asked_for(device: str) -> None:
    whole = Step([40], [40], device)
    with invariant():
        expected = whole.run()
        last = Step([1], [40], device)
        slots, tables = whole.rows.groups[0]
        group = GroupRows(slots[39:40], tables)
        last.cache, last.rows = whole.cache, PagedRows((group,), last.rows.cu_seqlens_q, last.rows.seq_lens_S, 1)
        last.qk, last.angles, last.slots = whole.qk[39:40], whole.angles[39:40], whole.slots[39:]
        assert torch.equal(last.run(), expected[39:])


def test_the_reference_does_the_same() -> None:
    for lens in (([1, 1], [40, 3]), RAGGED):
        step = Step(*lens, "cpu")
        tables = step.rows.groups[0].block_tables_SB
        tables[tables == 2**30] = 0  # it looks behind a table's end
        found, wanted = step.run(dispatched.reference).double(), step.expected()
        torch.testing.assert_close(found, wanted, rtol=3e-6, atol=3e-6)


def test_joined_heads_are_rotated_parts_then_latents() -> None:
    parts = [torch.randn(3, 2, 4), torch.randn(3, 2, 6), torch.randn(3, 4), torch.randn(3, 6)]
    joined = join_heads(*parts).view(3, 3, 10)
    assert torch.equal(joined[:, :2], torch.cat(parts[:2], -1))
    assert torch.equal(joined[:, 2], torch.cat(parts[2:], -1))
