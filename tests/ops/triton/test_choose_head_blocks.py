"""The choice of blocks on a GPU against sorting, and against the reference over packed caches."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from octavo.ops.attention.cached_rows import INT4
from octavo_kernels.triton.attention import choose_head_blocks
from octavo_kernels.triton.attention.choose_head_blocks import choose_head_blocks_triton
from tests.ops import test_choose_keys
from tests.ops.test_choose_head_blocks import RULES, expected, listed, make
from tests.ops.test_choose_keys import SHAPES
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in


@one_in(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_choice(shape: str, name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_size, rule = RULES[name]
    step, q_TKI = make(shape, block_size, dtype)
    poison_new_tensors(monkeypatch)
    wanted, of = expected(step, q_TKI, rule), torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    there = step.to(device, of)
    monkeypatch.setattr(choose_head_blocks, "MAX_SCRATCH", 2**9)  # some rows at a time
    found = choose_head_blocks_triton(q_TKI.to(device, of), there.cache, there.rows, rule).cpu()
    assert listed(found)[: step.num_rows] == wanted
    assert (found[step.num_rows :] < 0).all(), "padding has blocks"


@pytest.mark.parametrize("dtype", [torch.int8, INT4])
def test_packed_keys(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_choose_keys, "WIDTH", 48)
    step, q_TKI = make("chunks and decodes", 4, dtype)
    q_TKI, (_, rule) = torch.randn_like(q_TKI), RULES["blocks smaller than the cache's"]
    wanted = ops.choose_head_blocks.reference(q_TKI, step.cache, step.rows, rule)
    there = step.to(device, torch.float32)
    found = choose_head_blocks_triton(q_TKI.to(device), there.cache, there.rows, rule).cpu()
    assert torch.equal(found[: step.num_rows], wanted[: step.num_rows])
