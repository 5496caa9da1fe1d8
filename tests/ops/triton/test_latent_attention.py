"""Latent attention: against float64 over ragged contexts, blind to unused memory, storing one key a row."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import latent_attention as dispatched
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.attention.latent_attention import LatentHeads
from octavo_kernels.triton.attention import latent_attention
from octavo_kernels.triton.attention.latent_attention import attend_single_rows, latent_attention_triton
from octavo_kernels.triton.attention.latent_outputs import latent_outputs
from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.linear.head_linear import head_linear_triton
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

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
        P: int = 24,
        V: int = 20,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        window: int = 0,
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
                    if not window or position > seq_len - q_len - window:
                        cache[block, 0, offset] = torch.randn(H)
                else:
                    slots.append(block * block_size + offset)
        pads = 0 if max(query_lens) == 1 else 2  # where every sequence has one row, empty ones are padding
        self.slots = slots
        if not pads:
            slots = [slots.pop(0) if q_len else -1 for q_len in query_lens]
            self.slots = [slot for slot in slots if slot >= 0]
            T = S
        self.q = torch.randn(T + pads, N * (P + 2 * R)).to(device, dtype)
        self.kv = torch.randn(T + pads, L + 2 * R).to(device, dtype)
        maps, norm = (torch.randn(N, L, P) * P**-0.5, torch.randn(N, V, L) * L**-0.5), torch.randn(L)
        heads = LatentHeads(*(part.to(device, dtype) for part in (*maps, norm)), 1e-5, float(H**-0.5))
        self.heads = heads._replace(window=window)
        self.angles = (torch.rand(T + pads, R) * 6).to(device)
        self.cache = cache.to(device, cache_dtype or dtype)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        where = torch.tensor([*slots, *[-1] * pads])
        where, tables, starts, lens = (x.to(device) for x in (where, tables, starts, torch.tensor(seq_lens).int()))
        self.rows = PagedRows((GroupRows(where, tables),), starts, lens, max(query_lens))

    def run(self, run: Any = latent_attention_triton) -> Tensor:
        """The result [rows, N, V] of the rows that are not padding, checked for what was stored."""
        before = self.cache.clone()
        cache = LayerCache(self.cache, self.cache)
        out = run(self.q, self.kv, self.heads, self.angles.cos(), self.angles.sin(), cache, self.rows)
        is_row = self.rows.groups[0].slot_mapping_T >= 0
        by_slot, old = (part.float().transpose(1, 2).flatten(0, 1) for part in (self.cache, before))
        turned = self.inputs()[1][is_row]
        stored = by_slot[self.slots][:, 0].double()
        assert ((stored - turned).abs() <= turned.abs() * ROUNDING[self.cache.dtype] + 2**-9).all()
        others = torch.ones(len(by_slot), dtype=torch.bool).index_fill_(0, torch.tensor(self.slots), False)
        assert torch.equal(by_slot[others].view(torch.int32), old[others].view(torch.int32))
        found: Tensor = out[is_row]
        return found

    def inputs(self) -> tuple[Tensor, Tensor]:
        """What attention takes: the queries [T, N, H] and the key [T, H], in float64."""
        R, turn = self.R, torch.complex(self.angles.double().cos(), self.angles.double().sin())[:, None]

        def turned(x_TNR: Tensor) -> Tensor:
            pairs = torch.complex(x_TNR[..., :R].contiguous(), x_TNR[..., R:].contiguous()) * turn
            return torch.cat((pairs.real, pairs.imag), -1)

        q_TNQ, latent_TL, k_rotated = (
            self.q.double().unflatten(1, (self.N, -1)),
            *self.kv.double().tensor_split([self.L], 1),
        )
        mapped_TNL = torch.einsum("tnp,nlp->tnl", q_TNQ[..., : -2 * R], self.heads.key_map_NLP.double())
        rms_T1 = (latent_TL.square().mean(1, keepdim=True) + self.heads.norm_eps).sqrt()
        normed_TL = latent_TL / rms_T1 * self.heads.norm_L.double()
        queries = torch.cat((turned(q_TNQ[..., -2 * R :]), mapped_TNL), -1)
        return queries, torch.cat((turned(k_rotated[:, None])[:, 0], normed_TL), -1)

    def expected(self) -> Tensor:
        """float64 [rows, N, V], with keys as the cache holds them; after ``run``."""
        return torch.einsum("tnl,nvl->tnv", self.expected_latents(), self.heads.value_map_NVL.double())

    def expected_latents(self) -> Tensor:
        """float64 [rows, N, L], with keys as the cache holds them; after ``run``."""
        q_TNH, rows = self.inputs()[0][self.rows.groups[0].slot_mapping_T >= 0].to(self.q.dtype).double(), []
        at = 0
        for s, (q_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            blocks = self.rows.groups[0].block_tables_SB[s][: -(-seq_len // self.cache.shape[2])].long()
            keys = self.cache.float().double()[blocks, 0].flatten(0, 1)
            for i in range(q_len):
                end, window = seq_len - q_len + i + 1, self.heads.window
                seen, sinks_N = keys[max(0, end - window) if window else 0 : end], self.heads.sinks_N
                scores = q_TNH[at + i] @ seen.T * self.heads.scale
                if sinks_N is not None:
                    scores = torch.cat((scores, sinks_N.double()[:, None]), 1)
                rows.append(scores.softmax(1)[:, : len(seen)] @ seen[:, 2 * self.R :])
            at += q_len
        return torch.stack(rows)


def check(step: Step) -> None:
    found, wanted = step.run().double(), step.expected()
    error = ((found - wanted).abs() / wanted.abs().clamp(min=1)).max()
    assert error < TOLERANCE[step.q.dtype], f"largest error {error}"


@one_in(3)
@pytest.mark.parametrize(("dtype", "block_size"), KINDS)
def test_single_rows(dtype: torch.dtype, block_size: int, device: str) -> None:
    lens = [min(length, 1) for length in EDGES]
    check(Step(lens, EDGES, device, dtype=dtype, block_size=block_size))


@one_in(3)
@pytest.mark.parametrize(("dtype", "block_size"), KINDS)
def test_prompts_and_chunks(dtype: torch.dtype, block_size: int, device: str) -> None:
    check(Step(*RAGGED, device, dtype=dtype, block_size=block_size))


@one_in(5)
@pytest.mark.parametrize("N", [1, 5, 40])
@pytest.mark.parametrize("is_single", [True, False])
def test_numbers_of_heads(N: int, is_single: bool, device: str) -> None:
    """Fewer than a tile's rows, as many, and more."""
    lens = ([1, 1], [70, 9]) if is_single else ([7, 1], [70, 9])
    check(Step(*lens, device, N=N, dtype=torch.bfloat16))


@one_in(3)
@pytest.mark.parametrize(("R", "L"), [(4, 24), (32, 512)])
@pytest.mark.parametrize("is_single", [True, False])
def test_sizes_of_heads(R: int, L: int, is_single: bool, device: str) -> None:
    lens = ([1, 1], [40, 3]) if is_single else ([3, 1], [40, 3])
    check(Step(*lens, device, R=R, L=L, dtype=torch.bfloat16))


@one_in(2)
@pytest.mark.parametrize("window", [1, 16, 21])
@pytest.mark.parametrize("lens", [([1, 1, 1, 0, 1], [130, 16, 22, 0, 21]), RAGGED])
def test_windows(window: int, lens: tuple[list[int], list[int]], device: str) -> None:
    """What is before a window may be no number; sinks count once, wherever a window begins."""
    check(Step(*lens, device, window=window))
    step = Step(*lens, device, window=window, N=3)
    step.heads = step.heads._replace(sinks_N=torch.randn(3, device=device))
    check(step)


@pytest.mark.parametrize("is_single", [True, False])
def test_float8_cache(is_single: bool, device: str) -> None:
    lens = ([1, 1, 0], [70, 17, 0]) if is_single else RAGGED
    check(Step(*lens, device, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn))


@one_in(3)
@pytest.mark.parametrize("splits", [1, 2, 3, 100])
@pytest.mark.parametrize("num_seqs", quick_first(2, [1, 3, 20]))
def test_any_number_of_splits_gives_the_same(
    splits: int, num_seqs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step([1] * num_seqs, [100, 16, 1, *range(2, 150, 7)][:num_seqs], device)
    step.run()
    q, cache = step.inputs()[0].float().contiguous(), LayerCache(step.cache, step.cache)
    poison_new_tensors(monkeypatch)
    out_TNL = torch.full((num_seqs, step.N, step.L), NAN, device=device)
    parts = attend_single_rows(q, 2 * step.R, cache, step.rows, step.heads.scale, out_TNL, splits)
    assert (parts is None) == (splits == 1)
    out_TNV = torch.full((num_seqs, step.N, 20), NAN, device=device)
    if parts is None:
        out_TNV = head_linear_triton(out_TNL, step.heads.value_map_NVL)
    else:
        latent_outputs(parts, step.heads.value_map_NVL, step.rows, out_TNV)
    torch.testing.assert_close(out_TNV.double(), step.expected(), rtol=3e-6, atol=3e-6)


@one_in(2)
@pytest.mark.parametrize("is_long", [False, True])
def test_a_program_takes_a_tile_of_keys_at_least(is_long: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "shared_bytes", lambda device: 227 * 1024)
    step = Step([1] * 4, [64, 512, 900, 3000], device, N=2, R=32, L=512, dtype=torch.bfloat16)
    step.rows = replace(step.rows, has_long_context=is_long)
    made, empty = list[Tensor](), torch.empty

    def kept(*args: Any, **options: Any) -> Tensor:
        made.append(empty(*args, **options).fill_(NAN))
        return made[-1]

    monkeypatch.setattr(torch, "empty", kept)
    check(step)
    (sums,) = (tensor for tensor in made if tensor.dim() == 5)
    assert (~sums[:, 0, :, 0, 0].isnan()).sum(1).tolist() == [1, 8, 15, 24 if is_long else 16], "33 programs at most"


def test_rows_are_the_same_in_any_step_where_asked_for(device: str) -> None:
    whole = Step([40], [40], device)
    with invariant():
        expected = whole.run()
        last = Step([1], [40], device)
        slots, tables = whole.rows.groups[0]
        group = GroupRows(slots[39:40], tables)
        last.cache, last.rows = whole.cache, PagedRows((group,), last.rows.cu_seqlens_q, last.rows.seq_lens_S, 1)
        last.q, last.kv, last.heads = whole.q[39:40], whole.kv[39:40], whole.heads
        last.angles, last.slots = whole.angles[39:40], whole.slots[39:]
        assert torch.equal(last.run(), expected[39:])


@pytest.mark.parametrize("lens", [([1, 1], [40, 3]), RAGGED])
def test_the_reference_and_the_kernel_for_cpus_do_the_same(lens: tuple[list[int], list[int]]) -> None:
    for run, window in itertools.product((dispatched.reference, dispatched), (0, 7)):
        step = Step(*lens, "cpu", window=window)
        tables = step.rows.groups[0].block_tables_SB
        tables[tables == 2**30] = 0  # they look behind a table's end
        torch.testing.assert_close(step.run(run).double(), step.expected(), rtol=3e-6, atol=3e-6)
