"""What grows with a context or with rows is on the first axis of a grid, which alone has room for it, or is limited."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.attention.choose_head_blocks import HeadBlocks
from octavo.ops.collective import ContextPart
from octavo_kernels.triton.attention import choose_head_blocks, latent_outputs, prefill_attention
from octavo_kernels.triton.launch import MOST_BESIDE

MANY = MOST_BESIDE + 1


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Those of kernels that are launched: none runs."""
    found: list[tuple[int, ...]] = []
    for module in (choose_head_blocks, latent_outputs, prefill_attention):
        monkeypatch.setattr(module, "launch", lambda kernel, grid, *args, **options: found.append(grid))
    return found


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_blocks_of_a_long_context(grids: list[tuple[int, ...]]) -> None:
    keys = torch.zeros(1, 1, 16, 16)
    rows = PagedRows((GroupRows(torch.zeros(1, dtype=torch.int64), int32(1, MANY)),), int32(2), int32(1) + 1, 1)
    cache, rule = LayerCache(keys, keys, index_keys=keys), HeadBlocks(size=16, most=4, local=1)
    choose_head_blocks.choose_head_blocks_triton(torch.zeros(1, 1, 16), cache, rows, rule)
    assert grids == [(MANY,)]


def test_sums_of_many_rows(grids: list[tuple[int, ...]]) -> None:
    sums, logs = torch.zeros(1).expand(MANY, 1, 2, 16, 16), torch.zeros(1).expand(MANY, 1, 2, 16)
    rows = PagedRows((), int32(MANY + 1), int32(MANY), 1)
    out = torch.zeros(1).expand(MANY, 16, 17)
    latent_outputs.latent_sums(latent_outputs.Parts(sums, logs, 16), rows, ContextPart(0, 2), out)
    assert grids[0][0] == MANY


def test_tiles_of_many_rows(grids: list[tuple[int, ...]]) -> None:
    """A program goes on with further tiles where there are more than programs."""
    q_TNH, keys = torch.zeros(1, 128, 16).expand(2 * MANY, 128, 16), torch.zeros(1, 1, 16, 16)
    prefill_attention.prefill_attention(q_TNH, keys, keys, int32(1, 1), int32(2), int32(1), 1.0, out=q_TNH)
    assert grids == [(1, MOST_BESIDE)]
