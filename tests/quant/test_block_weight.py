"""Weights that stay in blocks: which device takes them, and what applying one gives."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import dispatch
from octavo.ops.linear.block_linear import PackedBlocks, block_linear
from octavo.quant.stored.block_weight import GgufStored, without_kernel
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.gguf.block_formats import dequantize
from tests.ops.cpu_cases import EVERY_KIND, needs_float_kernels, random_blocks
from tests.tiers import one_in

PACKING = WeightFormat(torch.float32, torch.device("cpu"), packs=True)


@needs_float_kernels
def test_this_machine_takes_blocks() -> None:
    assert without_kernel("cpu") is None


def test_without_a_kernel_blocks_are_made_dense_with_the_reason() -> None:
    assert without_kernel("cuda") == "block_linear has no kernel for cuda"
    stored = GgufStored((random_blocks("Q8_0", 3, 64),))
    assert stored.pack(WeightFormat(torch.float32, torch.device("cuda"), packs=True)) is None
    with dispatch.only("reference"):
        assert without_kernel("cpu") == "numba: only reference is allowed now"
        assert stored.pack(PACKING) is None


@needs_float_kernels
@one_in(4)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_applying_a_weight_is_its_matrix_product(kind: str) -> None:
    blocks, x = random_blocks(kind, 24, 256), torch.randn(3, 256)
    weight = GgufStored((blocks,)).pack(PACKING)
    assert weight is not None
    exact = x.double() @ torch.from_numpy(dequantize(blocks)).double().T
    found, packed = weight.apply(x), PackedBlocks.pack(blocks)
    assert (found.double() - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(found, block_linear(x, packed))
    assert weight.num_bytes == packed.num_bytes > 0
    assert torch.equal(weight.rows(torch.tensor([23, 0])), torch.from_numpy(dequantize(blocks))[[23, 0]])
