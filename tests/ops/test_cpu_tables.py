"""Embeddings and angles on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.attention.attention import RopeSet
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.weights.gguf.block_formats import dequantize
from tests.ops.cpu_cases import EVERY_KIND, needs_float_kernels, poison_new_tensors, random_blocks

LEVELS = [pytest.param("numba", marks=needs_float_kernels), "reference"]
IDS = torch.tensor([49, 0, 7, 7, 16, 15, 31, 48])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_rows_of_blocks_are_exactly_the_table(kind: str, level: str) -> None:
    blocks = random_blocks(kind, 50, 512)
    packed, table = PackedBlocks.pack(blocks), torch.from_numpy(dequantize(blocks))
    with dispatch.only(level):
        assert torch.equal(ops.block_embedding(IDS, packed), table[IDS])
        assert ops.block_embedding(IDS[:0], packed).shape == (0, 512)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_table(dtype: torch.dtype, level: str) -> None:
    table = torch.randn(50, 36).to(dtype)
    with dispatch.only(level):
        assert torch.equal(ops.embedding(IDS, table), table[IDS])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [-1, 50])
def test_numbers_that_are_not_in_the_table_are_refused(bad: int, level: str) -> None:
    packed = PackedBlocks.pack(random_blocks("Q8_0", 50, 32))
    with dispatch.only(level):
        tables: tuple[tuple[Any, Any], ...] = ((ops.block_embedding, packed), (ops.embedding, torch.randn(50, 3)))
        for lookup, table in tables:
            with pytest.raises(IndexError):
                lookup(torch.tensor([1, bad]), table)


@needs_float_kernels
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_angles_are_products_in_float32_with_exact_cosines(factor: float) -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131071])
    frequencies = torch.logspace(0, -5, 32)
    angles = (positions[:, None].float() * frequencies).double()
    cos, sin = ops.rotary_angles(positions, frequencies, factor)
    torch.testing.assert_close(cos.double(), angles.cos() * factor, rtol=2e-7, atol=1e-12)
    torch.testing.assert_close(sin.double(), angles.sin() * factor, rtol=2e-7, atol=1e-12)
    both, sets = torch.cat((frequencies, frequencies / 3)), torch.tensor([1, 0, 1, 1, 0])
    found = ops.rotary_angles(positions, both, 9.0, RopeSet(sets, torch.tensor([factor, 1.5])))
    for t, chosen in enumerate(sets.tolist()):
        of_row = [frequencies, frequencies / 3][chosen], [factor, 1.5][chosen]
        expected = ops.rotary_angles(positions[t : t + 1], *of_row)
        assert all(torch.equal(x[t], y[0]) for x, y in zip(found, expected, strict=True))
