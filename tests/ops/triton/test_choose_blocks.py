"""Blocks that an indexer chooses, in a kernel, are those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import ops
from octavo_kernels.triton.attention import choose_blocks as module
from octavo_kernels.triton.attention.choose_blocks import choose_blocks_triton
from octavo_kernels.triton.launch import empty_indices
from tests.ops.test_choose_blocks import COUNT, complete
from tests.ops.test_choose_keys import SHAPES, Step
from tests.ops.triton.poison import poison_new_tensors

MOST = 40
"""Scores that are held at once, so that rows are ranked a few at a time."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("block_size", "size", "dtype"),
    [(16, 4, torch.float32), (4, 6, torch.bfloat16), (4, 16, torch.float8_e4m3fn)],
)
def test_the_same_blocks_are_chosen(
    shape: str, block_size: int, size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(SHAPES[shape], block_size, dtype)
    given = step.q_TNW, step.cache, step.rows, size, COUNT
    expected, weighted = (ops.choose_blocks.reference(*given, weights) for weights in (None, step.weights_TN))
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr(module, "MOST_SCORES", MOST)
    monkeypatch.setattr(module, "MAX_SCRATCH", MOST * 25)
    sizes: list[int] = []

    def counted(size: int, *args: Any) -> torch.Tensor:
        sizes.append(size)
        return empty_indices(size, *args)

    monkeypatch.setattr(module, "empty_indices", counted)
    cache = step.cache._replace(index_keys=step.index.to(device))
    groups = tuple(type(group)(*(x.to(device) for x in group)) for group in step.rows.groups)
    rows = type(step.rows)(groups, step.rows.cu_seqlens_q.to(device), step.rows.seq_lens_S.to(device), 1)
    q_TNW = step.q_TNW.to(device, torch.float32 if dtype == torch.float32 else torch.bfloat16)
    found = choose_blocks_triton(q_TNW, cache, rows, size, COUNT)
    assert complete(step, found.cpu(), size) == complete(step, expected, size)
    found = choose_blocks_triton(q_TNW, cache, rows, size, COUNT, step.weights_TN.to(device))
    assert complete(step, found.cpu(), size) == complete(step, weighted, size)
    assert max(sizes) <= max(MOST, len(q_TNW) * COUNT)
