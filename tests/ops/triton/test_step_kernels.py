"""The small kernels at the ends of a step do what their references do, and nothing else."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from octavo.ops.triton.publish_tokens import publish_tokens_triton
from octavo.ops.triton.pull_step import pull_step_triton
from octavo.ops.triton.rotary_angles import rotary_angles_triton
from octavo.ops.triton.stage_step import stage_step_triton


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("width", [1, 3, 300])
def test_stage_step(device: str, width: int, first: int) -> None:
    counts = [1, 4, 1, 0, 2, 0]
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = torch.randint(0, 1000, (10,))
    tokens[[0, 5, 7]] = -1
    cells = torch.tensor([3, 0, 2, 7, 1, 7])
    last_tokens = torch.tensor([10, 11, -2, 13, 14, 15, 16, 17], dtype=torch.int32)
    packed = torch.randint(0, 100, ((first + 6) * width + 5,), dtype=torch.int32)
    results = []
    for where, run in (("cpu", ops.stage_step.reference), (device, stage_step_triton)):
        ids, tables = tokens.clone().to(where), torch.full((8, 310), -7, dtype=torch.int32, device=where)
        steps = torch.tensor([width], dtype=torch.int32)
        run(ids, *(x.to(where) for x in (cu_seqlens, cells, last_tokens, packed, steps)), tables, first)
        results.append((ids.cpu(), tables.cpu()))
    (ids, tables), (found_ids, found_tables) = results
    assert ids[[0, 5, 7]].tolist() == [13, 0, 11]
    assert torch.equal(found_ids, ids)
    assert torch.equal(found_tables, tables)
    assert torch.equal(tables[:6, :width], packed[first * width : (first + 6) * width].view(6, width))
    assert (tables[6:] == -7).all()
    assert (tables[:, width:] == -7).all()


@pytest.mark.parametrize("num_pairs", [1, 24, 64])
def test_rotary_angles(device: str, num_pairs: int) -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131071])
    frequencies = 1.0 / 500000.0 ** (torch.arange(num_pairs) / num_pairs)
    cos, sin = rotary_angles_triton(positions.to(device), frequencies.to(device), 1.25)
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.cpu().double(), angles.cos() * 1.25, rtol=0, atol=2e-6)
    torch.testing.assert_close(sin.cpu().double(), angles.sin() * 1.25, rtol=0, atol=2e-6)


@pytest.mark.parametrize("count", [1, 5, 130])
def test_publish_tokens(device: str, count: int) -> None:
    tokens = torch.randint(0, 1000, (count,), dtype=torch.int32, device=device)
    cells = torch.randperm(count + 3)[:count].to(device)
    last_tokens = torch.full((count + 3,), -7, dtype=torch.int32, device=device)
    results = torch.full((4, 140), -7, dtype=torch.int32, pin_memory=device == "cuda")
    counter = torch.tensor([6], dtype=torch.int32, device=device)
    publish_tokens_triton(tokens, cells, last_tokens, results, counter)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(last_tokens[cells], tokens)
    assert (last_tokens == -7).sum() == 3
    assert torch.equal(results[2, :count], tokens.cpu())
    assert (results == -7).sum() == results.numel() - count
    assert counter.item() == 7


@pytest.mark.parametrize("num_words", [1, 300, 9000])
def test_pull_step(device: str, num_words: int) -> None:
    uploads = torch.randint(0, 256, (4, 8 * 9000), dtype=torch.uint8)
    uploads = uploads.pin_memory() if device == "cuda" else uploads
    uploads[1, :8].view(torch.int64)[0] = num_words
    inputs = torch.full((8 * 9000,), 7, dtype=torch.uint8, device=device)
    pull_step_triton(inputs, uploads, torch.tensor([5], dtype=torch.int32, device=device))
    assert torch.equal(inputs[: 8 * num_words].cpu(), uploads[1, : 8 * num_words])
    assert (inputs[8 * num_words :] == 7).all()
