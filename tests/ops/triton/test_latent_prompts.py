"""Keys and values that prompts expand from latents: against float64, and which sequences are expanded at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.attention import LayerCache
from octavo.ops.attention.latent_attention import EXPANDED_WIDTHS, LatentHeads
from octavo_kernels.triton.attention import latent_attention as module
from octavo_kernels.triton.attention.latent_prompts import Expanded, expand
from tests.ops.triton.poison import poison_new_tensors
from tests.ops.triton.test_latent_attention import TOLERANCE, Step
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

P, Q, V = EXPANDED_WIDTHS
N, L, PAGE, TILE = 2, 64, 64, 128
QUERY_LENS, SEQ_LENS = [130, 5, 128, 1, 200, 0], [300, 40, 128, 90, 260, 0]
TILES = [3, 0, 1, 0, 3, 0]
"""Tiles of keys of the sequences with at least 128 rows."""


def step_of(device: str, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None) -> Step:
    torch.manual_seed(7)
    return Step(QUERY_LENS, SEQ_LENS, device, N, Q // 2, L, P, V, dtype, cache_dtype)


def room_of(num_tiles: int, step: Step) -> Expanded:
    shapes = (N, num_tiles * TILE, P), (num_tiles * TILE, Q), (N, num_tiles * TILE, V)
    return Expanded(*(torch.full(shape, torch.nan, dtype=step.q.dtype, device=step.q.device) for shape in shapes))


def latents_of(step: Step, s: int) -> Tensor:
    """What the cache holds of a sequence, [positions, Q + L] in float64."""
    blocks = step.rows.groups[0].block_tables_SB[s][: -(-step.seq_lens[s] // step.cache.shape[2])].long()
    return step.cache.float().double()[blocks, 0].flatten(0, 1)[: step.seq_lens[s]]


def sequence_of(expanded: Tensor, pages_B: Tensor, length: int) -> Tensor:
    """A sequence's positions [..., length, width], by its pages; asserts that there are zeros behind them."""
    whole = expanded.unflatten(-2, (-1, PAGE))[..., pages_B[: -(-length // TILE) * TILE // PAGE].long(), :, :]
    whole = whole.flatten(-3, -2).double()
    assert not whole[..., length:, :].any()
    return whole[..., :length, :]


@one_in(2)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("num_tiles", "expected"), quick_first(2, [(7, TILES), (2, [0] * 6), (9, TILES), (6, [3, 0, 1, 0, 0, 0])])
)
def test_sequences_of_many_rows_are_expanded_as_far_as_there_is_room(
    num_tiles: int, expected: list[int], cache_dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(device, cache_dtype=cache_dtype)
    step.run()
    room = room_of(num_tiles, step)
    poison_new_tensors(monkeypatch)
    pages_SB, ends_S = expand(step.heads, LayerCache(step.cache, step.cache), step.rows, room, PAGE)
    starts = step.rows.cu_seqlens_q
    for s, tiles in enumerate(expected):
        assert ends_S[s] == starts[s + (tiles > 0)]
        if not tiles:
            continue
        latents, length = latents_of(step, s), step.seq_lens[s]
        wanted = (
            torch.einsum("cl,nlp->ncp", latents[:, Q:], step.heads.key_map_NLP.double()),
            latents[:, :Q],
            torch.einsum("cl,nvl->ncv", latents[:, Q:], step.heads.value_map_NVL.double()),
        )
        for found, right in zip(room, wanted, strict=True):
            torch.testing.assert_close(sequence_of(found, pages_SB[s], length), right, rtol=2**-7, atol=2**-6)
    assert room.rotated_CQ[sum(expected) * TILE :].isnan().all()


@one_in(2)
@pytest.mark.parametrize("num_tiles", quick_first(2, [4, 1, 7]))
def test_every_row_is_attended_once(num_tiles: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By heads of their own as far as there is room, on latents else: with attention in torch for the former."""
    step = step_of(device, torch.float32)
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr(module, "room_for", lambda *_: room_of(num_tiles, step))

    def attend(
        q_TNX: Tensor, q_TNQ: Tensor, heads: LatentHeads, cache: LayerCache, rows: object, room: Expanded, out: Tensor
    ) -> None:
        pages_SB, ends_S = expand(heads, cache, step.rows, room, PAGE)
        for s, length in enumerate(step.seq_lens):
            rows_of = slice(int(step.rows.cu_seqlens_q[s]), int(ends_S[s]))
            if rows_of.start == rows_of.stop:
                continue
            keys, rotated, values = (sequence_of(part, pages_SB[s], length).float() for part in room)
            scores = torch.einsum("tnp,ncp->ntc", q_TNX[rows_of, :, :P], keys)
            scores = (scores + torch.einsum("tnq,cq->ntc", q_TNQ[rows_of], rotated)) * heads.scale
            count = rows_of.stop - rows_of.start
            seen = torch.ones(count, length, dtype=torch.bool, device=scores.device).tril(length - count)
            out[rows_of] = torch.einsum("ntc,ncv->tnv", scores.masked_fill(~seen, -torch.inf).softmax(2), values)

    monkeypatch.setattr(module, "attend_prompts", attend)
    error = ((step.run().double() - step.expected()).abs() / step.expected().abs().clamp(min=1)).max()
    assert error < TOLERANCE[torch.float32] * 4, error
